"""Bytes of a plan: by hand, against what the library counts and holds, and what can never be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from policygrad.checkpoint.manager import MAX_SNAPSHOT_BYTES as MANAGER_SNAPSHOT_BYTES
from policygrad.errors import ConfigError
from policygrad.learners.local.activation_memory import saved_activation_bytes
from policygrad.learners.local.logprobs import BUFFER_ACCELERATOR, BUFFER_CPU
from policygrad.planning.cost_model import (
    LOGITS_IN_MEMORY,
    MAX_SNAPSHOT_BYTES,
    AlgorithmCost,
    ParallelLayout,
    Workload,
    activation_bytes,
    adapted_static_bytes,
    learner_memory,
    max_concurrent_rows,
    sampler_memory,
    static_bytes,
    usable_bytes,
    weight_bytes,
    windowed_pairs,
)
from policygrad.planning.hardware import DEVICES, Efficiency
from policygrad.planning.model_shapes import KNOWN_SHAPES
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
    assert static_bytes(100, 4, 2, 0, adamw=False)["optimizer"] == 2400


def test_constants_are_those_of_the_library() -> None:
    assert {"cpu": BUFFER_CPU, "gpu": BUFFER_ACCELERATOR} == LOGITS_IN_MEMORY
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
    assert activation_bytes(of, ParallelLayout(1, dtype=dtype), nodes) == pytest.approx(counted, rel=0.25)


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
    assert activation_bytes(of, layout, 10) == 36 * 10 * 4096 * 2 + activation_bytes(of, ParallelLayout(1), 10) / 36


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
    with pytest.raises(ConfigError, match="does not work with several learners"):
        ParallelLayout(2, adapter_rank=2, base_bits=4)


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
