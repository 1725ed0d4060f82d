"""The lab's report as one HTML page with interactive plots. It reads the report; nothing of the lab reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from policygrad.algorithms import ALGORITHMS
from policygrad.catalog import CATALOG
from policygrad.core.advantages import BatchStd, GroupStd
from policygrad.core.algorithm import Algorithm
from policygrad.core.process import ProcessReward
from policygrad.lab.findings.ratios import SHAPE_GATES, gate_curve
from policygrad.lab.measurement import Finding
from policygrad.lab.plots import choose_plot
from policygrad.lab.report import LabReport
from policygrad.pages.render import render_page

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


def group_findings(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
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


def render_lab_page(
    report: LabReport, algorithms: Mapping[str, Algorithm], matrix: Mapping[str, Mapping[str, Sequence[str]]]
) -> str:
    """The page.

    algorithms: those that were measured, by the names in the report.
    matrix: for each of them its parts by column, in words.
    """
    findings = [add_custom_gates(f, algorithms) if f.name == "gate_weights" else f for f in report.findings]
    web = files("policygrad.lab") / "web"
    report_dict = report.to_dict()
    columns = [
        c
        for c in dict.fromkeys(c for row in matrix.values() for c in row)
        if any(row.get(c) for row in matrix.values())
    ]
    return render_page(
        web / "page.html",
        {"algorithms": _rows(report_dict, algorithms), "families": FAMILIES, "plots": _plots(findings)},
        scripts=(web / "page.js",),
        found=report,
        figures=FIGURES,
        columns=columns,
        matrix=matrix,
        about=CATALOG,
        sections=group_findings(report.findings),
        plotted={f.name for f in report.findings if f.curves},
        held=sum(f.holds for f in report.findings),
        sampled=not all(m.exact for pair in report.rows for m in pair),
    )


def add_custom_gates(finding: Finding, algorithms: Mapping[str, Algorithm]) -> Finding:
    """The weights of the library's gates, and beside them those of gates that are not the library's."""
    library_gates, ratios = (
        [*SHAPE_GATES.values(), *(a.gate for a in ALGORITHMS.values())],
        finding.curves["ratio"],
    )  # not all have a hash
    custom_gates = {name: a.gate for name, a in algorithms.items() if a.gate not in library_gates}
    curves = {
        f"{name} {way}": gate_curve(g, ratios, s)
        for name, g in custom_gates.items()
        for way, s in (("up", 1), ("down", -1))
    }
    return replace(finding, curves={**finding.curves, **curves})


def classify_algorithm(name: str, algorithm: Algorithm) -> int:
    """Which of `FAMILIES`."""
    if name not in ALGORITHMS:
        return 3
    if algorithm.critic is not None or any(link.samples_values for link in algorithm.advantage):
        return 2
    return int(any(isinstance(part, (GroupStd, BatchStd, ProcessReward)) for part in algorithm.advantage))


def _rows(report_dict: dict[str, Any], algorithms: Mapping[str, Algorithm]) -> list[dict[str, Any]]:
    sides = ("on_policy", "off_policy")
    return [
        {
            "name": row["name"],
            "family": classify_algorithm(row["name"], algorithms[row["name"]]),
            "sides": [row[side]["figures"] for side in sides],
            "errors": [row[side]["errors"] for side in sides],
        }
        for row in report_dict["algorithms"]
    ]


def _plots(findings: Sequence[Finding]) -> dict[str, Any]:
    plots = {finding.name: (choose_plot(finding), finding) for finding in findings}
    return {name: plot.to_data(finding) for name, (plot, finding) in plots.items() if plot is not None}
