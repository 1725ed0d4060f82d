"""Training runs by expectation: the expectation against brute force, and what each run shows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import policygrad as pg
from policygrad.core.terms import ExactEntropy
from policygrad.lab import dynamics
from policygrad.lab.dynamics import expected_update, interpolate, train_in_expectation
from policygrad.lab.estimators import enumerate_steps, estimate_gradients
from policygrad.lab.measurement import MeasuredClaim
from policygrad.lab.plots import PLOTS
from policygrad.lab.report import DYNAMICS, single_threaded
from policygrad.lab.worlds import make_table_settings, one_prompt

SHORT = ("length_drift", "k1_in_loss")
"""Those that cost least: on another seed too, and one of them in the fast tier."""
RUNS = [
    *(pytest.param(name, 0, marks=() if name == "k1_in_loss" else pytest.mark.full) for name in DYNAMICS),
    *(pytest.param(name, 1, marks=pytest.mark.full) for name in SHORT),
]


def by_hand(algorithm: pg.Algorithm, setting, size: int, lr: float) -> torch.Tensor:
    """Every ordered group, its K updates one after the other by autograd through θ."""
    setting = replace(setting, old=setting.theta)
    algorithm = setting.prepare(algorithm)
    book, probability = setting.enumerate_batch(algorithm), setting.world.logp(setting.theta).exp().flatten()
    total = torch.zeros_like(setting.theta)
    for group in itertools.product(range(len(book.mask)), repeat=size):
        rows = torch.tensor(group)
        batch = replace(book.select(rows), group=torch.zeros(size, dtype=torch.int64))
        psi, theta = algorithm.compute_advantages(batch), setting.theta
        for _ in range(algorithm.update_rule.updates):
            theta = theta.detach().requires_grad_()
            out = replace(setting, theta=theta).forward(algorithm)
            picked = {name: getattr(out, name)[rows] for name in ("logp", *algorithm.forward_needs)}
            loss = pg.surrogate(pg.Forward(**picked), batch, psi, algorithm)
            theta = theta - lr * torch.autograd.grad(loss, theta)[0]
        total = total + float(probability[rows].prod()) * (theta.detach() - setting.theta)
    return total


@pytest.mark.parametrize(
    "algorithm",
    [
        replace(pg.GRPO, update_rule=pg.GradientSteps(epochs=3)),
        replace(pg.DR_GRPO, gate=pg.SigmoidGate(), terms=(ExactEntropy(0.2),), update_rule=pg.GradientSteps(epochs=2)),
    ],
    ids=["grpo", "soft"],
)
def test_the_move_is_the_mean_over_groups_of_their_own_updates(algorithm: pg.Algorithm) -> None:
    setting = one_prompt(2, seed=3)
    move = expected_update(algorithm, setting, 2, 0.7)
    torch.testing.assert_close(move, by_hand(algorithm, setting, 2, 0.7), rtol=0, atol=1e-13)


def test_one_update_is_the_expected_gradient() -> None:
    setting = one_prompt(2, seed=1)
    mean = estimate_gradients(pg.RLOO, replace(setting, old=setting.theta), enumerate_steps(setting, 3)).mean
    torch.testing.assert_close(expected_update(pg.RLOO, setting, 3, 0.5), 0.5 * mean, rtol=0, atol=1e-15)


def test_groups_that_are_sampled_again_have_no_weight() -> None:
    setting = one_prompt(2, seed=1)
    kept = replace(pg.DR_GRPO, filters=(pg.DropZeroVariance(),))
    plain, filtered = (expected_update(a, setting, 2, 0.5) for a in (pg.DR_GRPO, kept))
    p = float(setting.world.objective(setting.theta))
    torch.testing.assert_close(filtered, plain / (2 * p * (1 - p)), rtol=0, atol=1e-14)  # the others have Ψ = 0


def test_settings_without_an_expected_rollout_are_refused() -> None:
    with pytest.raises(ValueError, match="one prompt and a TabularPolicy"):
        expected_update(pg.GRPO, make_table_settings()[0], 2, 0.1)
    with pytest.raises(ValueError, match="TrustRegion has no learning rate"):
        expected_update(pg.TRPO, one_prompt(2), 2, 0.1)


def test_levels_are_interpolated_between_rollouts() -> None:
    path = {"J": (0.0, 0.5, 1.0), "length": (4.0, 2.0, 0.0)}
    assert interpolate(path, "length", 0.25, "J") == pytest.approx(3.0)
    assert interpolate(path, "length", 0.75, "J") == pytest.approx(1.0)
    assert interpolate(path, "length", 2.0, "J") == 0.0


def test_the_unbiased_gradient_climbs() -> None:
    setting = one_prompt(2, seed=0)
    run = train_in_expectation(pg.RLOO, setting, 2, 0.5, 5, {"J": setting.world.objective})["J"]
    assert list(run) == sorted(run)
    assert run[-1] > run[0] + 0.05


def check_entropy_collapse(measured: MeasuredClaim) -> None:
    """The order of the clips, and that it is the upper one."""
    n = measured.numbers
    assert n["end_0.2"] < n["end_0.28"] < n["start"] < n["end_none"]
    assert n["decides_0.2"] == pytest.approx(n["decides_none"], abs=0.01)
    assert "slows the collapse and does not end it" in measured.sentence


def check_k1_in_loss(measured: MeasuredClaim) -> None:
    """It changes nothing."""
    curves = measured.curves
    assert curves["kl_k1"] == pytest.approx(curves["kl_none"], abs=1e-12)
    assert curves["kl_reward"][-1] < 0.8 * curves["kl_none"][-1]


def check_reward_hacking(measured: MeasuredClaim) -> None:
    """The hacked reward rises to the end, the true one does not."""
    curves = measured.curves
    assert list(curves["proxy_free"]) == sorted(curves["proxy_free"])
    assert curves["true_free"][-1] < curves["true_free"][0] < max(curves["true_free"])


CHECKS = {
    "entropy_collapse": check_entropy_collapse,
    "k1_in_loss": check_k1_in_loss,
    "reward_hacking": check_reward_hacking,
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "seed"), RUNS)
def test_every_run_shows_its_failure(name: str, seed: int) -> None:
    with single_threaded():
        measured = getattr(dynamics, name)(seed)
    assert measured.holds, measured.sentence
    assert measured.error is None
    assert len({len(column) for column in measured.curves.values()}) == 1
    _, *columns = measured.curves
    assert {c for panel in PLOTS[name].panels for c in panel.columns} == set(columns)
    if seed == 0 and name in CHECKS:
        CHECKS[name](measured)


def test_k1_in_the_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="does nothing"):
        pg.KLToReference(0.3, "k1")
