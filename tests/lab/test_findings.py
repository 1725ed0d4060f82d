"""Theorems hold, on several seeds; what is only usually so is measured, and its sentence follows the numbers."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from policygrad.lab import report
from policygrad.lab.findings.ratios import Chain
from policygrad.lab.measurement import Finding
from policygrad.lab.plots import choose_plot
from policygrad.lab.policies import sample_normal
from policygrad.lab.report import CLAIMS, THEORY, single_threaded  # DYNAMICS: test_dynamics.py

THEOREMS = [
    "leave_one_out",
    "group_mean",
    "z_score",
    "optimal_baseline",
    "state_baseline",
    "product_ratio",
    "kl_places",
    "gate_weights",
    *THEORY,
]
"""True in every world; the rest is a matter of fact."""


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, int], Finding]:
    with single_threaded():
        return {(name, seed): f(seed) for name, f in (CLAIMS | THEORY).items() for seed in (0, 1)}


@pytest.mark.parametrize("name", THEOREMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_theorems_hold(found, name: str, seed: int) -> None:
    finding = found[name, seed]
    assert finding.holds, finding.sentence
    assert finding.error is None


@pytest.mark.parametrize("name", [*CLAIMS, *THEORY])
def test_a_finding_contains_its_numbers(found, name: str) -> None:
    first, second = found[name, 0], found[name, 1]
    assert first.name == name
    assert first.sentence.endswith(".")
    assert re.search(r"\d", first.sentence) or name == "occupancy_sum"
    assert all(isinstance(x, float) for x in first.numbers.values())
    assert len({len(column) for column in first.curves.values()}) <= 1
    with single_threaded():
        assert first == report.run_experiments([name], 0)[0]  # the same seed, the same numbers
    if name not in ("z_score", "gate_weights"):  # which draw nothing
        assert first.sentence != second.sentence


def undrawn(finding: Finding) -> set[str]:
    """Columns that the page leaves out."""
    plot = choose_plot(finding)
    return (
        set(finding.curves) - {next(iter(finding.curves), "")} - {c for p in plot.panels for c in p.columns}
        if plot
        else set()
    )


@pytest.mark.parametrize("name", [*CLAIMS, *THEORY])
def test_every_curve_is_plotted(found, name: str) -> None:
    assert undrawn(found[name, 0]) == undrawn(found[name, 1]) == set(), "a column is in no panel of PLOTS"


def test_empirical_findings_have_their_known_sign(found) -> None:
    """Signs of the empirical findings on the default seed: a change of one of them is news."""
    by = {name: found[name, 0] for name in CLAIMS}
    weights = by["z_score"].numbers
    assert 1 < weights["ratio_4"] < weights["ratio_8"] < weights["ratio_32"]
    assert by["sequence_mean"].numbers["right"] < 1
    assert by["sequence_mean"].numbers["wrong"] < 1
    assert by["gates"].holds
    assert by["gae_curve"].holds
    assert by["turn_credit"].holds
    credit = by["turn_credit"].numbers
    assert credit["lost TurnReturn"] > credit["lost outcome to all turns"]  # less variance is no theorem
    assert credit["exact_both"] > 0.1 > 1e-9 > max(credit["exact_turn"], credit["exact_token"])
    assert by["gae_curve"].numbers["best_lambda_0"] == 0
    assert by["experts"].holds
    spread = by["ratio_over_length"].curves["spread_token"]  # one distance per token: no growth with the length
    assert max(spread) < 1.1 * min(spread)
    assert by["group_size"].numbers["slope"] <= -0.5
    assert by["more_statistics"].holds
    assert by["brevity"].holds
    assert by["adam"].numbers["first_skewed"] < 0 < by["adam"].numbers["late_usual"]
    assert not by["adam"].holds
    assert "lost" in by["adam"].sentence
    assert not by["ratio_over_length"].holds
    assert "does not at every length" in by["ratio_over_length"].sentence
    chains = by["long_chains"]
    assert not chains.holds
    assert chains.numbers["times_0.02_8"] < 1.1 < chains.numbers["times_0.02_128"] < chains.numbers["times_0.02_512"]
    assert chains.numbers["drift_token"] < 0.05 < 0.5 < chains.numbers["drift_sequence"]
    assert "it jumps as well" in by["experts"].sentence
    assert math.exp(by["experts"].numbers["growth_token"] - by["experts"].numbers["growth_less"]) > 1
    assert "with a fixed α" in by["adam"].sentence


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
    found = chain.earns[states, tokens].sum(1) / math.sqrt(n)
    assert float(found.mean()) == pytest.approx(total, abs=4 * float(found.std()) / 20_000**0.5)


def test_unknown_experiments_are_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match="did you mean 'z_score'"):
        report.run_experiments(["zscore"])
