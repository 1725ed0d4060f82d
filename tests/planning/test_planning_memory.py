"""Bytes of a plan: by hand, against what the library counts and holds, and what can never be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import measure_plan_memory
import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from policygrad.checkpoint.manager import MAX_SNAPSHOT_BYTES as MANAGER_SNAPSHOT_BYTES
from policygrad.errors import ConfigError
from policygrad.learners.config import OptimizerConfig
from policygrad.learners.local.activation_memory import saved_activation_bytes
from policygrad.learners.local.logprobs import BUFFER_ACCELERATOR, BUFFER_CPU, MAX_CACHED
from policygrad.learners.optimizers import OPTIMIZERS
from policygrad.planning.cost_model import (
    CACHED_PROBABILITIES,
    LOGITS_IN_MEMORY,
    MAX_SNAPSHOT_BYTES,
    AlgorithmCost,
    OptimizerState,
    ParallelLayout,
    Workload,
    activation_bytes,
    adapted_static_bytes,
    learner_memory,
    max_concurrent_rows,
    reads_segments,
    sampler_memory,
    segment_bytes,
    static_bytes,
    usable_bytes,
    weight_bytes,
    windowed_pairs,
)
from policygrad.planning.hardware import DEVICES, Efficiency
from policygrad.planning.model_shapes import KNOWN_SHAPES, read_dense_shape
from policygrad.planning.shapes import DenseShape
from policygrad.planning.time_model import TimeModel

H100 = DEVICES["H100"]
WORK = Workload(64, 8, 256, 1000, 3840)


def test_models_and_what_moves_them_by_hand() -> None:
    assert static_bytes(100, 2, trained_models=1, frozen_models=1) == {
        "weights": 600,  # and their masters
        "gradients": 400,
        "optimizer": 800,
        "copy of the state": 1200,
        "other models": 200,
    }
    assert static_bytes(100, 2, trained_models=2, frozen_models=1, ranks=4) == {
        "weights": 200,
        "gradients": 200,
        "optimizer": 400,
        "copy of the state": 0,
        "other models": 100,
    }
    assert static_bytes(100, 4, 1, 0)["weights"] == 400
    assert static_bytes(2**27, 4, 1, 0)["copy of the state"] == 0  # of a large one none is kept
    assert static_bytes(100, 4, 2, 0, optimizer=None)["optimizer"] == 2400


def test_what_each_optimizer_keeps_is_what_its_row_says() -> None:
    """One place for each number: the registry's."""
    for name, row in OPTIMIZERS.items():
        config = OptimizerConfig(name=name, momentum=0.5) if "momentum" in row.options else OptimizerConfig(name=name)
        state = config.describe_state()
        sizes = static_bytes(100, 2, 1, 0, optimizer=state, outer=0.25)
        hidden, outer = (row.count_moment_bytes(config.momentum, hidden=x) for x in (True, False))
        assert sizes["optimizer"] == pytest.approx(75 * hidden + 25 * outer), name
        assert (sizes["weights"], sizes["gradients"]) == (600, 400)
    assert OptimizerConfig().describe_state() == OptimizerState()
    bare = OptimizerConfig(masters="none").describe_state()
    assert static_bytes(100, 2, 1, 0, optimizer=bare)["weights"] == 200
    away = OptimizerConfig(offload=True).describe_state()
    assert static_bytes(100, 2, 1, 0, optimizer=away) | {"copy of the state": 0} == {
        "weights": 200,
        "gradients": 400,
        "optimizer": 0,
        "copy of the state": 0,
        "other models": 0,
    }


