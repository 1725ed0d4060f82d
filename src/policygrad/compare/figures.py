"""The figures, tables and sentences of a comparison, for `policygrad compare --export`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from policygrad.compare.page import plot_tuning
from policygrad.compare.report import ComparisonReport, Kind, format_learning_rate
from policygrad.compare.runner import AXES
from policygrad.compare.statistics import Estimate
from policygrad.pages.export import Export, Figure, Interval, Table

SHOWN = ("updates", "tokens", "seconds", "entropy", "kl", "length", "truncated")


def build_export(report: ComparisonReport) -> Export:
    """Return everything to write: curves over each axis, tuned values, scores, effort, pairs, and the claims."""
    labels = ", ".join(row.label for row in report.rows)
    sentences = [
        f"Allowed: {claim.text}. {claim.reason[0].upper()}{claim.reason[1:]}."
        for claim in report.claims
        if claim.allowed
    ]
    sentences += [f"Not allowed: {claim.text}: {claim.reason}." for claim in report.claims if not claim.allowed]
    sentences += [*report.ranking, *report.caveats]
    return Export(
        f"Comparison of {labels}",
        report.command,
        tuple(sentences),
        tuple(_list_figures(report)),
        tuple(_list_tables(report)),
    )


def _list_figures(report: ComparisonReport) -> Iterator[Figure]:
    for number, kind in enumerate(report.kinds):
        for axis in AXES:
            yield _draw_curves(report, number, kind, axis)
    for option in dict.fromkeys(row.tuned_option for row in report.rows if row.tuning):
        name = f"tuning-{option.removeprefix('--').rpartition('.')[2]}"
        yield Figure(name, f"Mean final score by {option} on the tuning seeds", plot_tuning(report, option))


def _draw_curves(report: ComparisonReport, number: int, kind: Kind, axis: str) -> Figure:
    rows = [row for row in report.rows if row.kind == number and row.summary]
    lines = list[dict[str, Any]]()
    for i, row in enumerate(rows):
        band = row.summary.curves[axis] if row.summary else None
        if band is not None:
            lines.append({"series": i, "values": band.value, "band_low": band.low, "band_high": band.high})
    panel = {"label": "held-out score, interquartile mean", "log": False, "low": None, "high": None, "lines": lines}
    suffix = f"-{number + 1}" if len(report.kinds) > 1 else ""
    return Figure(
        f"curves-{axis}{suffix}",
        f"Held-out score over {AXES[axis]}, {kind.measure.get('task')}; bands are 95 % bootstrap intervals",
        {
            "x": {"label": AXES[axis], "values": report.axes[axis], "log": False},
            "series": [row.label for row in rows],
            "panels": [panel],
        },
    )


def _list_tables(report: ComparisonReport) -> Iterator[Table]:
    seeds = f"{len(report.seeds)} seeds, {report.tokens:,} sampled tokens a run"
    rows = [row for row in report.rows if row.summary]
    yield Table(
        "scores",
        f"Interquartile means of held-out scores with 95 % stratified bootstrap intervals; {seeds}.",
        ("row", "learning rate", "before", *(f"equal {axis}" for axis in AXES), "area", "seeds"),
        tuple(
            (
                row.label,
                format_learning_rate(row),
                s.before,
                *(_interval(s.equal[axis]) for axis in AXES),
                _interval(s.area),
                float(len(row.runs)),
            )
            for row in rows
            if (s := row.summary) is not None
        ),
    )
    known = [name for name in SHOWN if any(s and name in s.means for s in (row.summary for row in rows))]
    yield Table(
        "effort",
        f"What the runs took and how they answered in the last fifth of their steps, means; {seeds}.",
        ("row", *(f"{axis} to the threshold" for axis in AXES), *known),
        tuple(
            (
                row.label,
                *(s.reach[axis].median if axis in s.reach else None for axis in AXES),
                *(s.means.get(name) for name in known),
            )
            for row in rows
            if (s := row.summary) is not None
        ),
    )
    if report.claims:
        yield Table(
            "claims",
            "Differences of interquartile means and the probability that a run of the first row scores above one of the second, "
            f"with 95 % intervals, by {report.metric}.",
            ("higher", "lower", "difference", "P(above)", "may be said"),
            tuple(
                (c.higher, c.lower, _interval(c.difference), _interval(c.probability), "yes" if c.allowed else "no")
                for c in report.claims
            ),
        )


def _interval(estimate: Estimate) -> Interval:
    return Interval(estimate.value, estimate.low, estimate.high)
