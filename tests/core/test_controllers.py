"""The rules that adapt β: numbers by hand, what they are fed with, what is refused, and dual descent on a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import policygrad as pg
from doubles.tabular_learner import TabularLearner
from policygrad.core.kl_controllers import (
    MAX_BETA,
    MIN_BETA,
    AdaptiveBeta,
    adapt_by_doubling,
    adapt_proportionally,
    within_band,
)
from policygrad.core.metrics import Mean, Metrics, Sum

NAN = float("nan")


def test_proportional_by_hand() -> None:
    """β = 2, target 0.1: KL/target − 1 is clipped to ±0.2 and a tenth of it taken."""
    for kl, beta in ((0.1, 2.0), (0.11, 2.02), (0.3, 2.04), (0.09, 1.98), (0.0, 1.96), (-5.0, 1.96)):
        assert adapt_proportionally(2.0, kl, 0.1) == pytest.approx(beta, rel=1e-14), kl


def test_doubling_by_hand() -> None:
    for kl, beta in ((0.0151, 2.0), (0.015, 1.0), (0.01, 1.0), (0.0067, 1.0), (0.0066, 0.5), (0.0, 0.5)):
        assert adapt_by_doubling(1.0, kl, 0.01) == beta, kl


@settings(max_examples=100)
@given(st.floats(1e-4, 10), st.floats(0, 10), st.floats(1e-4, 1))
def test_a_rule_pushes_towards_the_target(beta: float, kl: float, target: float) -> None:
    """Too far from the reference: β never falls; too near: it never grows; and one step changes it by 2 % or by 2 at most."""
    for rule, most in ((adapt_proportionally, 1.02), (adapt_by_doubling, 2.0)):
        after = rule(beta, kl, target)
        assert (after - beta) * (kl - target) >= 0
        assert beta / 2 <= after <= most * beta * (1 + 1e-12)
    assert within_band(kl, target) == (adapt_by_doubling(beta, kl, target) == beta)


def batch_of(u: list[float]) -> pg.Batch:
    """One completion whose log π_old − log π_ref is u at its sampled tokens, and NaN beside them."""
    logp = torch.tensor([[*u, NAN]], dtype=torch.float64)
    return pg.Batch(
        mask=torch.tensor([[True] * len(u) + [False]]),
        group=torch.zeros(1, dtype=torch.int64),
        reward=torch.ones(1, dtype=torch.float64),
        logp_old=logp - 1,
        logp_ref=torch.full_like(logp, -1.0),
    )


def test_each_part_adapts_to_its_own_kl() -> None:
    """In the reward the k1 mean of the batch; in the loss the metric `kl`; for the penalty the KL the updates ended at."""

    def after(part: AdaptiveBeta, batch: pg.Batch, metrics: Metrics) -> float:
        return part.update_state({"beta": part.beta}, batch, metrics)["beta"]  # type: ignore[no-any-return]

    batch = batch_of([0.2, -0.1, 0.2])  # mean 0.1, twice the target
    assert after(pg.KLInReward(0.5, target=0.05), batch, {}) == pytest.approx(0.5 * 1.02)
    assert after(pg.KLInReward(0.5, target=0.05, rule="doubling"), batch, {}) == 1.0
    assert after(pg.KLInReward(0.5, target=0.1), batch, {}) == pytest.approx(0.5)
    empty = replace(batch, mask=torch.zeros(1, 4, dtype=torch.bool))
    assert after(pg.KLInReward(0.5, target=0.05), empty, {}) == 0.5
    term = pg.KLToReference(0.5, "k2", target=0.05)
    assert after(term, batch, {"kl": Mean(0.01), "kl_old/last": Mean(9.0)}) == pytest.approx(0.5 * 0.98)
    assert after(term, batch, {}) == 0.5
    for part in (pg.KLToOld(0.5, target=0.05), pg.ExactKLToOld(0.5, target=0.05)):
        assert after(part, batch, {"kl": Mean(9.0), "kl_old/last": Mean(0.2)}) == 1.0
        assert after(replace(part, rule="proportional"), batch, {"kl_old/last": Mean(0.2)}) == pytest.approx(0.51)
    for fixed in (pg.KLInReward(0.5), pg.KLToReference(0.5), pg.KLToOld(0.5), pg.ExactKLToOld(0.5)):
        assert fixed.init_state() is None
        assert after(fixed, batch, {"kl": Mean(9.0), "kl_old/last": Mean(9.0)}) == 0.5


def test_beta_is_limited() -> None:
    part, low, high = pg.KLToOld(target=1.0), {"beta": 2 * MIN_BETA}, {"beta": 0.6 * MAX_BETA}
    for _ in range(3):
        low = part.update_state(low, batch_of([0.0]), {"kl_old/last": Mean(0.0)})
        high = part.update_state(high, batch_of([0.0]), {"kl_old/last": Mean(9.0)})
    assert (low["beta"], high["beta"]) == (MIN_BETA, MAX_BETA)


def test_adapted_beta_is_state_not_setting() -> None:
    algorithm = replace(pg.RLOO, shaping=(pg.KLInReward(0.5, target=0.05),))
    state = algorithm.update_state(algorithm.init_state(), batch_of([0.1, 0.1]), {})
    assert json.loads(json.dumps(state)) == {"shaping.0": {"beta": pytest.approx(0.51)}}
    assert algorithm.with_state(state).shaping[0].beta == state["shaping.0"]["beta"]  # type: ignore[attr-defined]
    assert algorithm.shaping[0].beta == 0.5  # type: ignore[attr-defined]
    second = algorithm.update_state(state, batch_of([0.1, 0.1]), {})
    assert second["shaping.0"]["beta"] == pytest.approx(0.51 * 1.02)


@pytest.mark.parametrize(
    "state", [{}, {"advantage.0": {"mean": 0.0}}, {"shaping.0": {"beta": 1.0}, "critic": {"pretrain": 3}}]
)
def test_state_of_other_parts_is_refused(state: dict[str, Any]) -> None:
    algorithm = replace(pg.RLOO, shaping=(pg.KLInReward(0.5, target=0.05),))
    with pytest.raises(
        pg.ConfigError, match=r"stateful parts of rloo are shaping\.0: start with algorithm\.init_state"
    ):
        algorithm.with_state(state)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "target 0": (lambda: pg.KLInReward(target=0.0), "KLInReward.target must be above 0 nats per token"),
    "target NaN": (lambda: pg.KLToReference(target=NAN), "KLToReference.target"),
    "a negative target": (lambda: pg.ExactKLToOld(target=-1.0), "ExactKLToOld.target"),
    "a rule alone": (lambda: pg.KLToReference(rule="doubling"), "rule needs a target to adapt beta to: set target"),
    "a rule alone, in the reward": (
        lambda: pg.KLInReward(rule="proportional"),
        "KLInReward.rule needs a target",
    ),
    "no such rule": (lambda: pg.KLToOld(target=0.1, rule="tripling"), "proportional, doubling, not 'tripling'"),  # type: ignore[arg-type]
    "β of 0 with a target": (lambda: pg.KLToOld(0.0, target=0.1), "beta is 0 and would stay 0"),
    "a negative β": (lambda: pg.ExactKLToOld(-1.0), "ExactKLToOld.beta must be at least 0"),
    "no rounds": (lambda: pg.DualDescent(rounds=0), "DualDescent.rounds"),
    "no epochs": (lambda: pg.DualDescent(epochs=0), "epochs must be at least 1"),
    "dual descent without a target": (
        lambda: replace(pg.PPO, update_rule=pg.DualDescent()),
        "no term has one: add KLToOld",
    ),
    "a target and one step": (
        lambda: replace(pg.PPO_PENALTY, update_rule=pg.GradientSteps()),
        "which is 0 before the only one",
    ),
}


@pytest.mark.parametrize(("build", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(build: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build()


# Two prompts, one token of four; Ψ pulls far: an unpenalised learner leaves the band in one round.
TABLE = pg.Batch(
    mask=torch.ones(8, 1, dtype=torch.bool),
    group=torch.arange(2).repeat_interleave(4),
    reward=torch.tensor([1.0, 0, 0, 0, 0, 1, 0, 0], dtype=torch.float64),
    tokens=torch.arange(4).repeat(2)[:, None],
    prompts=(torch.tensor([0]), torch.tensor([1])),
)


def dual(
    target: float, beta: float, exact: bool, rounds: int = 12, lr: float = 1.0
) -> tuple[TabularLearner, pg.Algorithm, dict, pg.Batch]:
    term = (pg.ExactKLToOld if exact else pg.KLToOld)(beta, target=target)
    step = pg.DualDescent(epochs=30, rounds=rounds)
    algorithm = replace(pg.DR_GRPO, aggregation=pg.TokenMean(), gate=pg.Importance(), terms=(term,), update_rule=step)
    learner = TabularLearner(2, 1, 4, lr)
    batch = learner.evaluate(TABLE, algorithm.needs)
    metrics = learner.update(batch, algorithm.compute_advantages(batch), algorithm)
    return learner, algorithm, metrics, batch


def true_kl(learner: TabularLearner) -> float:
    """KL(π_old‖π_θ) of the table, π_old uniform: the states are the two prompts."""
    now = learner.table.detach().log_softmax(-1)
    return float((0.25 * (torch.tensor(0.25).log() - now)).sum(-1).mean())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("beta", [0.01, 10.0])
def test_dual_descent_ends_inside_the_band(beta: float, exact: bool) -> None:
    """From a β far too small and one far too large. All four tokens were sampled once: k3 is the exact KL here."""
    learner, algorithm, metrics, batch = dual(0.02, beta, exact)
    kl = true_kl(learner)
    assert 0.02 / 1.5 <= kl <= 1.5 * 0.02
    assert metrics["kl_old/last"].value == pytest.approx(kl, rel=1e-6)
    rounds = int(metrics["dual_rounds"].value)
    assert 1 < rounds < 12
    (term,) = algorithm.with_state(algorithm.update_state(algorithm.init_state(), batch, metrics)).terms
    moved = beta * 2.0 ** ((rounds - 1) if beta < 1 else -(rounds - 1))
    assert term.beta == pytest.approx(moved)  # type: ignore[attr-defined]  # the next rollout begins where this one ended
    name = "beta/exact_kl_to_old" if exact else "beta/kl_to_old"
    assert metrics[f"{name}/last"].value == pytest.approx(moved)


def test_beta_is_adapted_after_the_last_round() -> None:
    """Two rounds are too few: β doubles between them and once more for the next rollout."""
    learner, algorithm, metrics, batch = dual(0.002, 0.01, True, rounds=2)
    assert true_kl(learner) > 1.5 * 0.002
    assert metrics["dual_rounds"] == Sum(2.0)
    (term,) = algorithm.with_state(algorithm.update_state(algorithm.init_state(), batch, metrics)).terms
    assert term.beta == pytest.approx(0.04)  # type: ignore[attr-defined]
    assert learner.version == 60
    assert algorithm.update_rule.updates == 60


def test_dual_descent_stops_within_the_band() -> None:
    learner, algorithm, metrics, batch = dual(0.02, 0.01, True, rounds=1)
    inside_at = true_kl(learner)
    learner, algorithm, metrics, batch = dual(inside_at, 0.01, True)
    assert metrics["dual_rounds"] == Sum(1.0)
    assert algorithm.update_state(algorithm.init_state(), batch, metrics) == algorithm.init_state()
