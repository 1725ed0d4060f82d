"""The reward model that learns beside the policy: its loss, its rewards, and what PRIME's advantage makes of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Random, Shape, close, gradients, make, shapes
from policygrad.core.validation import check_sampling

NAN = math.nan


def hand_batch() -> pg.Batch:
    """Three answers to one prompt, of 2, 1 and 0 tokens, and one to another; NaN = not sampled."""
    implicit = torch.tensor([[0.1, NAN, 0.3], [0.6, NAN, NAN], [NAN] * 3, [0.4, 0.4, NAN]], dtype=torch.float64)
    return pg.Batch(
        mask=~implicit.isnan(),
        group=torch.tensor([0, 0, 0, 1]),
        reward=torch.tensor([1.0, 0.0, NAN, 1.0], dtype=torch.float64),
        implicit_reward=implicit,
    )


def test_hand_numbers() -> None:
    """Outcomes 1 − 0 and 0 − 1; process rewards less the other's mean, 0.6 and 0.2, at every token, summed to the end."""
    psi = replace(pg.PRIME, filters=()).compute_advantages(hand_batch())
    a, b = 1 + (0.1 - 0.6) + (0.3 - 0.6), 1 + (0.3 - 0.6)
    expected = [[a, 0.0, b], [-1 + (0.6 - 0.2), 0.0, 0.0], [0.0] * 3, [0.0] * 3]
    torch.testing.assert_close(psi, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


def test_the_baseline_is_charged_per_token() -> None:
    """Equal rewards c at every token of two answers of 3 and 1 tokens: c − c = 0 everywhere, though their sums differ. Where
    only the sibling's are c, each token of the other pays c: −3c, −2c, −c."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    for first, expected in ((0.5, [0.0, 0.0, 0.0]), (0.0, [-1.5, -1.0, -0.5])):
        implicit = torch.tensor([[first] * 3, [0.5, NAN, NAN]], dtype=torch.float64)
        batch = pg.Batch(
            mask=mask, group=torch.zeros(2).long(), reward=torch.zeros(2).double(), implicit_reward=implicit
        )
        psi = pg.Algorithm(
            advantage=(pg.LeaveOneOut(), pg.ImplicitProcess()), reward_model=pg.ImplicitReward()
        ).compute_advantages(batch)
        assert psi[0].tolist() == expected


def learning(shape: Shape, beta: float) -> tuple[pg.Batch, Tensor]:
    batch, _ = make(shape)
    batch = replace(batch, reward=torch.where(batch.mask.any(1), Random(shape.seed).uniform(len(batch.mask)), NAN))
    logp = torch.where(batch.mask, -Random(shape.seed + 1).uniform(*batch.mask.shape) / beta, NAN)
    return batch, logp.requires_grad_()


@settings(max_examples=25)
@given(shape=shapes())
def test_the_loss_is_the_papers_cross_entropy(shape: Shape) -> None:
    """−[R log σ(r_φ(o)) + (1 − R) log(1 − σ(r_φ(o)))], r_φ(o) = Σ_t β log(π_φ/π_ref), token by token."""
    part = pg.ImplicitReward(0.3)
    batch, logp = learning(shape, part.beta)
    assert batch.logp_ref is not None
    total, count = logp.nan_to_num().sum() * 0, 0
    for i in range(len(batch.mask)):
        where = batch.mask[i].nonzero().flatten().tolist()
        if where:
            r = sum(0.3 * (logp[i, t] - batch.logp_ref[i, t]) for t in where)
            p, R = 1 / (1 + torch.exp(-r)), batch.reward[i]
            total, count = total - (R * torch.log(p) + (1 - R) * torch.log(1 - p)), count + 1
    result = part.loss(logp, batch)[batch.mask.any(1)].sum()
    torch.testing.assert_close(result, total, rtol=1e-10, atol=1e-12)
    close(gradients(result, logp)[0].nan_to_num(), gradients(total, logp)[0].nan_to_num(), tolerance=1e-10)


def test_loss_is_finite_for_confident_errors() -> None:
    """A float32 log-ratio of ±2,000 nats: σ is 0 or 1 to the last bit."""
    logp = torch.tensor([[-2000.0], [0.0]], requires_grad=True)
    batch = pg.Batch(
        mask=torch.ones(2, 1, dtype=torch.bool),
        group=torch.zeros(2).long(),
        reward=torch.tensor([1.0, 0.0]),
        logp_ref=torch.tensor([[0.0], [-2000.0]]),
    )
    loss = pg.ImplicitReward(0.05).loss(logp, batch)
    assert loss.tolist() == [100.0, 100.0]
    assert gradients(loss.sum(), logp)[0].flatten().tolist() == pytest.approx([-0.05, 0.05])


def test_implicit_reward_starts_at_zero() -> None:
    """π_φ = π_ref: r_φ = 0, the loss log 2, and Ψ that of the outcomes alone."""
    batch, _ = make(Shape((4, 4), 5, seed=3, binary=True))
    part = pg.ImplicitReward()
    implicit = part.rewards(batch.logp_ref, batch)  # type: ignore[arg-type]
    assert (implicit == 0).all()
    kept = batch.mask.any(1)
    assert part.loss(batch.logp_ref, batch)[kept].tolist() == pytest.approx([math.log(2)] * int(kept.sum()))  # type: ignore[arg-type]
    prime = replace(pg.PRIME, filters=())
    rloo = replace(pg.RLOO, shaping=())
    assert torch.equal(
        prime.compute_advantages(replace(batch, implicit_reward=implicit)), rloo.compute_advantages(batch)
    )


@pytest.mark.parametrize("reward", [-0.5, 1.5, 3.0])
def test_outcome_outside_unit_interval_is_refused(reward: float) -> None:
    batch, logp = learning(Shape((3,), 4, seed=1, binary=False), 1.0)
    batch = replace(batch, reward=torch.full_like(batch.reward, reward))
    with pytest.raises(pg.ConfigError, match=rf"outcomes in \[0, 1\].*{reward:g}"):
        pg.ImplicitReward().loss(logp, batch)


def test_report() -> None:
    """Pairs of one prompt with another outcome: 0.7 > 0.4 right, a tie half, 0.1 < 0.4 wrong. Another prompt's do not count."""
    total = torch.tensor([[0.7], [0.4], [0.4], [0.1], [9.0]], dtype=torch.float64)
    batch = pg.Batch(
        mask=torch.ones(5, 1, dtype=torch.bool),
        group=torch.tensor([0, 0, 0, 0, 1]),
        reward=torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64),
        implicit_reward=total,
    )
    result = pg.ImplicitReward().report(batch)
    assert result["reward_model/accuracy"].value == pytest.approx(1.5 / 3)
    assert result["reward_model/reward"].value == pytest.approx(10.6 / 5)
    assert pg.ImplicitReward().report(replace(batch, implicit_reward=None)) == {}
    assert "reward_model/accuracy" not in pg.ImplicitReward().report(replace(batch, reward=torch.ones(5).double()))


