"""Theorems hold, on several seeds; what is only usually so is measured, and its sentence follows the numbers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from functools import cache

import pytest

from policygrad.lab import report
from policygrad.lab.findings.ratios import Chain
from policygrad.lab.measurement import MeasuredClaim
from policygrad.lab.plots import choose_plot
from policygrad.lab.report import CLAIMS, THEORY, single_threaded  # DYNAMICS: test_dynamics.py
from policygrad.lab.sequences import sample_normal

THEOREMS = [
    "leave_one_out",
    "group_mean",
    "z_score",
    "optimal_baseline",
    "state_baseline",
    "product_ratio",
    "kl_places",
    "gate_weights",
    "marginal_max",
    *THEORY,
]
"""True in every world; the rest is a matter of fact."""


# Signs of the empirical findings on the default seed: a change of one of them is news.


def check_adam(measured: MeasuredClaim) -> None:
    assert measured.numbers["first_skewed"] < 0 < measured.numbers["late_usual"]
    assert not measured.holds
    assert "lost" in measured.sentence
    assert "with a fixed α" in measured.sentence


def check_experts(measured: MeasuredClaim) -> None:
    assert measured.holds
    assert "it jumps as well" in measured.sentence
    assert math.exp(measured.numbers["growth_token"] - measured.numbers["growth_less"]) > 1


def check_gae_curve(measured: MeasuredClaim) -> None:
    assert measured.holds
    assert measured.numbers["best_lambda_0"] == 0


def check_group_size(measured: MeasuredClaim) -> None:
    assert measured.numbers["slope"] <= -0.5


def check_holds(measured: MeasuredClaim) -> None:
    assert measured.holds


def check_long_chains(measured: MeasuredClaim) -> None:
    assert not measured.holds
    n = measured.numbers
    assert n["times_0.02_8"] < 1.1 < n["times_0.02_128"] < n["times_0.02_512"]
    assert n["drift_token"] < 0.05 < 0.5 < n["drift_sequence"]


def check_ratio_over_length(measured: MeasuredClaim) -> None:
    assert not measured.holds
    assert "does not at every length" in measured.sentence
    spread = measured.curves["spread_token"]  # one distance per token: no growth with the length
    assert max(spread) < 1.1 * min(spread)


def check_beyond_the_clip(measured: MeasuredClaim) -> None:
    assert not measured.holds
    n = measured.numbers
    for kl in ("0.1", "0.3", "1"):
        assert (
            n[f"cosine_flipped_{kl}"] < n[f"cosine_clip_{kl}"] < n[f"cosine_kept_{kl}"] < n[f"cosine_importance_{kl}"]
        )


def check_filtered_answers(measured: MeasuredClaim) -> None:
    assert measured.holds
    assert measured.numbers["snr_extremes_1"] > measured.numbers["snr_best_1"]


def check_kept_answers(measured: MeasuredClaim) -> None:
    assert not measured.holds
    assert "need not shorten" in measured.sentence


def check_preference_pairs(measured: MeasuredClaim) -> None:
    assert measured.numbers["same"] < 1e-10  # with rewards of 0 and 1, at π_ref: a theorem
    assert measured.numbers["left"] > 0.1
    assert not measured.holds


def check_reward_range(measured: MeasuredClaim) -> None:
    assert not measured.holds
    n = measured.numbers
    for policy in ("on", "off"):
        assert n[f"worth_middle_{policy}"] < n[f"worth_all_{policy}"] < n[f"worth_unequal_{policy}"]


def check_teacher_bonus(measured: MeasuredClaim) -> None:
    assert measured.holds
    n = measured.numbers
    assert n["bias_to go"] < 1e-10 < 0.1 < n["bias_token"] < n["bias_clipped"]
    assert n["cosine other on 1"] < 0.8 < n["cosine taught on 1"]


def check_rejection(measured: MeasuredClaim) -> None:
    assert not measured.holds
    n = measured.numbers
    for kl in ("0.02", "0.1", "0.3"):
        assert n[f"bias_capped_{kl}"] < n[f"bias_none_{kl}"] < n[f"bias_geometric_{kl}"]


def check_sequence_mean(measured: MeasuredClaim) -> None:
    assert measured.numbers["right"] < 1
    assert measured.numbers["wrong"] < 1


def check_turn_credit(measured: MeasuredClaim) -> None:
    assert measured.holds
    credit = measured.numbers
    assert credit["lost TurnReturn"] > credit["lost outcome to all turns"]  # less variance is no theorem
    assert credit["exact_both"] > 0.1 > 1e-9 > max(credit["exact_turn"], credit["exact_token"])


def check_z_score(measured: MeasuredClaim) -> None:
    weights = measured.numbers
    assert 1 < weights["ratio_4"] < weights["ratio_8"] < weights["ratio_32"]


SIGNS: dict[str, Callable[[MeasuredClaim], None]] = {
    "adam": check_adam,
    "beyond_the_clip": check_beyond_the_clip,
    "brevity": check_holds,
    "experts": check_experts,
    "filtered_answers": check_filtered_answers,
    "gae_curve": check_gae_curve,
    "gates": check_holds,
    "group_size": check_group_size,
    "kept_answers": check_kept_answers,
    "likeliest_tokens": check_holds,
    "long_chains": check_long_chains,
    "more_statistics": check_holds,
    "preference_pairs": check_preference_pairs,
    "ratio_over_length": check_ratio_over_length,
    "rejection": check_rejection,
    "reward_range": check_reward_range,
    "running_scale": check_holds,
    "sequence_mean": check_sequence_mean,
    "teacher_bonus": check_teacher_bonus,
    "turn_credit": check_turn_credit,
    "z_score": check_z_score,
}
SAME = ("z_score", "gate_weights")
"""They draw nothing: their sentences are those of every seed."""


@cache
def measure(name: str, seed: int) -> MeasuredClaim:
    with single_threaded():
        return (CLAIMS | THEORY)[name](seed)


def check_claim(name: str, measured: MeasuredClaim) -> None:
    """What is true of a claim on every seed."""
    assert measured.name == name
    assert measured.sentence.endswith(".")
    assert re.search(r"\d", measured.sentence) or name == "occupancy_sum"
    assert all(isinstance(x, float) for x in measured.numbers.values())
    assert len({len(column) for column in measured.curves.values()}) <= 1
    assert undrawn(measured) == set(), "a column is in no panel of PLOTS"
    if name in THEOREMS:
        assert measured.holds, measured.sentence
        assert measured.error is None


DEAR = (
    *("z_score", "ratio_over_length", "turn_credit", "gae_curve", "long_chains", "kept_answers", "filtered_answers"),
    *("running_scale", "marginal_max", "reward_range", "teacher_bonus"),
)
"""They take seconds."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in DEAR else ()) for name in (*CLAIMS, *THEORY)]
)
def test_a_finding_contains_its_numbers_and_has_its_known_sign(name: str) -> None:
    check_claim(name, measure(name, 0))
    if name in SIGNS:
        SIGNS[name](measure(name, 0))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "brevity" else pytest.mark.full) for name in (*CLAIMS, *THEORY)]
)
def test_a_finding_of_another_seed_has_other_numbers_and_theorems_hold(name: str) -> None:
    check_claim(name, measure(name, 1))
    if name not in SAME:
        assert measure(name, 0).sentence != measure(name, 1).sentence


