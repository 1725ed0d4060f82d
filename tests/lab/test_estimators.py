"""Exact expectations agree with brute force over ordered groups, with sampling, and with a plain loop over steps."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch

import policygrad as pg
from policygrad.core.terms import ExactEntropy, ExactKLToOld, ExactKLToReference
from policygrad.lab.estimators import (
    compute_decisions,
    count_steps,
    enumerate_steps,
    estimate_gradients,
    make_steps,
    sample_steps,
)
from policygrad.lab.measurement import compare_on_off_policy, measure_algorithm
from policygrad.lab.sequences import perturb_policy
from policygrad.lab.setting import LabSetting, supported_algorithms
from policygrad.lab.worlds import make_table_settings, one_prompt, two_answers


@pytest.fixture(scope="module")
def settings() -> tuple[LabSetting, LabSetting]:
    return make_table_settings(seed=1)


def small(off: bool) -> LabSetting:
    """Seven completions, so that all ordered groups can be gone through one by one."""
    setting = one_prompt(length=2, seed=4)
    reference = perturb_policy(setting.world, setting.theta, 0.1, seed=9)
    setting = replace(setting, reference=reference, critic_error=0.2)
    return (
        replace(setting, old=setting.theta, theta=perturb_policy(setting.world, setting.theta, 0.3, seed=8))
        if off
        else setting
    )


def brute(algorithm: pg.Algorithm, setting: LabSetting, size: int) -> torch.Tensor:
    """E g by the library's own calls, one step at a time: autograd through θ, no scores, no sharing."""
    algorithm = setting.prepare(algorithm)
    book, probability = setting.enumerate_batch(algorithm), setting.world.logp(setting.sampling_theta).exp().flatten()
    total, mass = torch.zeros_like(setting.theta), 0.0
    for group in itertools.product(range(len(book.mask)), repeat=size):
        rows = torch.tensor(group)
        batch = algorithm.apply_filters(replace(book.select(rows), group=torch.zeros(size, dtype=torch.int64)))
        weight = float(probability[rows].prod())
        if not batch.mask.any():  # sampled again, or a step of nothing
            mass += 0 if any(part.sampling_rounds > 1 for part in algorithm.filters) else weight
            continue
        theta = setting.theta.clone().requires_grad_()
        out = replace(setting, theta=theta, old=setting.old_theta).forward(algorithm)
        picked = {
            name: getattr(out, name)[rows] for name in ("logp", *(algorithm.forward_needs | algorithm.selection_needs))
        }
        loss = pg.surrogate(pg.Forward(**picked), batch, algorithm.compute_advantages(batch), algorithm)
        total = total - weight * torch.autograd.grad(loss, theta)[0]
        mass += weight
    return total / mass


KINDS = ("rloo", "grpo", "dapo", "gspo", "ppo", "prime", "m2po", "trpo")
"""Of KL in the reward and in the loss, filters, ratios, a critic, a reward model, and gates of two further kinds."""


