"""The learner's passes over tokens that the environment wrote: read only where a term predicts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg
from doubles.batches import branching, make_batch, naive_logp
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.loading import load_model

TWO_TERMS = replace(pg.ECHO, terms=(pg.ObservationNLL(0.3), pg.PositiveNLL(0.1, threshold=0.0)))


@pytest.fixture(scope="module")
def model(random_model: Path) -> nn.Module:
    return load_model(str(random_model)).double()


def with_observations(batch: pg.Batch) -> pg.Batch:
    """Every token that was not sampled, one at each completion's end included, is the environment's, but for the second column."""
    marks = ~batch.mask
    marks[:, 1] = False
    return replace(batch, observation=marks)


@pytest.mark.parametrize("several", [False, True], ids=["one text", "several texts"])
@pytest.mark.parametrize("micro_tokens", [30, 10_000])
@pytest.mark.parametrize("algorithm", [pg.ECHO, TWO_TERMS], ids=["echo", "two terms"])
def test_the_gradient_is_that_of_text_by_text(
    model: nn.Module, algorithm: pg.Algorithm, micro_tokens: int, several: bool
) -> None:
    batch = with_observations(make_batch(5))
    batch = branching(batch) if several else batch
    assert bool(batch.observed_tokens.any())
    config = LearnerConfig(micro_tokens=micro_tokens)
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, temperature=0.7, config=config))
    psi = algorithm.compute_advantages(batch)
    learner.optimizer.clear_gradients()
    metrics = learner.build_problem(batch, psi, algorithm).accumulate()
    got = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logp = naive_logp(model, batch, 0.7)
    expected = torch.autograd.grad(
        pg.surrogate(logp, batch, psi, algorithm), list(model.parameters()), allow_unused=True
    )
    largest = max(float(e.abs().max()) for e in expected if e is not None)
    for g, e in zip(got, expected, strict=True):
        assert e is None or float((g - e).abs().max()) <= 1e-5 * largest
    nll = -logp[batch.observed_tokens].mean().item()
    assert metrics["observation/nll"].value == pytest.approx(nll, rel=1e-5)


def weights_after(model_path: Path, algorithm: pg.Algorithm, batch: pg.Batch) -> list[Tensor]:
    model = load_model(str(model_path), dtype="fp32")
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=1e-3, steps=8))
    scored = learner.evaluate(batch, algorithm.needs)
    scored = algorithm.add_critic_targets(scored)
    learner.update(scored, algorithm.compute_advantages(scored), algorithm)
    return [p.detach().clone() for p in model.parameters()]


def test_marks_change_no_bit_of_an_algorithm_that_does_not_read_them(random_model: Path) -> None:
    batch = make_batch(5)
    batch = replace(batch, reward=batch.reward.float())
    for algorithm in (pg.GRPO, pg.DAPO, pg.PPO):
        plain, marked = (weights_after(random_model, algorithm, b) for b in (batch, with_observations(batch)))
        assert all(torch.equal(a, b) for a, b in zip(plain, marked, strict=True))


def test_a_group_without_advantage_still_predicts(random_model: Path) -> None:
    """GRPO skips completions of equal rewards; what the environment wrote in them is learned."""
    batch = with_observations(make_batch(5))
    batch = replace(batch, reward=torch.ones(len(batch.mask)))
    before = weights_after(random_model, replace(pg.GRPO, terms=()), batch)
    after = weights_after(random_model, pg.ECHO, batch)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_sampling_mask_does_not_reach_the_environments_tokens(model: nn.Module) -> None:
    """The policy sampled under top-k, here with a single token left; what the environment wrote is of the whole vocabulary."""
    batch = with_observations(make_batch(5))
    assert batch.tokens is not None
    ids = tuple(tokens[mask].int() for tokens, mask in zip(batch.tokens, batch.mask, strict=True))
    under_mask = replace(batch, sampling_mask_counts=batch.mask.int(), sampling_mask_ids=ids)
    learner = LocalLearner(model, LearnerSpec(pg.ECHO, lr=0.0, steps=1))
    results = []
    for b in (batch, under_mask):
        metrics = learner.build_problem(b, torch.zeros(b.mask.shape, dtype=torch.float64), pg.ECHO).accumulate()
        results.append(metrics["observation/nll"].value)
    assert results[0] == pytest.approx(results[1], rel=1e-9)
    assert learner.evaluate(under_mask, frozenset({"logp_old"})).logp_old.abs().max() < 1e-12  # type: ignore[union-attr]
