"""Off-policy masks, squared penalties, labels, future influence and adaptive entropy: by hand and by their properties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Shape, make, policy
from policygrad.core.metrics import Mean
from policygrad.core.objective import measure_forward
from policygrad.core.validation import check_rollout


def numbers(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def one_prompt(rewards: list[float], width: int = 2, **fields: Tensor) -> pg.Batch:
    mask = torch.ones(len(rewards), width, dtype=torch.bool)
    group = torch.zeros(len(rewards), dtype=torch.long)
    return pg.Batch(mask=mask, group=group, reward=torch.tensor(rewards, dtype=torch.float64), **fields)


def test_stale_failures_are_masked_and_stale_successes_are_not() -> None:
    """mean log μ/π_θ is 0.6, 0.6, 0.4 nats; δ is 0.5."""
    logp = numbers([-2.0, -1.0], [-2.0, -1.0], [-2.0, -1.0])
    sampler = logp + numbers([1.0, 0.2], [1.0, 0.2], [0.8, 0.0])
    batch = one_prompt([0.0, 1.0, 0.0], logp_sampler=sampler)
    psi = numbers([-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0])
    weight = pg.OffPolicySequenceMask(0.5)(pg.Forward(logp), batch, psi)
    assert weight.tolist() == [[0, 0], [1, 1], [1, 1]]


def test_the_mask_sees_the_sampler_also_where_pi_old_is_the_learners() -> None:
    logp = numbers([-2.0, -1.0])
    batch = one_prompt([0.0], logp_sampler=logp + 1.0, logp_old=logp)
    weight = pg.OffPolicySequenceMask(0.5)(pg.Forward(logp), batch, numbers([-1.0, -1.0]))
    assert weight.tolist() == [[0, 0]]


def test_the_mean_of_the_mask_is_over_sampled_tokens() -> None:
    logp = numbers([-2.0, math.nan, -1.0])
    batch = one_prompt([0.0], width=3, logp_sampler=logp + 0.45)
    batch = replace(batch, mask=torch.tensor([[True, False, True]]))
    assert (pg.OffPolicySequenceMask(0.5)(pg.Forward(logp), batch, numbers([-1.0, 0.0, -1.0])) == 1).all()


def test_the_squared_penalty_by_hand_and_its_bounded_pull() -> None:
    old = numbers([-3.0, -1.0])
    change = numbers([2.0, -0.5])
    batch = one_prompt([0.0], logp_old=old)
    term, out, psi = pg.KLToOld(0.4, "k2"), pg.Forward(old + change), torch.zeros_like(old)
    torch.testing.assert_close(term.score(out, batch, psi), -0.4 * change)
    torch.testing.assert_close(term.value(out, batch, psi), -0.4 * change**2 / 2)
    k3 = pg.KLToOld(0.4).score(out, batch, psi)
    assert abs(k3[0, 0]) > 2 * abs(term.score(out, batch, psi)[0, 0])  # e² − 1 against 2


def test_a_penalty_near_the_sampler_may_have_one_update_per_rollout() -> None:
    check_rollout(pg.PRIME_RL)
    with pytest.raises(pg.ConfigError, match="old_policy='sampler'"):
        check_rollout(replace(pg.PRIME_RL, old_policy="learner"))


def test_labels_by_hand() -> None:
    """Three of four right: +4/(1 + 3) and −4/(1 + 1)."""
    batch = one_prompt([1.0, 0.0, 1.0, 1.0])
    psi = pg.ClassLabels()(torch.zeros(4, 2, dtype=torch.float64), batch)
    assert psi[:, 0].tolist() == [1.0, -2.0, 1.0, 1.0]
    assert (pg.ClassLabels()(psi, one_prompt([1.0, 1.0])) == 0).all()
    assert (pg.ClassLabels()(psi, one_prompt([0.0, 0.0])) == 0).all()


def test_the_classification_weight_falls_with_the_margin_and_is_bounded() -> None:
    """A success that became likelier counts less, a failure that became likelier more; two successes share one normaliser."""
    s = [0.3, -0.2, 0.1, -0.4]
    ratio = numbers(*[[x, x] for x in s]).exp()
    psi = numbers([1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0])
    weight = pg.ClassificationWeight(0.5).weight(ratio, psi, one_prompt([1.0, 1.0, 0.0, 0.0]))[:, 0]
    right, wrong = [math.exp(-x / 0.5) for x in s[:2]], [math.exp(x / 0.5) for x in s[2:]]
    expected = [3 * x / (1 + sum(right)) for x in right] + [3 * x / (1 + sum(wrong)) for x in wrong]
    torch.testing.assert_close(weight, torch.tensor(expected, dtype=torch.float64))
    assert weight[1] > weight[0]
    assert weight[2] > weight[3]
    far = pg.ClassificationWeight(0.5).weight(ratio ** (1000.0), psi, one_prompt([1.0, 1.0, 0.0, 0.0]))
    assert far.isfinite().all()
    assert (far <= 3).all()


def test_the_influence_of_a_token_by_hand() -> None:
    """Half-life 1: each later token counts half as much. exp(0.1 + 0.2/2) = exp(0.2), above the bound of 1.2."""
    change = numbers([0.1, 0.1, 0.05])
    batch = one_prompt([1.0], width=3, logp_old=torch.zeros(1, 3).double())
    gate = pg.FutureKL(10.0, 10.0, half_life=1.0)
    weight = gate.weight(change.exp(), numbers([1.0, 1.0, 1.0]), batch)
    future = [0.1 + 0.05 + 0.0125, 0.1 + 0.025, 0.05]
    expected = [math.exp(r) * min(math.exp(f), 1.2) for r, f in zip([0.1, 0.1, 0.05], future, strict=True)]
    torch.testing.assert_close(weight, numbers(expected))


def test_suppressed_text_is_not_amplified_and_outliers_do_not_count() -> None:
    gate = pg.FutureKL(0.2, 0.28, half_life=32.0)
    batch = one_prompt([0.0], logp_old=torch.zeros(1, 2).double())
    fallen = gate.weight(numbers([-0.1, -0.1]).exp(), numbers([-1.0, -1.0]), batch)
    torch.testing.assert_close(fallen, numbers([-0.1, -0.1]).exp())  # f is 1, not below
    outlier = gate.weight(numbers([0.0, math.log(20.0)]).exp(), numbers([1.0, 1.0]), batch)
    assert outlier[0, 0] == 1
    gate = pg.FutureKL(0.2, 0.28, half_life=32.0, safe_ratio=4.0)
    risen = gate.weight(numbers([math.log(5.0), 0.0]).exp(), numbers([-1.0, -1.0]), batch)
    torch.testing.assert_close(risen[0, 0], torch.tensor(5.0).double())  # r > 4 and Ψ < 0: f is at most 1


def test_a_completion_with_two_tokens_at_the_dual_clip_is_left_out() -> None:
    gate, batch = pg.FutureKL(0.2, 0.28), one_prompt([0.0], width=3, logp_old=torch.zeros(1, 3).double())
    for changes, psi, kept in (
        ([math.log(11.0), 0.0, 0.0], -1.0, True),
        ([math.log(11.0), 0.0, math.log(12.0)], -1.0, False),
        ([math.log(11.0), 0.0, math.log(12.0)], 1.0, True),
    ):
        weight = gate.weight(numbers(changes).exp(), numbers([psi] * 3), batch)
        assert bool(weight[0, 1]) is kept
        assert bool(gate.value(numbers(changes).exp(), numbers([psi] * 3), batch)[0, 1]) is kept


def test_the_half_life_of_influence_counts_what_the_environment_wrote() -> None:
    """A token, three of the environment's and a token, half-life 1: the last counts 2^−4."""
    mask = torch.tensor([[True, False, False, False, True]])
    batch = replace(one_prompt([1.0], width=5, logp_old=torch.zeros(1, 5).double()), mask=mask)
    change = numbers([0.0, 9.0, 9.0, 9.0, 0.8])
    weight = pg.FutureKL(10.0, 10.0, half_life=1.0).weight(change.exp(), numbers([1.0] * 5), batch)
    torch.testing.assert_close(weight[0, 0], torch.tensor(math.exp(0.8 / 16)).double())


