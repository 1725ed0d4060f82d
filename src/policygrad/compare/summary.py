"""Summarise one row of a comparison: curves, scores at equal tokens, updates and seconds, and the tuning of its option."""

from __future__ import annotations

import statistics as means
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policygrad.compare.plan import ComparisonPlan, ComparisonRow, Job
from policygrad.compare.runner import AXES, Results, RunOutcome, mean_final_score
from policygrad.compare.statistics import (
    Estimate,
    bootstrap_band,
    estimate_iqm,
    first_crossing,
    mean_height,
    median_crossing,
)

POINTS = 61
"""Number of points of a reported curve."""


@dataclass(frozen=True)
class ThresholdCrossing:
    """When a row's runs first reach the threshold, along one axis."""

    median: float | None
    """Runs that never reach it count as the latest; None if these are half or more."""
    each: tuple[float | None, ...]
    """By seed; None = not within the budget."""

    @property
    def num_reached(self) -> int:
        return sum(x is not None for x in self.each)


@dataclass(frozen=True)
class CurveBand:
    """Interquartile mean and interval of the runs' curves at the axis' points; None beyond the end of the shortest run."""

    value: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True)
class TunedValue:
    """Results of one value of the tuned option."""

    value: float
    scores: tuple[float, ...]
    """Final scores of successful runs."""
    mean: float | None
    """None if a run failed, which excludes the value."""


@dataclass(frozen=True)
class RowSummary:
    """Summary of a row's reported runs."""

    before: float
    final: Estimate
    """At the end of each run."""
    equal: Mapping[str, Estimate]
    """Axis -> score at the point that every run of the row's kind reaches."""
    area: Estimate
    """Mean height of the curve over tokens, up to the same point."""
    reach: Mapping[str, ThresholdCrossing]
    """Axis -> crossing; empty if no row learned anything."""
    curves: Mapping[str, CurveBand]
    means: Mapping[str, float]
    """Means over runs: steps, updates, tokens, seconds, CPU seconds, …"""
    scores: Mapping[str, tuple[float, ...]]
    """Axis or `area` -> scores by seed, from which estimates and pairs are computed."""


def summarise_row(
    outcomes: Sequence[RunOutcome],
    common: Mapping[str, float],
    grids: Mapping[str, Sequence[float]],
    level: float | None,
) -> RowSummary:
    """Summarise a row.

    Args:
        outcomes: Its runs, by seed.
        common: Axis -> point at which rows of its kind are compared.
        grids: Axis -> points of the curves.
        level: Threshold score; None = no threshold.
    """
    scores = {axis: tuple(float(np.interp(common[axis], o.axis(axis), o.score)) for o in outcomes) for axis in AXES}
    scores["area"] = tuple(mean_height(o.tokens, o.score, common["tokens"]) for o in outcomes)
    reach = {}
    for axis in AXES if level is not None else ():
        each = [first_crossing(o.axis(axis), o.score, level) for o in outcomes if level is not None]
        reach[axis] = ThresholdCrossing(median_crossing(each), tuple(each))
    return RowSummary(
        before=means.fmean(o.before for o in outcomes),
        final=estimate_iqm([o.after for o in outcomes]),
        equal={axis: estimate_iqm(scores[axis]) for axis in AXES},
        area=estimate_iqm(scores["area"]),
        reach=reach,
        curves={axis: compute_band(outcomes, axis, grids[axis]) for axis in AXES},
        means=average_outcomes(outcomes),
        scores=scores,
    )


def compute_band(outcomes: Sequence[RunOutcome], axis: str, grid: Sequence[float]) -> CurveBand:
    """Interpolate every run's curve at the grid's points and compute the band over runs."""
    end = min(o.axis(axis)[-1] for o in outcomes)
    inside = [x for x in grid if x <= end]
    table = np.array([np.interp(inside, o.axis(axis), o.score) for o in outcomes])
    beyond: list[float | None] = [None] * (len(grid) - len(inside))
    columns = [[round(float(x), 4) for x in column] for column in bootstrap_band(table)]
    value, low, high = ((*column, *beyond) for column in columns)
    return CurveBand(value, low, high)


def average_outcomes(outcomes: Sequence[RunOutcome]) -> dict[str, float]:
    """Average over runs what all of them have."""
    rows = [
        {
            "steps": float(o.steps),
            **{axis: o.axis(axis)[-1] for axis in AXES},
            **{f"whole_{name}" if name == "seconds" else name: value for name, value in o.cost.items()},
            **o.diagnostics,
            **({} if o.gated_fraction is None else {"gated_fraction": o.gated_fraction}),
        }
        for o in outcomes
    ]
    shared = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: means.fmean(row[name] for row in rows) for name in shared}


def list_tuned_values(plan: ComparisonPlan, row: ComparisonRow, results: Results) -> tuple[TunedValue, ...]:
    """Return the results of each value of the row's grid."""
    tuned = []
    for value in row.grid if row.is_tuned else ():
        jobs = [Job(row.label, value, seed) for seed in plan.tuning_seeds]
        scores = tuple(results.outcomes[job].after for job in jobs if job in results.outcomes)
        tuned.append(TunedValue(value, scores, mean_final_score(plan, row.label, value, results.outcomes)))
    return tuple(tuned)


def describe_run(job: Job, outcome: RunOutcome, command: str) -> dict[str, Any]:
    """Return one reported run as in the JSON file."""
    points = {axis: [round(x, 2) for x in outcome.axis(axis)] for axis in AXES}
    return {
        "seed": job.seed,
        "command": command,
        "before": outcome.before,
        "after": outcome.after,
        "after_stderr": round(outcome.score_stderr, 5),
        "steps": outcome.steps,
        **{axis: values[-1] for axis, values in points.items()},
        "cost": dict(outcome.cost),
        "diagnostics": {name: round(value, 4) for name, value in outcome.diagnostics.items()},
        "gated_fraction": None if outcome.gated_fraction is None else round(outcome.gated_fraction, 6),
        "curve": {**points, "score": [round(x, 5) for x in outcome.score]},
    }
