"""The figures, tables and sentences of the lab's report, for `policygrad lab --export`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from policygrad.core.algorithm import Algorithm
from policygrad.lab.page import FAMILIES, FIGURES, classify_algorithm
from policygrad.lab.plots import choose_plot
from policygrad.lab.report import LabReport
from policygrad.pages.export import Cell, Export, Figure, Interval, Table

SIDES = ("on_policy", "off_policy")


def build_export(report: LabReport, algorithms: Mapping[str, Algorithm], command: str) -> Export:
    """Return everything to write: each finding's plot, bias against variance, the figures of all estimators, and what was found."""
    found = [f"{f.claim}: {'holds' if f.holds else 'does not hold'}. {f.sentence}" for f in report.findings]
    sentences = [f"These sentences are about {report.world}, groups of {report.group_size}.", *report.parts, *found]
    plots = [Figure(f.name, f.claim, plot.to_data(f)) for f in report.findings if (plot := choose_plot(f)) is not None]
    rows = report.to_dict()["algorithms"]
    scatters = [_draw_scatter(rows, algorithms, side) for side in SIDES]
    tables = tuple(_list_figures(report, rows, side) for side in SIDES)
    return Export("Gradient estimators, measured", command, tuple(sentences), (*scatters, *plots), tables)


def _draw_scatter(rows: list[dict[str, Any]], algorithms: Mapping[str, Algorithm], side: str) -> Figure:
    """Return bias against variance, a point for each algorithm, by family."""
    points = sorted((row[side]["figures"]["bias"], row[side]["figures"]["variance"], row["name"]) for row in rows)
    families = [classify_algorithm(name, algorithms[name]) for _, _, name in points]
    used = sorted(set(families))

    def line(family: int) -> dict[str, Any]:
        values = [v if f == family and v > 0 else None for (_, v, _), f in zip(points, families, strict=True)]
        return {"series": used.index(family), "values": values, "names": [name for _, _, name in points]}

    lines = [line(f) for f in used]
    shown = [v for _, v, _ in points if v > 0]
    panel = {
        "label": "variance / ‖∇J‖²",
        "log": True,
        "low": min(shown) / 1.2,
        "high": max(shown) * 1.2,
        "lines": lines,
    }
    largest = max(bias for bias, _, _ in points)
    words = side.replace("_", "-")
    return Figure(
        f"bias-and-variance-{words}",
        f"Bias and variance of each algorithm's gradient, {words}",
        {
            "x": {
                "label": "bias / ‖∇J‖",
                "values": [b for b, _, _ in points],
                "log": False,
                "low": -0.03 * largest,
                "high": 1.15 * largest,
            },
            "series": [FAMILIES[f] for f in used],
            "panels": [panel],
        },
    )


def _list_figures(report: LabReport, rows: list[dict[str, Any]], side: str) -> Table:
    words = "on-policy" if side == "on_policy" else f"off-policy, {report.kl:g} nats away"
    return Table(
        f"estimators-{side.replace('_', '-')}",
        f"Gradient estimators against the true gradient, {words}, groups of {report.group_size}. Exact where there is no interval.",
        ("algorithm", *(label for label, _ in FIGURES.values())),
        tuple((row["name"], *_cells(row[side])) for row in rows),
    )


def _cells(measured: dict[str, Any]) -> Iterator[Cell]:
    errors = measured["errors"] or {}
    for key in FIGURES:
        value = measured["figures"][key]
        error = errors.get(key)
        yield value if value is None or not error else Interval.around(value, error)
