"""Bytes of a plan: by hand, against what the library counts and holds, and what can never be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from policygrad.checkpoint.manager import KEPT
from policygrad.learners.local.activation_memory import kept_bytes
from policygrad.learners.local.logprobs import BUFFER, BUFFER_ACCELERATOR
from policygrad.planning.cost_model import (
    KEPT_COPY,
    LOGITS,
    Asks,
    Layout,
    Work,
    kept,
    learner,
    sampler,
    slots,
    static,
    usable,
)
from policygrad.planning.hardware import DEVICES
from policygrad.planning.model_shapes import NAMED, Shape

H100 = DEVICES["H100"]
WORK = Work(64, 8, 256, 1000, 3840)


def test_models_and_what_moves_them_by_hand() -> None:
    assert static(100, 2, trained=1, frozen=1) == {
        "weights": 600,  # and their masters
        "gradients": 400,
        "optimiser": 800,
        "copy of the state": 1200,
        "other models": 200,
    }
    assert static(100, 2, trained=2, frozen=1, ranks=4) == {
        "weights": 200,
        "gradients": 200,
        "optimiser": 400,
        "copy of the state": 0,
        "other models": 100,
    }
    assert static(100, 4, 1, 0)["weights"] == 400
    assert static(2**27, 4, 1, 0)["copy of the state"] == 0  # of a large one none is kept
    assert static(100, 4, 2, 0, adamw=False)["optimiser"] == 2400


def test_constants_are_those_of_the_library() -> None:
    assert {"cpu": BUFFER, "gpu": BUFFER_ACCELERATOR} == LOGITS
    assert KEPT_COPY == KEPT


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_activations_are_what_the_library_counts(dtype: str, torch_dtype: torch.dtype) -> None:
    """On an architecture of its own, tensor by tensor."""
    of = Shape("7M", 256, 768, 6, 4, 2, 64, 8192, tied=True, qk_norm=True)
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
    counted = kept_bytes(config, torch_dtype, tokens, prompt, completion, 8)
    rows = max(1, round(tokens / (prompt / 8 + completion)))  # as many as it makes of them
    nodes = -(-rows // 8) * prompt + rows * (completion - 1)
    assert kept(of, Layout(1, dtype=dtype), nodes) == pytest.approx(counted, rel=0.25)


def test_eight_learners_by_hand() -> None:
    of, asks = NAMED["Qwen3-8B"], Asks(frozen=1)
    found = learner(of, WORK, asks, Layout(8), H100)
    eighth = of.parameters / 8
    assert found.always["weights"] == found.always["gradients"] == found.always["other models"] == 4 * eighth
    assert found.always["optimiser"] == 8 * eighth
    assert found.always["gathered layers"] == 2 * (2 * of.layer + 2 * of.embedding)
    assert found.always["the policy, whole"] == 2 * of.parameters
    assert found.learning["activations"] == kept(of, Layout(8), 16384)
    assert found.drawing["keys and values"] == 64 * 4096 * 2 * of.cache  # 512 completions, dealt to eight
    static_bytes = sum(found.always.values())
    assert found.peak == static_bytes + max(sum(found.learning.values()), sum(found.drawing.values()))


def test_a_sampler_draws_as_many_as_it_holds() -> None:
    of = NAMED["Qwen3-8B"]
    layout = Layout(8, samplers=1)
    rows = slots(of, WORK, layout, H100)
    assert 1 < rows < 512
    assert sampler(of, WORK, layout, H100).peak <= usable(H100)
    assert sampler(of, WORK, replace(layout, decode_rows=rows + 1), H100).peak <= usable(H100)
    two = replace(layout, samplers=2, tensor=2)
    assert slots(of, WORK, two, H100) > 2 * rows  # the weights are there once
    assert slots(NAMED["Llama-3.1-70B"], WORK, layout, H100) == 1


def test_under_an_engine_no_learner_has_the_whole_policy() -> None:
    of, asks = NAMED["Qwen3-8B"], Asks(frozen=1)
    for layout in (Layout(8), Layout(8, samplers=4)):
        own, engine = (learner(of, WORK, asks, replace(layout, whole=whole), H100) for whole in (True, False))
        assert sum(own.always.values()) - sum(engine.always.values()) == 2 * of.parameters
    in_turns = learner(of, WORK, asks, Layout(8, tensor=2, whole=False), H100)
    assert in_turns.drawing["the policy's share"] == 2 * of.parameters / 2
    assert in_turns.drawing["keys and values"] == pytest.approx(128 * WORK.seen * 2 * of.cache / 2)
    apart = Layout(8, samplers=1)
    assert slots(of, WORK, replace(apart, whole=False), H100) > slots(of, WORK, apart, H100)


def test_checkpointing_keeps_a_layers_entry() -> None:
    of, layout = NAMED["Qwen3-8B"], Layout(1, checkpointing=True)
    assert kept(of, layout, 10) == 36 * 10 * 4096 * 2 + kept(of, Layout(1), 10) / 36


@given(
    st.sampled_from(sorted(NAMED)),
    st.integers(0, 6),
    st.sampled_from(["bf16", "fp32"]),
    st.booleans(),
    st.integers(0, 2),
)
def test_more_devices_never_need_more_memory_each(
    name: str, power: int, dtype: str, checkpointing: bool, frozen: int
) -> None:
    asks, layout = Asks(frozen=frozen), Layout(2**power, dtype=dtype, checkpointing=checkpointing)
    some = learner(NAMED[name], WORK, asks, layout, H100)
    more = learner(NAMED[name], WORK, asks, replace(layout, gpus=2 * layout.gpus), H100)
    assert more.peak <= some.peak


@given(st.sampled_from(sorted(NAMED)), st.integers(1, 2))
def test_what_is_asked_for_more_takes_more(name: str, trained: int) -> None:
    layout = Layout(4)
    found = [learner(NAMED[name], WORK, Asks(trained=n), layout, H100).peak for n in (trained, trained + 1)]
    assert found[0] < found[1]
    longer = replace(WORK, budget=30000)
    assert (
        learner(NAMED[name], longer, Asks(), layout, H100).peak > learner(NAMED[name], WORK, Asks(), layout, H100).peak
    )