@pytest.mark.parametrize(
    ("name", "off"),
    [
        pytest.param(
            name, off, id=f"{name}-{'off' if off else 'on'}", marks=() if off and name in KINDS else pytest.mark.full
        )
        for name in supported_algorithms(pg.ALGORITHMS)
        for off in (False, True)
    ],
)
def test_the_expectation_is_that_of_ordered_groups(name: str, off: bool) -> None:
    algorithm, setting = pg.get_algorithm(name), small(off)
    result = estimate_gradients(algorithm, setting, enumerate_steps(setting, 2)).mean
    torch.testing.assert_close(result, brute(algorithm, setting, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("term", [ExactEntropy(0.3), ExactKLToOld(0.7), ExactKLToReference(0.7)])
def test_exact_loss_terms(term) -> None:
    algorithm, setting = replace(pg.DR_GRPO, terms=(term,)), small(True)
    result = estimate_gradients(algorithm, setting, enumerate_steps(setting, 2)).mean
    torch.testing.assert_close(result, brute(algorithm, setting, 2), rtol=0, atol=1e-12)
    assert (result - estimate_gradients(pg.DR_GRPO, setting, enumerate_steps(setting, 2)).mean).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["dapo", *(pytest.param(name, marks=pytest.mark.full) for name in ("ppo", "grpo"))])
def test_sampling_agrees_within_its_standard_error(name: str, settings) -> None:
    algorithm, setting = pg.get_algorithm(name), settings[1]
    exact = measure_algorithm(algorithm, setting, enumerate_steps(setting, 2))
    sampled = measure_algorithm(algorithm, setting, sample_steps(setting, 2, steps=3000, seed=3))
    assert exact.exact
    assert exact.errors is None
    assert not sampled.exact
    for key in ("scale", "cosine", "variance", "snr"):
        gap = abs(getattr(sampled.figures, key) - getattr(exact.figures, key))
        assert getattr(sampled.errors, key) > 0
        assert gap < 4 * getattr(sampled.errors, key), key


def test_steps_of_several_prompts_are_one_step() -> None:
    """A token mean over two prompts couples them: not the mean of two single steps."""
    setting = make_table_settings(seed=2)[0]
    algorithm = replace(pg.DR_GRPO, aggregation=pg.TokenMean())
    steps = sample_steps(setting, 2, steps=3, prompts=2, seed=1)
    result = estimate_gradients(algorithm, setting, steps).gradient
    book = setting.enumerate_batch(algorithm)
    for m, rows in enumerate(steps.rows):
        batch = replace(book.select(rows), group=steps.group)
        theta = setting.theta.clone().requires_grad_()
        loss = pg.surrogate(
            setting.world.token_logp(theta)[rows],
            batch,
            setting.prepare(algorithm).compute_advantages(batch),
            algorithm,
        )
        torch.testing.assert_close(result[m], -torch.autograd.grad(loss, theta)[0], rtol=0, atol=1e-12)
    apart = estimate_gradients(replace(algorithm, aggregation=pg.GroupTokenMean()), setting, steps).gradient
    assert (apart - result).abs().max() > 1e-4


def test_probabilities_and_counts() -> None:
    setting = one_prompt(seed=0)
    for size in (1, 2, 4):
        steps = enumerate_steps(setting, size)
        assert float(steps.weight.sum()) == pytest.approx(1, abs=1e-12)
        assert len(steps.rows) == count_steps(setting, size) == math.comb(15 + size - 1, size)
    both = enumerate_steps(one_prompt(length=2), 2, statistics_only=2)
    assert float(both.weight.sum()) == pytest.approx(1, abs=1e-12)
    assert not make_steps(setting, 8).exact
    with pytest.raises(ValueError, match=r"319770 steps.*20000"):
        enumerate_steps(setting, 8)
    with pytest.raises(ValueError, match="at least 1 completion"):
        enumerate_steps(setting, 0)


def test_hand_numbers_of_a_coin() -> None:
    """p = ¼, G = 2, leave-one-out: g = ±1·(s₁ − s₀)/2 where the two differ, so E g = ∇p and Var g = p(1−p)/2·‖s₁ − s₀‖²/… ."""
    setting = two_answers(0.25)
    result = measure_algorithm(replace(pg.RLOO, shaping=()), setting, enumerate_steps(setting, 2))
    # ∇p = p(1−p)(−1, 1); a mixed pair (probability 2p(1−p) = 3/8) gives ½((1−p)+p)(−1, 1) = ½(−1, 1).
    truth = setting.true_gradient(pg.DR_GRPO)
    torch.testing.assert_close(truth, torch.tensor([-0.1875, 0.1875], dtype=torch.float64))
    second = 3 / 8 * 2 * 0.25
    square = 2 * 0.1875**2
    assert result.figures.scale == pytest.approx(1)
    assert result.figures.bias < 1e-12
    assert result.figures.variance == pytest.approx((second - square) / square)
    assert result.figures.mse == pytest.approx((second - square) / square)
    assert result.figures.snr == pytest.approx(square / (second - square))
    assert result.figures.best_mse == pytest.approx(1 - square / second)
    assert result.difficulty[0]["p"] == pytest.approx(0.25)
    assert result.length[0]["right"] == pytest.approx(0.75 / 2)  # P(the other is wrong)·1/G
    assert result.length[0]["wrong"] == pytest.approx(-0.25 / 2)


def test_the_truth_is_the_stated_objective() -> None:
    """rloo's KL in the reward belongs to its J; against ∇E[R] alone it is biased."""
    setting = small(False)
    f = measure_algorithm(replace(pg.RLOO, shaping=(pg.KLInReward(0.3),)), setting, enumerate_steps(setting, 2)).figures
    assert f.bias < 1e-12
    regularised = setting.true_gradient(replace(pg.RLOO, shaping=(pg.KLInReward(0.3),)))
    world, reference = setting.world, setting.reference
    theta = setting.theta.clone().requires_grad_()
    by_hand = torch.autograd.grad(world.objective(theta) - 0.3 * world.kl(theta, reference), theta)[0]
    torch.testing.assert_close(regularised, by_hand, rtol=0, atol=1e-12)
    assert (regularised - setting.true_gradient(replace(pg.RLOO, shaping=()))).abs().max() > 1e-3


def test_coupled_advantages_are_computed_step_by_step() -> None:
    """Whitening sees the whole call; the answer must be that of a step alone."""
    setting = small(False)
    algorithm = setting.prepare(pg.PPO)
    steps = enumerate_steps(setting, 2)
    levers = compute_decisions(algorithm, setting, steps)
    book = setting.enumerate_batch(algorithm)
    for m in (3, 11, 20):
        batch = replace(book.select(steps.rows[m]), group=steps.group)
        _, psi, coef = levers.at(torch.tensor([m]))
        torch.testing.assert_close(psi, algorithm.compute_advantages(batch), rtol=0, atol=1e-12)
        torch.testing.assert_close(coef[0], algorithm.coefficients(batch), rtol=0, atol=1e-15)


@dataclass(frozen=True)
class Doubled(pg.Advantage):
    """A user's own advantage."""

    def __call__(self, psi: torch.Tensor, batch: pg.Batch) -> torch.Tensor:
        return 2 * pg.LeaveOneOut()(psi, batch)


def test_a_custom_part_is_measured(settings) -> None:
    own = replace(pg.REINFORCE, advantage=(Doubled(),))
    plain = replace(pg.REINFORCE, advantage=(pg.LeaveOneOut(),))
    (mine, _), (usual, _) = compare_on_off_policy({"own": own, "usual": plain}, *settings, 2)
    assert mine.name == "own"
    assert mine.figures.scale == pytest.approx(2)
    assert mine.figures.snr == pytest.approx(usual.figures.snr)


def test_a_group_of_one_is_refused_by_group_statistics(settings) -> None:
    with pytest.raises(ValueError, match="one per prompt"):
        list(compare_on_off_policy({"grpo": pg.GRPO}, *settings, 1))
    (on, _), *_ = compare_on_off_policy({"reinforce": pg.REINFORCE}, *settings, 1)
    assert on.figures.bias < 1e-12


def test_a_true_gradient_of_zero_is_refused() -> None:
    setting = two_answers(0.5, rewards=(1.0, 1.0))
    with pytest.raises(ValueError, match="true gradient is 0"):
        measure_algorithm(pg.REINFORCE, setting, enumerate_steps(setting, 2))


def test_truncation_reaches_the_filters() -> None:
    """With the budget at the longest length, completions of it are cut off: masked, and the gradient another one."""
    setting = one_prompt(seed=0)
    dapo = measure_algorithm(pg.DAPO, setting, enumerate_steps(setting, 3))
    cut = measure_algorithm(pg.DAPO, replace(setting, truncates=True), enumerate_steps(setting, 3))
    assert cut.figures != dapo.figures
    fixed = replace(setting, truncates=True).prepare(pg.DR_GRPO).aggregation
    assert fixed == pg.FixedLength(3)


def test_the_greedy_completion_is_the_one_of_the_most_probable_tokens() -> None:
    setting = make_table_settings(seed=3)[0]
    world, greedy = setting.world, setting.world.greedy(setting.theta)
    assert greedy.sum(1).tolist() == [1] * world.prompts
    conditionals = world.conditionals(setting.theta).reshape(world.prompts, -1, world.tree.vocabulary)
    for x in range(world.prompts):
        prefix: tuple[int, ...] = ()
        while len(prefix) < world.tree.length:
            token = int(conditionals[x, world.tree.prefixes.index(prefix)].argmax())
            if token == 0:
                break
            prefix = (*prefix, token)
        assert world.tree.completions[int(greedy[x].int().argmax())] == prefix
    baseline = setting.enumerate_batch(pg.REMAX).baseline
    assert baseline is not None
    assert baseline.reshape(world.prompts, -1)[:, 0].tolist() == world.reward[greedy].tolist()


@pytest.mark.parametrize("name", ["remax", "topr"])
def test_baselines_from_outside_the_group_leave_the_estimate_unbiased(name: str, settings) -> None:
    result = measure_algorithm(pg.get_algorithm(name), settings[0], enumerate_steps(settings[0], 2)).figures
    assert result.bias < 1e-12
    assert result.scale == pytest.approx(1)