def test_the_entropy_coefficient_grows_while_entropy_is_low_and_is_off_above_the_target() -> None:
    term = pg.ExactEntropy(0.0, target=0.2, step=1e-3, max_eta=2e-3)
    batch = one_prompt([0.0])
    state, seen = term.init_state(), []
    assert state is not None
    for entropy in (0.5, 0.1, 0.1, 0.1, 0.3, 0.1):
        seen.append(term.with_state(state).eta)
        state = term.update_state(state, batch, {"entropy/exact": Mean(entropy)})
    assert seen == pytest.approx([0, 0, 1e-3, 2e-3, 2e-3, 0])  # at most max_eta; off after 0.3
    assert state["eta"] == pytest.approx(2e-3)  # which had lowered it by one step
    assert term.update_state(state, batch, {}) == state
    assert pg.ExactEntropy(0.01).init_state() is None


def test_updates_measure_the_exact_entropy() -> None:
    batch, logits = make(Shape((3, 2), 4, seed=5, binary=True))
    logp = policy(logits, batch.tokens, batch.mask)  # type: ignore[arg-type]
    out = pg.Forward(logp, entropy=torch.full_like(batch.logp_ref, 0.25))  # type: ignore[arg-type]
    algorithm = pg.SKYWORK_OR1
    psi = algorithm.compute_advantages(batch)
    metrics = measure_forward(out, batch, psi, algorithm, algorithm.all_coefficients(batch))
    assert metrics["entropy/exact"].value == pytest.approx(0.25)
