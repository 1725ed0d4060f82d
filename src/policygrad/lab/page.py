"""The lab's report as one HTML page with interactive plots. It reads the report; nothing of the lab reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from policygrad.algorithms import ALGORITHMS
from policygrad.catalog import ABOUT
from policygrad.core.advantages import BatchStd, GroupStd
from policygrad.core.algorithm import Algorithm
from policygrad.core.process import ProcessReward
from policygrad.lab.findings.ratios import SHAPE_GATES, weights
from policygrad.lab.measurement import Finding
from policygrad.lab.plots import plot_of
from policygrad.lab.report import LabReport
from policygrad.pages.render import framed

# Findings by theme, as the page shows them.

SECTIONS: dict[str, tuple[str, ...]] = {
    "Baselines and groups": (
        "z_score",
        "group_size",
        "more_statistics",
        "optimal_baseline",
        "group_mean",
        "leave_one_out",
        "state_baseline",
    ),
    "Ratios and gates": ("gate_weights", "gates", "ratio_over_length", "long_chains", "product_ratio", "experts"),
    "Critics": ("gae_curve",),
    "Turns": ("turn_credit",),
    "Length": ("sequence_mean", "brevity"),
    "KL and optimiser": ("kl_places", "adam"),
    "Trust regions": (
        "bound_over_step",
        "trust_region_bound",
        "monotonic_improvement",
        "conservative_mixture",
        "natural_invariance",
        "performance_difference",
        "surrogate_matches",
        "occupancy_sum",
    ),
    "How training goes wrong": ("entropy_collapse", "reward_hacking", "length_drift", "k1_in_loss"),
}
"""Those of no theme come last."""


def sections(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """Findings by theme."""
    by_name = {f.name: f for f in findings}
    themes = {title: [by_name.pop(name) for name in names if name in by_name] for title, names in SECTIONS.items()}
    themes["Other findings"] = list(by_name.values())
    return {title: list_ for title, list_ in themes.items() if list_}


# The report as one HTML file that asks the network for nothing: text by a template, plots by `web/page.js`.

FAMILIES = ("a mean as baseline", "÷ standard deviation", "a value for each token", "your own")
FIGURES = {
    "scale": ("scale", "how long E g is along ∇J; a learning rate absorbs it"),
    "bias": ("bias", "‖E g − ∇J‖/‖∇J‖, scale included"),
    "cosine": ("cosine", "of E g and ∇J"),
    "variance": ("variance", "tr Cov g/‖∇J‖²"),
    "mse": ("MSE", "E‖g − ∇J‖²/‖∇J‖²"),
    "snr": ("SNR", "‖E g‖²/tr Cov g"),
    "best_mse": ("best", "the MSE at the best length; 1 = g says nothing"),
}


def page(
    found: LabReport, algorithms: Mapping[str, Algorithm], matrix: Mapping[str, Mapping[str, Sequence[str]]]
) -> str:
    """The page.

    algorithms: those that were measured, by the names in the report.
    matrix: for each of them its parts by column, in words.
    """
    findings = [with_own_gates(f, algorithms) if f.name == "gate_weights" else f for f in found.findings]
    web = files("policygrad.lab") / "web"
    told = found.to_dict()
    columns = [
        c
        for c in dict.fromkeys(c for row in matrix.values() for c in row)
        if any(row.get(c) for row in matrix.values())
    ]
    return framed(
        web / "page.html",
        {"algorithms": _rows(told, algorithms), "families": FAMILIES, "plots": _plots(findings)},
        scripts=(web / "page.js",),
        found=found,
        figures=FIGURES,
        columns=columns,
        matrix=matrix,
        about=ABOUT,
        sections=sections(found.findings),
        plotted={f.name for f in found.findings if f.curves},
        held=sum(f.holds for f in found.findings),
        sampled=not all(m.exact for pair in found.rows for m in pair),
    )


def with_own_gates(finding: Finding, algorithms: Mapping[str, Algorithm]) -> Finding:
    """The weights of the library's gates, and beside them those of gates that are not the library's."""
    known, ratios = (
        [*SHAPE_GATES.values(), *(a.gate for a in ALGORITHMS.values())],
        finding.curves["ratio"],
    )  # not all have a hash
    own = {name: a.gate for name, a in algorithms.items() if a.gate not in known}
    curves = {f"{name} {way}": weights(g, ratios, s) for name, g in own.items() for way, s in (("up", 1), ("down", -1))}
    return replace(finding, curves={**finding.curves, **curves})


def family(name: str, algorithm: Algorithm) -> int:
    """Which of `FAMILIES`."""
    if name not in ALGORITHMS:
        return 3
    if algorithm.critic is not None or any(link.samples_values for link in algorithm.psi):
        return 2
    return int(any(isinstance(part, (GroupStd, BatchStd, ProcessReward)) for part in algorithm.psi))


def _rows(told: dict[str, Any], algorithms: Mapping[str, Algorithm]) -> list[dict[str, Any]]:
    sides = ("on_policy", "off_policy")
    return [
        {
            "name": row["name"],
            "family": family(row["name"], algorithms[row["name"]]),
            "sides": [row[side]["figures"] for side in sides],
            "errors": [row[side]["errors"] for side in sides],
        }
        for row in told["algorithms"]
    ]


def _plots(findings: Sequence[Finding]) -> dict[str, Any]:
    plots = {finding.name: (plot_of(finding), finding) for finding in findings}
    return {name: plot.drawn(finding) for name, (plot, finding) in plots.items() if plot is not None}
