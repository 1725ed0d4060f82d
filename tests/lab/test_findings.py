"""Theorems hold, on several seeds; what is only usually so is measured, and its sentence follows the numbers."""

from __future__ import annotations

import re

import pytest

from policygrad.lab import experiments
from policygrad.lab.experiments import CLAIMS, THEORY  # DYNAMICS: test_dynamics.py
from policygrad.lab.finding import Finding
from policygrad.lab.page.plots import plot_of
from policygrad.lab.report import one_thread

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
    with one_thread():
        return {(name, seed): f(seed) for name, f in (CLAIMS | THEORY).items() for seed in (0, 1)}


@pytest.mark.parametrize("name", THEOREMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_theorems_hold(found, name: str, seed: int) -> None:
    finding = found[name, seed]
    assert finding.holds, finding.sentence
    assert finding.error is None


@pytest.mark.parametrize("name", [*CLAIMS, *THEORY])
def test_a_finding_says_its_numbers(found, name: str) -> None:
    first, second = found[name, 0], found[name, 1]
    assert first.name == name
    assert first.sentence.endswith(".")
    assert re.search(r"\d", first.sentence) or name == "occupancy_sum"
    assert all(isinstance(x, float) for x in first.numbers.values())
    assert len({len(column) for column in first.curves.values()}) <= 1
    with one_thread():
        assert first == experiments.run([name], 0)[0]  # the same seed, the same numbers
    if name not in ("z_score", "gate_weights"):  # which draw nothing
        assert first.sentence != second.sentence


def undrawn(finding: Finding) -> set[str]:
    """Columns that the page leaves out."""
    plot = plot_of(finding)
    return (
        set(finding.curves) - {next(iter(finding.curves), "")} - {c for p in plot.panels for c in p.columns}
        if plot
        else set()
    )


@pytest.mark.parametrize("name", [*CLAIMS, *THEORY])
def test_every_curve_is_drawn(found, name: str) -> None:
    assert undrawn(found[name, 0]) == undrawn(found[name, 1]) == set(), "a column is in no panel of PLOTS"


def test_what_is_measured(found) -> None:
    """Signs of the empirical findings on the default seed: a change of one of them is news."""
    by = {name: found[name, 0] for name in CLAIMS}
    weights = by["z_score"].numbers
    assert 1 < weights["ratio_4"] < weights["ratio_8"] < weights["ratio_32"]
    assert by["sequence_mean"].numbers["right"] < 1
    assert by["sequence_mean"].numbers["wrong"] < 1
    assert by["gates"].holds
    assert by["gae_curve"].holds
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


def test_unknown_experiments_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'z_score'"):
        experiments.run(["zscore"])
