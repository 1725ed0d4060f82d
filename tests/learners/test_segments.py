"""Texts in segments: the log-probabilities and gradients of whole texts, within a number of tokens for each pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import policygrad as pg
from doubles.algorithms import runnable
from doubles.long_texts import FAMILIES, built, make_batch, make_branching_batch
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.forward import build_evaluator
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.packing import TokenSequences, pack_micro_batches
from policygrad.learners.local.segments import find_saving, plan_passes
from policygrad.models.adapters import add_adapters
from policygrad.models.lora_config import Lora
from policygrad.training.config.supervised import SFTConfig
from policygrad.training.sft import accumulate_sft_gradient
from policygrad.training.supervised import LocalSupervisedLearner

FAST = ("gpt2", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_5", "falcon_h1")
"""Plain, windows, windows and sinks, latent attention, delta rules, Mamba beside attention."""
WHOLE = ("cohere", "cohere2", "cohere2_moe", "nanochat", "minicpm3", "llama4", "diffllama")
"""Models that scale their logits outside of the head, attend in chunks, or twice in a layer: read as whole texts."""
WHOLE += ("gemma2", "bloom", "mpt", "deepseek_v32", "glm_moe_dsa")
"""So are those with a cap on logits, positions by distance, and a choice of tokens to attend to."""
EXACT = ("gpt2", "gpt_neo", "opt", "biogpt")  # nothing of which is computed in float32


LENGTHS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(drawn=LENGTHS, prompt=st.integers(1, 150), budget=st.integers(3, 90), texts_each=st.integers(1, 4))
def test_every_token_is_read_within_the_budget(
    drawn: list[tuple[int, int, int]], prompt: int, budget: int, texts_each: int
) -> None:
    """Texts of up to four groups, some of which have the same tokens but for their last ones."""
    g = torch.Generator().manual_seed(0)
    groups = torch.tensor(sorted(group for group, _, _ in drawn)).unique(return_inverse=True)[1]
    base = torch.randint(3, 9, (60,), generator=g)
    mask = torch.arange(60) < torch.tensor([n for _, n, _ in drawn])[:, None]
    tokens = torch.stack(
        [torch.where(torch.arange(60) < 30 * kind, base, 3 + kind + i % 5) for i, (_, _, kind) in enumerate(drawn)]
    )
    prompts = tuple(torch.full((max(1, prompt // (i + 1)),), 30 + i) for i in range(int(groups.max()) + 1))
    batch = pg.Batch(mask=mask, group=groups, reward=torch.zeros(len(drawn)), tokens=tokens, prompts=prompts)
    texts = TokenSequences.of(batch, torch.arange(len(drawn))).sort()
    shared = texts.shared_prefix_lengths()
    units = np.arange(len(drawn)) // texts_each  # texts of a completion
    plans = plan_passes(texts.lengths, shared, units, budget)
    new = int((texts.lengths - shared).sum())
    is_long = bool(texts.lengths.max() > budget)
    saving = find_saving(texts.lengths, shared, units, budget)
    assert saving == 1 if is_long else texts_each > 1 or saving < 1
    for plan in plans:  # completions are whole, in one pass or in parts of one
        assert not set(units[plan.texts]) & set(np.delete(units, plan.texts))
        assert not plan.parts or np.array_equal(np.concatenate([x.texts for x in plan.parts]), plan.texts)
    plans = [part for plan in plans for part in plan.parts or (plan,)]
    assert np.array_equal(np.concatenate([plan.texts for plan in plans]), np.arange(len(drawn)))
    segments = {segment for plan in plans for segment in plan.path}
    read = sum(segment.end - segment.begin for segment in segments)
    for plan in plans:
        depth = plan.path[-1].end if plan.path else 0
        assert [segment.begin for segment in plan.path] == [0, *(segment.end for segment in plan.path)][
            : len(plan.path)
        ]
        own, before = 0, None
        for i in plan.texts:
            assert texts.lengths[i] > depth
            assert before is None or shared[i] >= depth
            own += int(texts.lengths[i] - (depth if before is None else shared[i]))
            before = i
        assert own <= budget
        read += own
    assert max(segment.end - segment.begin for segment in segments) <= budget if segments else True
    assert read <= new + 64 * len(plans) * 2  # short beginnings are read again


def accumulate(model: nn.Module, algorithm: pg.Algorithm, batch: pg.Batch, config: LearnerConfig) -> tuple[Any, Tensor]:
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, config=config))
    batch = learner.evaluate(algorithm.apply_filters(batch), algorithm.needs)
    if batch.logp_old is not None:  # as if the policy had moved since
        batch = replace(batch, logp_old=batch.logp_old + 0.1 * torch.sin(torch.arange(140.0))[None])
    shaped = algorithm.shape_rewards(batch)
    psi, batch = algorithm.compute_advantages(batch, shaped), algorithm.add_critic_targets(batch, shaped)
    metrics = learner.build_problem(batch, psi, algorithm).accumulate()
    return metrics, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("make", [make_batch, make_branching_batch])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in FAST else pytest.mark.full) for k in FAMILIES])
def test_log_probabilities_and_gradients_are_those_of_whole_texts(kind: str, make: Callable[[], pg.Batch]) -> None:
    model, batch, gradients, reads = built(kind), make(), list[Tensor](), list[int]()
    evaluator = build_evaluator(model, 1.0)
    assert evaluator.network.reads_segments is (kind not in WHOLE)
    if kind in WHOLE:
        return
    evaluator = replace(evaluator, window=None)
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: reads.append(args[0].numel()))
    weight = torch.linspace(-1, 2, batch.mask.numel(), dtype=torch.float64).view(batch.mask.shape)
    for budget in (10**6, 40):
        reads.clear()
        model.zero_grad()
        logp = torch.zeros(batch.mask.shape, dtype=torch.float64)
        for pack in pack_micro_batches(batch, torch.arange(8), budget, can_follow=lambda saving: True):
            result = evaluator(pack)
            (weight[pack.rows] * result).sum().backward()
            logp[pack.rows] = result.detach()
        gradients += [logp, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]
    is_tree = FAMILIES[kind].learning == "tree"
    assert (
        max(reads) <= (40 if is_tree else 3 * 40) < 150
    )  # without a tree what texts of a pass have in common is read for each
    bound = 1e-13 if kind in EXACT else 2e-7 if is_tree else 2e-6  # of float32, 1e-7
    torch.testing.assert_close(gradients[2], gradients[0], rtol=0, atol=10 * bound)
    assert float((gradients[3] - gradients[1]).norm() / gradients[1].norm()) < bound


KINDS = {"in full": "qwen3", "adapters": "qwen3", "recomputed": "qwen3", "with a cache": "qwen3_5"}
ALGORITHMS = ("grpo", "gspo", "ppo", "prime", "ppo_penalty", "cpgd", "high_entropy")


@pytest.mark.parametrize(
    ("how", "name"),
    [*product(["in full"], ALGORITHMS), *product(["adapters", "recomputed", "with a cache"], ("grpo", "ppo"))],
)
def test_an_update_in_segments_is_that_of_whole_texts(how: str, name: str) -> None:
    """After the weights have moved: ratios are not 1."""
    algorithm, results = runnable(name).with_max_tokens(140), list[tuple[Any, Tensor]]()
    for budget in (10**6, 50):
        model = built(KINDS[how])
        if how == "adapters":
            model = add_adapters(model, Lora(rank=2)).double()
            with torch.no_grad():
                for key, p in model.named_parameters():
                    if "lora_B" in key:
                        p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype)
        config = LearnerConfig(micro_tokens=budget, gradient_checkpointing=how == "recomputed")
        results.append(accumulate(model, algorithm, make_batch(), config))
    (expected, exact), (found, gradient) = results
    assert float((gradient - exact).norm() / exact.norm()) < 1e-6
    assert expected["tokens/computed"].value <= found["tokens/computed"].value < expected["tokens/offered"].value
    for key in expected.keys() - {"completions/computed", "tokens/computed"}:
        assert found[key].value == pytest.approx(expected[key].value, rel=1e-5, abs=1e-6), key


def test_a_fine_tuning_update_in_segments_is_that_of_whole_texts() -> None:
    batch, gradients, losses = (
        replace(make_batch(), group=torch.tensor([0, 0, 0, 0, 0, 1, 2, 2])),
        list[Tensor](),
        list[float](),
    )
    for budget in (10**6, 50):
        model = built("qwen3")
        config = SFTConfig(data="unused", lr=1e-3, learner=LearnerConfig(micro_tokens=budget))
        shard = LocalSupervisedLearner(model, config, 1)
        losses.append(accumulate_sft_gradient(shard, batch)["loss"])
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-7)
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-6
