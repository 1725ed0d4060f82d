"""Common beginnings that are read once by a model's own cache: the log-probabilities and gradients of texts read one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.architectures import families
from policygrad.learners.local.cached_prefixes import plan_prefixes
from policygrad.learners.local.forward import Evaluator, build_evaluator, choose_kernels
from policygrad.learners.local.packing import Pack, pack_micro_batches
from policygrad.models.loading import load_model

FAST = (
    "qwen3_5_moe",
    "falcon_h1",
    "lfm2",
    "kimi_linear",
)  # delta rules with experts, Mamba beside attention, convolutions
BY_CACHE = {f.type: f for f in families() if f.learning == "cache"}


def built(kind: str) -> Any:
    torch.manual_seed(0)
    return load_model(tf.AutoModelForCausalLM.from_config(BY_CACHE[kind].config()).eval())


def uneven_pack() -> Pack:
    """Two groups after prompts of two lengths, with a completion that is given twice and two that begin alike; and a text alone."""
    g = torch.Generator().manual_seed(2)
    lengths = torch.tensor([21, 21, 9, 30, 2, 17, 12])
    mask, tokens = torch.arange(30) < lengths[:, None], torch.randint(3, 40, (7, 30), generator=g)
    tokens[1], tokens[5, :8] = tokens[0], tokens[3, :8]
    batch = pg.Batch(
        mask=mask,
        group=torch.tensor([0, 0, 0, 1, 1, 1, 2]),
        reward=torch.zeros(7),
        tokens=tokens,
        prompts=tuple(torch.randint(3, 40, (n,), generator=g) for n in (33, 70, 11)),
    )
    (pack,) = pack_micro_batches(batch, torch.arange(7), 10**6)
    return pack


def differentiate(evaluator: Evaluator, pack: Pack) -> tuple[Tensor, Tensor]:
    """Return log π [b, T] and the gradient [P] of a weighted sum of it."""
    evaluator.model.zero_grad()
    logp = evaluator(pack)
    (torch.linspace(-1, 2, logp.numel()).view(logp.shape) * logp).sum().backward()
    parameters = [p for p in evaluator.model.parameters() if p.requires_grad]
    return logp.detach(), torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in FAST else pytest.mark.full) for k in BY_CACHE])
def test_log_probabilities_and_gradients_are_those_of_texts_alone(kind: str) -> None:
    evaluator, pack = build_evaluator(built(kind), 1.0), uneven_pack()
    if evaluator.window is not None:  # sparse attention of a few tokens, beyond which texts are read alone
        assert pack.paths.shape[1] > evaluator.window
        assert not evaluator.network_for(pack).reads_prefixes
        return
    num_read, embeddings = list[int](), evaluator.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, out: num_read.append(args[0].numel()))
    logp, gradient = differentiate(evaluator, pack)
    once = sum(num_read)
    num_read.clear()
    alone = replace(evaluator, network=replace(evaluator.network, reads_prefixes=False))
    expected, exact = differentiate(alone, pack)
    assert float((logp - expected).abs().max()) < 1e-5
    assert float((gradient - exact).norm() / exact.norm()) < 1e-5
    assert once < 0.7 * sum(num_read)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=12))
def test_a_plan_reads_every_token_of_every_text(drawn: list[tuple[int, int]]) -> None:
    lengths = np.array([length for length, _ in drawn])
    shared = np.array([0, *(min(b[1], b[0], a[0]) for a, b in itertools.pairwise(drawn))])
    plan = plan_prefixes(lengths, shared)
    if plan is None:
        return
    assert sorted(np.concatenate(plan.calls).tolist()) == list(range(len(lengths)))
    assert (np.diff(plan.owners) >= 0).all()
    for text, owner in enumerate(plan.owners.tolist()):
        common = plan.lengths[owner]
        assert 1 <= common < lengths[text]
        assert text == plan.firsts[owner] or shared[text] >= common  # the same beginning as the text before it


def test_the_most_tokens_are_saved() -> None:
    lengths = np.full(8, 100)
    two_groups = plan_prefixes(lengths, np.array([0, 60, 60, 60, 5, 80, 80, 80]))
    assert two_groups is not None
    assert (two_groups.lengths.tolist(), two_groups.firsts.tolist()) == ([60, 80], [0, 4])
    header = plan_prefixes(lengths, np.array([0, *[50] * 7]))  # one beginning of all
    assert header is not None
    assert header.lengths.tolist() == [50]
    assert plan_prefixes(lengths, np.array([0, *[3] * 7])) is None  # two calls would cost more
    assert plan_prefixes(lengths, np.zeros(8, dtype=np.int64)) is None


def test_long_and_short_texts_are_read_in_calls_of_their_own() -> None:
    lengths, shared = np.array([2000, 2000, 2000, 1010, 1010, 1010]), np.array([0, *[1000] * 5])
    plan = plan_prefixes(lengths, shared)
    assert plan is not None
    assert [x.tolist() for x in plan.calls] == [[0, 1, 2], [3, 4, 5]]


def test_what_has_no_cache_reads_texts_alone() -> None:
    """Recomputed and compiled blocks, and experts whose load is balanced where each token is read."""
    evaluator = build_evaluator(built("lfm2"), 1.0)
    assert choose_kernels(evaluator, pg.LearnerConfig()).network.reads_prefixes
    for config in (pg.LearnerConfig(gradient_checkpointing=True), pg.LearnerConfig(compile=True)):
        assert not choose_kernels(evaluator, config).network.reads_prefixes