@pytest.mark.parametrize(
    "name", ["brevity", *(pytest.param(name, marks=pytest.mark.full) for name in ("z_score", "leave_one_out"))]
)
def test_a_seed_gives_the_same_numbers(name: str) -> None:
    """`docs/lab.md` has the numbers of all."""
    assert measure(name, 0) == measure.__wrapped__(name, 0)


def undrawn(measured: MeasuredClaim) -> set[str]:
    """Columns that the page leaves out."""
    plot = choose_plot(measured)
    return (
        set(measured.curves) - {next(iter(measured.curves), "")} - {c for p in plot.panels for c in p.columns}
        if plot
        else set()
    )


def test_chains_are_exact() -> None:
    """J, its visits and its KL of short chains, against every chain with its probability."""
    chain, theta, other = (
        Chain(sample_normal(20, 1.0, 0).reshape(5, 4)),
        sample_normal(20, 0.7, 1),
        sample_normal(20, 0.7, 2),
    )
    n, p, q = 3, chain.policy(theta), chain.policy(other)
    total = kl = 0.0
    for word in itertools.product(range(4), repeat=n):
        states = (4, *word[:-1])
        chance = math.exp(sum(float(p[s, a]) for s, a in zip(states, word, strict=True)))
        total += chance * sum(float(chain.earns[s, a]) for s, a in zip(states, word, strict=True)) / math.sqrt(n)
        kl += chance * sum(float(p[s, a] - q[s, a]) for s, a in zip(states, word, strict=True)) / n
    assert float(chain.objective(theta, n)) == pytest.approx(total, abs=1e-12)
    assert chain.distance(theta, other, n) == pytest.approx(kl, abs=1e-12)
    states, tokens = chain.draw(theta, 20_000, n, 0)
    result = chain.earns[states, tokens].sum(1) / math.sqrt(n)
    assert float(result.mean()) == pytest.approx(total, abs=4 * float(result.std()) / 20_000**0.5)


def test_unknown_experiments_are_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match="did you mean 'z_score'"):
        report.select_experiments(["zscore"])
