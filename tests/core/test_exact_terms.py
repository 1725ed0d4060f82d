"""Entropy and KL(π_old‖π_θ) exact over the vocabulary: against their defining sums over full logits, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import policygrad as pg
from doubles.enumeration import MASK, REFERENCE, THETA, conditionals, expected_gradient, frozen_visits, logp_of
from doubles.random_batches import VOCABULARY, Random, Shape, close, gradients, make, policy, shapes
from policygrad.core.base import LossTerm


def full_logp(logits: Tensor, batch: pg.Batch) -> Tensor:
    """log π(·|s) [B, T, V] of the bigram policy at the states of the batch."""
    assert batch.tokens is not None
    start = torch.full_like(batch.tokens[:, :1], VOCABULARY)
    return torch.log_softmax(logits[torch.cat([start, batch.tokens[:, :-1]], 1)], -1)


def forward(logits: Tensor, old: Tensor, batch: pg.Batch) -> pg.Forward:
    """NaN wherever nothing was sampled."""
    now, before = full_logp(logits, batch), full_logp(old, batch)
    entropy, kl = -(now.exp() * now).sum(-1), (before.exp() * (before - now)).sum(-1)
    return pg.Forward(
        policy(logits, batch.tokens, batch.mask),
        entropy=torch.where(batch.mask, entropy, torch.nan),
        kl_old=torch.where(batch.mask, kl, torch.nan),
    )


def literal(kind: str, logits: Tensor, old: Tensor, batch: pg.Batch) -> Tensor:
    """Token by token, action by action: η/N Σ_t −Σ_a π(a) log π(a), or −β/N Σ_t Σ_a π_old(a) log(π_old(a)/π(a))."""
    total, n = logits.sum() * 0, int(batch.mask.sum())
    assert batch.tokens is not None
    for i in range(len(batch.mask)):
        for t in range(batch.mask.shape[1]):
            if batch.mask[i, t]:
                row = int(batch.tokens[i, t - 1]) if t else VOCABULARY
                p = torch.exp(logits[row]) / torch.exp(logits[row]).sum()
                q = torch.exp(old[row]) / torch.exp(old[row]).sum()
                for a in range(VOCABULARY):
                    part = -0.3 * p[a] * torch.log(p[a]) if kind == "entropy" else -0.7 * q[a] * torch.log(q[a] / p[a])
                    total = total + part / n
    return total


TERMS = {"entropy": pg.ExactEntropy(0.3, pg.TokenMean()), "kl": pg.ExactKLToOld(0.7, aggregation=pg.TokenMean())}


@pytest.mark.parametrize("kind", TERMS)
@settings(max_examples=25)
@given(shapes())
def test_gradient_and_value_are_the_defining_sums(kind: str, shape: Shape) -> None:
    batch, logits = make(shape, 0.15)
    batch = replace(batch, reward=torch.zeros_like(batch.reward))
    old = logits.detach() + 0.5 * Random(shape.seed + 1).normal(*logits.shape)
    algorithm = replace(pg.DR_GRPO, terms=(TERMS[kind],))
    out, psi = forward(logits, old, batch), torch.zeros(batch.mask.shape, dtype=torch.float64)
    paper = literal(kind, logits, old, batch)
    close(*gradients(-pg.surrogate(out, batch, psi, algorithm), logits), *gradients(paper, logits))
    torch.testing.assert_close(pg.objective(out, batch, psi, algorithm), paper.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", TERMS)
def test_loss_term_uses_the_policys_coefficients(kind: str) -> None:
    """A loss term adds to the score form's gradient; without an aggregation of its own it takes the policy's."""
    batch, logits = make(Shape((4, 3), 5, seed=2, binary=False), 0.15)
    old = logits.detach() + 0.3
    old[0, 0] += 1
    own = replace(TERMS[kind], aggregation=None)
    algorithm = replace(pg.GRPO, terms=(own,))
    out, psi = forward(logits, old, batch), algorithm.compute_advantages(batch)
    uninterrupted = gradients(pg.surrogate(out, batch, psi, algorithm), logits)[0]
    alone = gradients(pg.surrogate(out, batch, psi, replace(algorithm, terms=())), logits)[0]
    c = algorithm.coefficients(batch)
    value = torch.where(batch.mask, own.objective(out, batch, psi), 0)
    close(uninterrupted - alone, gradients(-(c * value).sum(), logits)[0])
    assert isinstance(own, LossTerm)


def test_the_exact_terms_are_what_the_sampled_ones_are_on_average() -> None:
    """By enumeration: E of the sampled entropy's gradient, and of k = β(1 − r), is the exact terms' gradient."""
    nothing = torch.zeros(MASK.shape, dtype=torch.float64)
    sampled = replace(pg.REINFORCE, shaping=(), terms=(pg.Entropy(0.5),))
    exact = frozen_visits(lambda p, q: -0.5 * (p.exp() * p).sum(-1))
    close(expected_gradient(sampled, 1, psi=nothing), exact)
    penalty = replace(sampled, terms=(pg.KLToOld(0.5),))
    result = expected_gradient(penalty, 1, sampler=REFERENCE, psi=nothing, off_policy=True)
    theta = THETA.clone().requires_grad_()
    before, now = conditionals(REFERENCE), conditionals(theta)
    visits = torch.where(MASK, logp_of(REFERENCE).exp()[:, None], 0)  # the old policy decides which states are seen
    kl = (before.exp() * (before - now)).sum(-1)
    close(result, gradients(-0.5 * (visits * kl).sum(), theta)[0])


def test_needs_and_missing_fields() -> None:
    batch, logits = make(Shape((3,), 4, seed=0, binary=False))
    psi = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for term, field in ((pg.ExactEntropy(), "entropy"), (pg.ExactKLToOld(), "kl_old")):
        algorithm = replace(pg.DR_GRPO, terms=(term,))
        assert algorithm.forward_needs == {field}
        assert algorithm.needs == frozenset()
        with pytest.raises(ValueError, match=rf"{type(term).__name__} needs Forward\.{field}, which is None"):
            pg.surrogate(policy(logits, batch.tokens, batch.mask), batch, psi, algorithm)
    assert pg.GRPO.forward_needs == frozenset()
