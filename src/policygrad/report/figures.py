"""The figures, tables and sentences of runs, for `policygrad report --export`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policygrad.pages.export import Cell, Export, Figure, Interval, Table
from policygrad.report.data import RunRecord, Series, build_curves, group_runs
from policygrad.report.page import choose_first_metrics, name_report
from policygrad.report.summary import ResultSummary, summarise_result
from policygrad.trackers.glossary import find_metric_doc


def build_export(runs: Sequence[RunRecord], command: str) -> Export:
    """Return everything to write: the curves shown first, the results, and a sentence about each."""
    series = group_runs(runs)
    results = [summarise_result(group) for group in series]
    return Export(
        name_report(series),
        command,
        tuple(sentence for result in results if (sentence := state_result(result))),
        tuple(_draw_metric(series, name) for name in choose_first_metrics(series)),
        (_list_results(series, results),),
    )


def state_result(result: ResultSummary) -> str:
    """Return the sentence that the evaluations allow; "" without a result."""
    if result.before is None or result.after is None:
        return ""
    said = f"{result.label}: {result.metric} {result.before:.3f} before and {result.after:.3f} after, {result.change}"
    if result.metric.startswith("held-out") and result.interval is not None and result.num_runs == 1:
        low, high = result.interval
        if low <= 0 <= high:
            return f"{said}: no change can be claimed."
        return (
            f"{said}: it has {'risen' if low > 0 else 'fallen'} on these problems, of one run; other seeds may differ."
        )
    if result.num_runs > 1:
        return f"{said}; the range is that of the runs, no confidence interval."
    return f"{said}; without an error, so that no change can be claimed."


def _draw_metric(series: Sequence[Series], name: str) -> Figure:
    curve, doc = build_curves(series, name), find_metric_doc(name)
    title = doc.title if doc is not None and doc.title else name
    lines = list[dict[str, Any]]()
    for i, line in enumerate(curve["lines"]):
        if line is not None:
            band = {"band_low": line["low"], "band_high": line["high"]} if "low" in line else {}
            lines.append({"series": i, "values": line["value"], **band})
    unit = f", {doc.unit}" if doc is not None and doc.unit not in ("", title) else ""
    panel = {"label": f"{title}{unit}", "log": False, "low": None, "high": None, "lines": lines}
    drawn = {
        "x": {"label": "step", "values": curve["x"], "log": False},
        "series": [s.label for s in series],
        "panels": [panel],
    }
    return Figure(name.replace("/", "-"), f"{title} over the steps", drawn)


def _list_results(series: Sequence[Series], results: Sequence[ResultSummary]) -> Table:
    rows = list[tuple[Cell, ...]]()
    for group, result in zip(series, results, strict=True):
        change: Cell = None
        if result.before is not None and result.after is not None:
            change = result.after - result.before
            change = change if result.interval is None else Interval(change, *result.interval)
        rows.append(
            (result.label, result.metric, result.before, result.after, change, float(len(group.runs)), group.steps)
        )
    return Table(
        "results",
        "Results before and after training. Of one run the interval is the 95 % one over problems, of several runs their range.",
        ("run", "of", "before", "after", "change", "runs", "steps"),
        tuple(rows),
    )