def test_what_is_away_while_sampling_is_there_while_learning() -> None:
    of, layout = KNOWN_SHAPES["Qwen3-0.6B"], ParallelLayout(1)
    held, away = (
        learner_memory(of, WORK, AlgorithmCost(), replace(layout, optimizer=OptimizerState(offload=offload)), H100)
        for offload in ("none", "sampling")
    )
    assert sum(held.static.values()) - sum(away.static.values()) == 12 * of.parameters
    assert sum(away.training.values()) - sum(held.training.values()) == 12 * of.parameters
    assert away.sampling == held.sampling
    with pytest.raises(ConfigError, match="--offload must be one of"):
        OptimizerState(offload="never")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": OptimizerState(masters="none"), "dtype": "fp32"},
            "--optimizer.masters none is for weights in bf16",
        ),
        (
            {"optimizer": OptimizerState(masters="none"), "adapter_rank": 8},
            "--optimizer.masters none is for weights in bf16",
        ),
        (
            {"gpus": 2, "optimizer": OptimizerState(offload="sampling")},
            "--learner.offload is for a learner in one process",
        ),
        ({"gpus": 3, "context_parallel": 2}, "does not divide the 3 learning devices"),
    ],
)
def test_what_train_refuses_is_not_planned(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelLayout(**{"gpus": 1, **options})


def test_a_further_token_of_a_long_text_costs_its_keys_values_and_states() -> None:
    """Not its activations: what it leaves to the segments behind it."""
    of, layout = KNOWN_SHAPES["Qwen3-8B"], ParallelLayout(1, micro_tokens=4096)
    texts = [Workload(1, 8, 256, length, length) for length in (20_000, 20_001)]
    less, more = (sum(learner_memory(of, work, AlgorithmCost(), layout, H100).training.values()) for work in texts)
    keys, states = 36 * 2 * 1024 * (2 + 4) + 2 * 1024 * 4, 4096 * (2 * 2 + 4)
    assert more - less == keys + states
    assert less == sum(
        {
            "activations": activation_bytes(of, layout, 4096, 4096),
            "logits": 2**27 * 12,
            "gradient of the head": 4 * of.vocabulary * of.hidden,
            "gradients in bf16": 2 * of.parameters,
            **segment_bytes(of, layout, 20_256 - 4096, 20_000 - 4096),
        }.values()
    )
    whole = replace(layout, micro_tokens=2**15)
    assert sum(learner_memory(of, texts[0], AlgorithmCost(), whole, H100).training.values()) > 3 * less


def test_texts_are_read_whole_where_the_learner_reads_them_whole() -> None:
    dense, recurrent = KNOWN_SHAPES["Qwen3-8B"], KNOWN_SHAPES["Qwen3.5-9B"]
    long = Workload(1, 8, 256, 20_000, 20_000)
    layout = ParallelLayout(1, checkpointing=True)
    training = learner_memory(recurrent, long, AlgorithmCost(), layout, H100).training
    assert training["activations"] == activation_bytes(recurrent, layout, long.max_tokens)
    assert not reads_segments(recurrent, layout)
    assert not reads_segments(dense, ParallelLayout(2, context_parallel=2))
    assert reads_segments(dense, ParallelLayout(2, checkpointing=True))
    assert reads_segments(recurrent, ParallelLayout(1))


def test_recurrent_layers_keep_a_state_for_each_segment() -> None:
    of, layout = KNOWN_SHAPES["Qwen3.5-9B"], ParallelLayout(1, micro_tokens=4096)
    states = sum(layer.count * layer.state_numbers for layer in of.layer_shapes)
    two, three = (sum(segment_bytes(of, layout, tokens, 0).values()) for tokens in (8192, 12_288))
    keys = sum(layer.count * layer.attended_numbers for layer in of.layer_shapes)
    widest = max(layer.attended_numbers for layer in of.layer_shapes)
    assert three - two == states * 8 + 4096 * (keys * (2 + 4) + widest * 4)


def test_learners_that_share_a_text_each_have_their_part_and_one_layer_whole() -> None:
    of, long = KNOWN_SHAPES["Qwen3-8B"], Workload(1, 8, 256, 32_512, 32_512)
    alone, shared = (
        learner_memory(of, long, AlgorithmCost(), ParallelLayout(8, context_parallel=n, micro_tokens=32_768), H100)
        for n in (1, 4)
    )
    assert shared.training["activations"] == alone.training["activations"] / 4
    assert shared.training["gathered keys and values"] == 2 * 2 * 1024 * 2 * 32_768
    assert shared.static == alone.static


def test_an_engine_beside_the_learner_keeps_its_memory() -> None:
    of, layout = KNOWN_SHAPES["Qwen3-8B"], ParallelLayout(1, keeps_full_policy=False, adapter_rank=16)
    asleep, beside = (
        learner_memory(of, WORK, AlgorithmCost(), replace(layout, engine_sleeps=sleeps), DEVICES["H200"])
        for sleeps in (True, False)
    )
    assert not beside.sampling
    assert sum(beside.static.values()) == sum(asleep.static.values()) + sum(asleep.sampling.values())
    assert beside.peak_bytes > asleep.peak_bytes


def test_a_process_on_a_cpu_has_its_libraries_and_holes() -> None:
    of, layout = KNOWN_SHAPES["SmolLM2-135M"], ParallelLayout(1, dtype="fp32", micro_tokens=1024)
    work = Workload(4, 8, 64, 128, 128)
    for rank, holes in ((0, 0.7), (16, 1.85)):
        cost, layout = AlgorithmCost(), replace(layout, adapter_rank=rank)
        on_cpu, on_gpu = (learner_memory(of, work, cost, layout, DEVICES[name]) for name in ("cpu", "H100"))
        assert sum(on_cpu.static.values()) - sum(on_gpu.static.values()) == 384 * 2**20
        passes = {name: size for name, size in on_cpu.training.items() if name != "allocator's holes"}
        assert on_cpu.training["allocator's holes"] == pytest.approx(holes * sum(passes.values()))
        assert set(on_gpu.training) == set(passes)


def test_measured_updates_are_planned_within_a_tenth() -> None:
    """`scripts/measure_plan_memory.py`, whose results are committed: of all models tensors, of dense ones the process too."""
    rows = json.loads((Path(__file__).parents[2] / "docs" / "results" / "plan-memory.json").read_text())["rows"]
    assert [row["run"] for row in rows] == list(measure_plan_memory.RUNS)
    for row in rows:
        assert row["planned_tensors"] == pytest.approx(row["tensors"], rel=0.1), row["run"]
        run = measure_plan_memory.RUNS[row["run"]]
        if run.config["model_type"] == "qwen3":  # the others' layers are counted, which takes seconds
            shape = read_dense_shape(run.config, "", "")
            memory = learner_memory(shape, run.workload, AlgorithmCost(), run.layout, DEVICES["cpu"])
            peak = sum((memory.static | memory.training).values()) - memory.static.get("copy of the state", 0.0)
            assert peak == row["planned_process"]
            assert peak == pytest.approx(row["process"], rel=0.1), row["run"]


def test_constants_are_those_of_the_library() -> None:
    assert {"cpu": BUFFER_CPU, "gpu": BUFFER_ACCELERATOR} == LOGITS_IN_MEMORY
    assert MAX_CACHED == CACHED_PROBABILITIES
    assert MAX_SNAPSHOT_BYTES == MANAGER_SNAPSHOT_BYTES


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_activations_are_what_the_library_counts(dtype: str, torch_dtype: torch.dtype) -> None:
    """On an architecture of its own, tensor by tensor."""
    of = DenseShape("7M", 256, 768, 6, 4, 2, 64, 8192, tied=True, qk_norm=True)
    config = tf.Qwen3Config(
        vocab_size=of.vocabulary,
        hidden_size=of.hidden,
        intermediate_size=of.intermediate,
        num_hidden_layers=of.layers,
        num_attention_heads=of.heads,
        num_key_value_heads=of.kv_heads,
        head_dim=of.head_dim,
        tie_word_embeddings=True,
    )
    tokens, prompt, completion = 1024, 100, 200
    counted = saved_activation_bytes(config, torch_dtype, tokens, prompt, completion, 8)
    rows = max(1, round(tokens / (prompt / 8 + completion)))  # as many as it makes of them
    nodes = -(-rows // 8) * prompt + rows * (completion - 1)
    assert activation_bytes(of, ParallelLayout(1, dtype=dtype), nodes) == pytest.approx(counted, rel=0.05)


def test_eight_learners_by_hand() -> None:
    of, asks = KNOWN_SHAPES["Qwen3-8B"], AlgorithmCost(frozen_models=1)
    result = learner_memory(of, WORK, asks, ParallelLayout(8), H100)
    eighth = of.parameters / 8
    assert result.static["weights"] == result.static["gradients"] == result.static["other models"] == 4 * eighth
    assert result.static["optimizer"] == 8 * eighth
    assert result.static["gathered layers"] == 2 * (2 * of.layer_parameters + 2 * of.embedding_parameters)
    assert result.static["full policy"] == 2 * of.parameters
    assert result.training["activations"] == activation_bytes(of, ParallelLayout(8), 16384)
    assert (
        result.sampling["keys and values"] == 64 * 4096 * 2 * of.cache_numbers_per_token
    )  # 512 completions, dealt to eight
    static_bytes = sum(result.static.values())
    assert result.peak_bytes == static_bytes + max(sum(result.training.values()), sum(result.sampling.values()))


def test_a_sampler_draws_as_many_as_it_holds() -> None:
    of = KNOWN_SHAPES["Qwen3-8B"]
    layout = ParallelLayout(8, samplers=1)
    rows = max_concurrent_rows(of, WORK, layout, H100)
    assert 1 < rows < 512
    assert sampler_memory(of, WORK, layout, H100).peak_bytes <= usable_bytes(H100)
    assert sampler_memory(of, WORK, replace(layout, decode_rows=rows + 1), H100).peak_bytes <= usable_bytes(H100)
    two = replace(layout, samplers=2, tensor_parallel=2)
    assert max_concurrent_rows(of, WORK, two, H100) > 2 * rows  # the weights are there once
    assert max_concurrent_rows(KNOWN_SHAPES["Llama-3.1-70B"], WORK, layout, H100) == 1


def test_under_an_engine_no_learner_has_the_whole_policy() -> None:
    of, asks = KNOWN_SHAPES["Qwen3-8B"], AlgorithmCost(frozen_models=1)
    for layout in (ParallelLayout(8), ParallelLayout(8, samplers=4)):
        own, engine = (
            learner_memory(of, WORK, asks, replace(layout, keeps_full_policy=uninterrupted), H100)
            for uninterrupted in (True, False)
        )
        assert sum(own.static.values()) - sum(engine.static.values()) == 2 * of.parameters
    in_turns = learner_memory(of, WORK, asks, ParallelLayout(8, tensor_parallel=2, keeps_full_policy=False), H100)
    assert in_turns.sampling["policy shard"] == 2 * of.parameters / 2
    assert in_turns.sampling["keys and values"] == pytest.approx(
        128 * WORK.mean_attended_tokens * 2 * of.cache_numbers_per_token / 2
    )
    apart = ParallelLayout(8, samplers=1)
    assert max_concurrent_rows(of, WORK, replace(apart, keeps_full_policy=False), H100) > max_concurrent_rows(
        of, WORK, apart, H100
    )


def test_checkpointing_keeps_a_layers_entry() -> None:
    of, layout = KNOWN_SHAPES["Qwen3-8B"], ParallelLayout(1, checkpointing=True)
    outside = 10 * 4096 * (4 + 4 * 2)  # the last norm, and the states with their gradient
    whole = activation_bytes(of, ParallelLayout(1), 10)
    assert activation_bytes(of, layout, 10) == 36 * 10 * 4096 * 2 + (whole - outside) / 36 + outside


@given(
    st.sampled_from(sorted(KNOWN_SHAPES)),
    st.integers(0, 6),
    st.sampled_from(["bf16", "fp32"]),
    st.booleans(),
    st.integers(0, 2),
)
def test_more_devices_never_need_more_memory_each(
    name: str, power: int, dtype: str, checkpointing: bool, frozen: int
) -> None:
    asks, layout = (
        AlgorithmCost(frozen_models=frozen),
        ParallelLayout(2**power, dtype=dtype, checkpointing=checkpointing),
    )
    some = learner_memory(KNOWN_SHAPES[name], WORK, asks, layout, H100)
    more = learner_memory(KNOWN_SHAPES[name], WORK, asks, replace(layout, gpus=2 * layout.gpus), H100)
    assert more.peak_bytes <= some.peak_bytes


@given(st.sampled_from(sorted(KNOWN_SHAPES)), st.integers(1, 2))
def test_what_is_asked_for_more_takes_more(name: str, trained: int) -> None:
    layout = ParallelLayout(4)
    result = [
        learner_memory(KNOWN_SHAPES[name], WORK, AlgorithmCost(trained_models=n), layout, H100).peak_bytes
        for n in (trained, trained + 1)
    ]
    assert result[0] < result[1]
    longer = replace(WORK, max_completion_tokens=30000)
    assert (
        learner_memory(KNOWN_SHAPES[name], longer, AlgorithmCost(), layout, H100).peak_bytes
        > learner_memory(KNOWN_SHAPES[name], WORK, AlgorithmCost(), layout, H100).peak_bytes
    )


def test_adapters_by_hand() -> None:
    of = DenseShape("", 4, 8, layers=2, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
    # q 4+4, k and v 4+2 each, o 4+4, gate and up 4+8 each, down 8+4
    assert of.count_adapters(3) == 3 * 2 * (8 + 6 + 6 + 8 + 12 + 12 + 12)
    count = of.count_adapters(2)
    layout = ParallelLayout(1, adapter_rank=2)
    assert adapted_static_bytes(of, layout, trained_models=1, frozen_models=1) == {
        "frozen weights": 2 * of.parameters,
        "adapters": 4 * count,
        "gradients": 4 * count,
        "optimizer": 8 * count,
        "copy of the state": 12 * count,
        "other models": 4 * count,
    }
    four = replace(layout, base_bits=4)
    linear = 2 * 144
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    assert weight_bytes(of, four) == pytest.approx(linear * bits / 8 + 2 * (of.parameters - linear))
    sharded = adapted_static_bytes(of, ParallelLayout(2, adapter_rank=2), 1, 1)
    assert (sharded["frozen weights"], sharded["optimizer"]) == (2 * of.parameters, 4 * count)
    several = adapted_static_bytes(of, ParallelLayout(2, adapter_rank=2, base_bits=4), 1, 1)
    assert several["frozen weights"] == pytest.approx(linear * bits / 8 + 4 * (of.parameters - linear) / 2)


def test_adapters_save_memory_and_time() -> None:
    of, asks = KNOWN_SHAPES["Qwen3-8B"], AlgorithmCost()
    for checkpointing in (False, True):
        full = ParallelLayout(1, checkpointing=checkpointing)
        layouts = [full, replace(full, adapter_rank=16), replace(full, adapter_rank=16, base_bits=4)]
        static = [sum(learner_memory(of, WORK, asks, layout, H100).static.values()) for layout in layouts]
        assert static == sorted(static, reverse=True)
        seconds = [
            TimeModel(of, H100, Efficiency(), layout).training_seconds(WORK.count_tokens(), asks) for layout in layouts
        ]
        assert seconds[1] < 0.9 * seconds[0]  # no gradients of frozen weights
        assert seconds[1] < seconds[2]  # which are unpacked


@given(st.integers(1, 40), st.integers(1, 50))
def test_pairs_in_windows_by_enumeration(window: int, length: int) -> None:
    assert windowed_pairs(length, window) == sum(min(place + 1, window) for place in range(length))


def test_pairs_in_windows_of_a_step_by_enumeration() -> None:
    work = Workload(2, 3, 5, 4, 9)
    for shared in (True, False):
        expected = 0
        for i, length in enumerate(work.lengths):
            first = 0 if not shared or i < work.prompts else work.prompt_tokens
            expected += sum(min(place + 1, 6) for place in range(first, work.prompt_tokens + length - 1))
        assert work.count_tokens(shared, [6]).pairs(6) == expected
