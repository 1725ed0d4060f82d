"""The lab's report as one HTML file with interactive plots, which needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files

from policygrad.algorithms import ALGORITHMS
from policygrad.catalog import CATALOG
from policygrad.core.advantages import BatchStd, GroupStd
from policygrad.core.algorithm import Algorithm
from policygrad.core.process import ProcessReward
from policygrad.lab.findings.ratios import SHAPE_GATES, gate_curve
from policygrad.lab.measurement import MeasuredClaim
from policygrad.lab.plots import choose_plot
from policygrad.lab.report import DYNAMICS, THEORY, LabReport
from policygrad.pages.render import render_page

# Findings by theme; those without a theme come last.
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
    "Ratios and gates": (
        "gate_weights",
        "gates",
        "ratio_over_length",
        "long_chains",
        "product_ratio",
        "experts",
        "rejection",
        "beyond_the_clip",
    ),
    "Which samples are kept": ("kept_answers", "filtered_answers", "reward_range"),
    "Rewards on another scale": ("running_scale", "marginal_max"),
    "Teachers and preferences": ("likeliest_tokens", "teacher_bonus", "preference_pairs"),
    "Critics": ("gae_curve",),
    "Turns": ("turn_credit",),
    "Length": ("sequence_mean", "brevity"),
    "KL and optimiser": ("kl_places", "adam"),
    "Trust regions": tuple(THEORY),
    "How training goes wrong": tuple(DYNAMICS),
}


def group_findings(findings: Sequence[MeasuredClaim]) -> dict[str, list[MeasuredClaim]]:
    """Group findings by theme."""
    by_name = {f.name: f for f in findings}
    themes = {title: [by_name.pop(name) for name in names if name in by_name] for title, names in SECTIONS.items()}
    themes["Other findings"] = list(by_name.values())
    return {title: group for title, group in themes.items() if group}


FAMILIES = ("a mean as baseline", "÷ standard deviation", "a value for each token", "your own")
FIGURES = {
    "scale": ("scale", "the length of E g along ∇J; a learning rate absorbs it"),
    "bias": ("bias", "‖E g − ∇J‖/‖∇J‖, scale included"),
    "cosine": ("cosine", "of E g and ∇J"),
    "variance": ("variance", "tr Cov g/‖∇J‖²"),
    "mse": ("MSE", "E‖g − ∇J‖²/‖∇J‖²"),
    "snr": ("SNR", "‖E g‖²/tr Cov g"),
    "best_mse": ("best", "the MSE at the best length; 1 = g contains no information"),
}


def render_lab_page(
    report: LabReport,
    algorithms: Mapping[str, Algorithm],
    matrix: Mapping[str, Mapping[str, Sequence[str]]],
    command: str = "policygrad lab",
) -> str:
    """Render the page.

    Args:
        algorithms: The measured algorithms, by their names in the report.
        matrix: The description of each algorithm's parts, by column.
        command: What made the report.
    """
    library_gates = [*SHAPE_GATES.values(), *(a.gate for a in ALGORITHMS.values())]  # a list: not all are hashable
    custom_gates = {name: a.gate for name, a in algorithms.items() if a.gate not in library_gates}
    findings = []
    for measured in report.findings:
        curves = dict(measured.curves)
        for name, gate in custom_gates.items() if measured.name == "gate_weights" else ():
            curves |= {
                f"{name} {way}": gate_curve(gate, curves["ratio"], sign) for way, sign in (("up", 1), ("down", -1))
            }
        findings.append(replace(measured, curves=curves))
    web = files("policygrad.lab") / "web"
    sides = ("on_policy", "off_policy")
    rows = [
        {
            "name": row["name"],
            "family": classify_algorithm(row["name"], algorithms[row["name"]]),
            "sides": [row[side]["figures"] for side in sides],
            "errors": [row[side]["errors"] for side in sides],
        }
        for row in report.to_dict()["algorithms"]
    ]
    plots = {f.name: plot.to_data(f) for f in findings if (plot := choose_plot(f)) is not None}
    columns = list(dict.fromkeys(column for row in matrix.values() for column, parts in row.items() if parts))
    return render_page(
        web / "page.html",
        {"algorithms": rows, "families": FAMILIES, "plots": plots},
        scripts=(web / "page.js",),
        found=report,
        command=command,
        figures=FIGURES,
        columns=columns,
        matrix=matrix,
        about=CATALOG,
        sections=group_findings(report.findings),
        plotted={f.name for f in report.findings if f.curves},
        held=sum(f.holds for f in report.findings),
        sampled=not all(m.exact for pair in report.rows for m in pair),
    )


def classify_algorithm(name: str, algorithm: Algorithm) -> int:
    """Return the index in `FAMILIES`."""
    if name not in ALGORITHMS:
        return 3
    if algorithm.critic is not None or any(link.samples_values for link in algorithm.advantage):
        return 2
    return int(any(isinstance(part, (GroupStd, BatchStd, ProcessReward)) for part in algorithm.advantage))