REFUSED = {
    "no β": (lambda: pg.ImplicitReward(beta=0.0), ["ImplicitReward.beta must be above 0"]),
    "a negative rate": (lambda: pg.ImplicitReward(lr=-1.0), ["ImplicitReward.lr", "-1"]),
    "no rate at all": (lambda: pg.ImplicitReward().learning_rate(None), ["ImplicitReward.lr is None", "1e-6"]),
    "a discount above 1": (lambda: pg.ImplicitProcess(1.1), ["ImplicitProcess.gamma", "[0, 1]"]),
    "rewards that nobody learns": (
        lambda: replace(pg.PRIME, reward_model=None),
        ["ImplicitProcess() needs a reward model", "reward_model=ImplicitReward()"],
    ),
    "a reward model that nobody reads": (
        lambda: replace(pg.GRPO, reward_model=pg.ImplicitReward()),
        ["no advantage uses the reward model", "ImplicitProcess()"],
    ),
    "no reference": (lambda: replace(pg.PRIME, reference=None), ["needs a reference, and reference is None"]),
    "a moving reference": (
        lambda: replace(pg.PRIME, reference=pg.Reference(refresh_every=5)),
        ["relative to the reference", "refresh_every=None"],
    ),
    "a trust region": (
        lambda: replace(pg.PRIME, update_rule=pg.TrustRegion(0.01), filters=()),
        ["TrustRegion updates only the policy", "GradientSteps()"],
    ),
    "another part in its place": (
        lambda: replace(pg.PRIME, reward_model=pg.Critic()),
        ["is not a reward model", "put it into critic"],
    ),
    "one sample": (lambda: check_sampling(pg.PRIME, 1, 1.0), ["one per prompt"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    make, says = REFUSED[case]
    with pytest.raises(pg.ConfigError) as error:
        make()
    assert all(text in str(error.value) for text in says), error.value


def test_its_rate_is_twice_the_policys_unless_given() -> None:
    assert pg.ImplicitReward().learning_rate(5e-7) == 1e-6
    assert pg.ImplicitReward(lr=0.0).learning_rate(5e-7) == 0.0
    assert pg.PRIME.equation()["r_φ"].startswith("0.05·log(π_φ/π_ref)")
    assert pg.PRIME.equation()["Ψ"].startswith("R_i − mean_{j≠i} R_j + Σ_{s≥t}".replace("R_i", "R_i"))
