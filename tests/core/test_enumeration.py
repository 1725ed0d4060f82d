"""What is biased and what is not, over every completion and every group that there is: nothing is sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.enumeration import (
    BEHAVIOUR,
    COMPLETIONS,
    LONGEST,
    MASK,
    PREVIOUS,
    REFERENCE,
    REWARD,
    THETA,
    VOCABULARY,
    expected_gradient,
    frozen_visits,
    logp_of,
    true_gradient,
)
from doubles.random_batches import Random, close, gradients
from policygrad.core.advantages import FrozenRunningMean

REINFORCE = replace(pg.REINFORCE, shaping=())
RLOO = replace(pg.RLOO, shaping=())


def test_the_enumeration_is_complete() -> None:
    assert len(COMPLETIONS) == 15
    assert logp_of(THETA).exp().sum().item() == pytest.approx(1, rel=1e-14)
    assert true_gradient().abs().max() > 0.01


@pytest.mark.parametrize("baseline", [0.0, 0.37, -5.0])
def test_a_constant_baseline_is_unbiased(baseline: float) -> None:
    algorithm = replace(REINFORCE, advantage=(FrozenRunningMean(baseline=baseline),))
    close(expected_gradient(algorithm, 1), true_gradient())


def test_a_state_dependent_baseline_is_unbiased() -> None:
    b = Random(1).normal(LONGEST, VOCABULARY)[torch.arange(LONGEST), PREVIOUS]
    close(expected_gradient(REINFORCE, 1, psi=REWARD[:, None] - b), true_gradient())


@pytest.mark.parametrize("G", [2, 3])
def test_leave_one_out_is_unbiased(G: int) -> None:
    close(expected_gradient(RLOO, G), true_gradient())


@pytest.mark.parametrize("G", [2, 3])
def test_the_group_mean_shrinks_the_gradient(G: int) -> None:
    close(expected_gradient(replace(RLOO, advantage=(pg.GroupMean(),)), G), (G - 1) / G * true_gradient())


def test_the_z_score_is_biased(record_property: pytest.RecordProperty) -> None:
    """Not a multiple of the true gradient: the cosine is below 1."""
    result, truth = expected_gradient(replace(RLOO, advantage=(pg.GroupMean(), pg.GroupStd())), 3), true_gradient()
    cosine = torch.cosine_similarity(result.flatten(), truth.flatten(), dim=0).item()
    record_property("cosine", cosine)
    print(f"cosine of the z-score's expected gradient with the true one: {cosine:.4f}")
    assert 0.5 < cosine < 0.999
    assert (result - truth).abs().max() > 0.01 * truth.abs().max()


def test_the_sequence_mean_is_biased() -> None:
    """1/|o_i| weighs completions by a thing the policy chose; 1/B does not."""
    result = expected_gradient(replace(RLOO, aggregation=pg.SequenceMean()), 2)
    assert torch.cosine_similarity(result.flatten(), true_gradient().flatten(), dim=0) < 0.999


@pytest.mark.parametrize("psi", [(), (pg.LeaveOneOut(),)], ids=["reward", "leave-one-out"])
@pytest.mark.parametrize(
    ("ratio", "unbiased"), [(pg.SequenceProduct(), True), (pg.Sequence(), False), (pg.Token(), False)], ids=str
)
def test_only_the_sequence_product_is_unbiased_off_policy(ratio, unbiased: bool, psi) -> None:
    algorithm = replace(RLOO, advantage=psi, ratio=ratio, gate=pg.Importance())
    result, truth = expected_gradient(algorithm, 2, sampler=BEHAVIOUR, off_policy=True), true_gradient()
    if unbiased:
        close(result, truth)
    else:
        assert (result - truth).abs().max() > 0.01 * truth.abs().max()


def test_the_kl_in_the_reward_is_the_gradient_of_the_sequence_kl() -> None:
    """RLOO as it stands: ∇(E[R] − β KL(π‖π_ref)), each token's own and later penalties, leave-one-out and all."""
    theta = THETA.clone().requires_grad_()
    logp = logp_of(theta)
    kl = (logp.exp() * (logp - logp_of(REFERENCE))).sum()
    truth = gradients((logp.exp() * REWARD).sum() - 0.05 * kl, theta)[0]
    close(expected_gradient(pg.RLOO, 2), truth)
    assert (truth - true_gradient()).abs().max() > 0.01


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    return (q.exp() * (q - p)).sum(-1)


@pytest.mark.parametrize(
    ("form", "direction"), [("k2", reverse_kl), ("k3", forward_kl), ("r*k1", reverse_kl), ("r*k3", reverse_kl)]
)
def test_the_kl_terms_directions_on_policy(form, direction) -> None:
    algorithm = replace(REINFORCE, terms=(pg.KLToReference(1.0, form),))
    result = expected_gradient(algorithm, 1, psi=torch.zeros(MASK.shape, dtype=torch.float64))
    close(result, -frozen_visits(direction))


@pytest.mark.parametrize(("form", "reverse"), [("k2", False), ("k3", False), ("r*k1", True), ("r*k3", True)])
def test_only_the_ratio_forms_keep_their_direction_off_policy(form, reverse: bool) -> None:
    """One token only (the behaviour policy decides which states are visited): the first position's gradient."""
    algorithm = replace(REINFORCE, terms=(pg.KLToReference(1.0, form),))
    nothing = torch.zeros(MASK.shape, dtype=torch.float64)
    result = expected_gradient(algorithm, 1, sampler=BEHAVIOUR, psi=nothing, off_policy=True)[0]
    truth = -frozen_visits(reverse_kl)[0]
    if reverse:
        close(result, truth)
    else:
        assert (result - truth).abs().max() > 0.01 * truth.abs().max()


def test_the_entropy_bonus_is_the_gradient_of_the_states_entropy() -> None:
    algorithm = replace(REINFORCE, terms=(pg.Entropy(0.5),))
    nothing = torch.zeros(MASK.shape, dtype=torch.float64)
    truth = frozen_visits(lambda p, q: -0.5 * (p.exp() * p).sum(-1))
    close(expected_gradient(algorithm, 1, psi=nothing), truth)
    off = expected_gradient(algorithm, 1, sampler=BEHAVIOUR, psi=nothing, off_policy=True)
    close(off[0], truth[0])
