"""Render a comparison as one offline HTML page with interactive plots."""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import files
from typing import Any

from policygrad.compare.report import ComparisonReport, Kind, describe_preregistration, format_learning_rate, pluralise
from policygrad.compare.runner import AXES
from policygrad.pages.render import BANDS, render_page

MAX_SHOWN_ROWS = 8  # rows whose curves are shown at first: those with the largest area
MEASURES = {
    "tokens": "at equal tokens",
    "updates": "at equal updates",
    "seconds": "at equal seconds",
    "area": "area under the curve",
}
DIAGNOSTIC_COLUMNS = {
    "entropy": ("entropy", "nats a token, over the last fifth of the steps"),
    "kl": ("KL", "to the reference, nats a token, over the last fifth of the steps"),
    "length": ("length", "tokens of an answer, over the last fifth of the steps"),
    "truncated": ("cut off", "fraction of answers cut off by the token budget, over the last fifth of the steps"),
}


def render_comparison(report: ComparisonReport) -> str:
    """Render the page."""
    # measure -> first -> second -> [P(first above second), low, high, 1 if they differ], both ways
    pairs: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in MEASURES}
    for name, cells in pairs.items():
        for pair in report.pairs:
            p, separated = pair.probability[name], float(pair.separated[name])
            cells.setdefault(pair.first, {})[pair.second] = [p.value, p.low, p.high, separated]
            cells.setdefault(pair.second, {})[pair.first] = [1 - p.value, 1 - p.high, 1 - p.low, separated]
    tuned = [row for row in report.rows if row.tuning]
    data = {
        "axes": {axis: {"label": AXES[axis], "values": list(points)} for axis, points in report.axes.items()},
        "kinds": [_kind(report, number, kind) for number, kind in enumerate(report.kinds)],
        "pairs": pairs,
        "rates": {name: plot_tuning(report, name) for name in dict.fromkeys(row.tuned_option for row in tuned)},
    }
    known = {name for row in report.rows if row.summary for name in row.summary.means}
    labels = [row.label for row in report.rows]
    names = f"{', '.join(labels[:-1])} and {labels[-1]}" if 1 < len(labels) <= 5 else f"{len(labels)} rows"
    web = files("policygrad.compare") / "web"
    return render_page(
        web / "compare.html",
        data,
        styles=(web / "compare.css",),
        scripts=(BANDS, web / "compare.js"),
        filters={"short": format_short, "counted": pluralise, "share": lambda x: f"{x:.0%}"},
        found=report,
        title=f"{names}, compared" if len(labels) > 1 else f"{labels[0]}, measured",
        axes=AXES,
        measures=MEASURES,
        preregistration=describe_preregistration(report),
        signs={key: texts for key, texts in DIAGNOSTIC_COLUMNS.items() if key in known},
        tuned=tuned,
        rate=format_learning_rate,
    )


def _kind(report: ComparisonReport, number: int, kind: Kind) -> dict[str, Any]:
    rows = [row for row in report.rows if row.kind == number and row.summary]
    best = sorted(rows, key=lambda row: -row.summary.area.value if row.summary else 0.0)[:MAX_SHOWN_ROWS]
    return {
        "equal": dict(kind.equal),
        "threshold": kind.threshold,
        "rows": [
            {
                "label": row.label,
                "hidden": row not in best,
                "curves": {axis: asdict(band) for axis, band in row.summary.curves.items()} if row.summary else {},
            }
            for row in rows
        ],
    }


def plot_tuning(report: ComparisonReport, option: str) -> dict[str, Any]:
    """Return the plot of mean final scores over the values of a tuned option."""
    rows = [row for row in report.rows if row.tuned_option == option and row.tuning]
    values = sorted({tried.value for row in rows for tried in row.tuning})
    means = [{tried.value: tried.mean for tried in row.tuning} for row in rows]
    lines = [{"series": i, "values": [by_value.get(x) for x in values]} for i, by_value in enumerate(means)]
    panel = {"label": "mean final score on the tuning seeds", "log": False, "low": None, "high": None, "lines": lines}
    label = "learning rate" if option == "--lr" else option.removeprefix("--algorithm.")
    return {
        "x": {"label": label, "values": values, "log": True},
        "series": [row.label for row in rows],
        "panels": [panel],
    }


def format_short(x: float | None) -> str:
    """Format as 0.12, 38, 1.2k, 250k; – for None."""
    if x is None:
        return "–"
    if abs(x) < 1000:
        return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"
    return f"{x / 1000:.3g}k" if abs(x) < 1e6 else f"{x / 1e6:.3g}M"
