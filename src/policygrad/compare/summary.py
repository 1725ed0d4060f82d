"""One row of a comparison: its curves, its figures at equal tokens, updates and seconds, and how it came by its learning rate."""

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
    interpolate,
    mean_height,
    median_crossing,
)

POINTS = 61
"""Of a curve, as it is reported."""


@dataclass(frozen=True)
class ThresholdCrossing:
    """When a row's runs first score at least the threshold, along one axis."""

    median: float | None
    """A run that never does counts as later than any other; None where that is half of them or more."""
    each: tuple[float | None, ...]
    """By seed; None = never within the budget."""

    @property
    def num_reached(self) -> int:
        return sum(x is not None for x in self.each)


@dataclass(frozen=True)
class CurveBand:
    """Interquartile mean and interval of the runs' curves, at the axis' points; None beyond where the shortest run ends."""

    value: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True)
class TunedValue:
    """A value of a row's grid, on the tuning seeds."""

    value: float
    scores: tuple[float, ...]
    """Final held-out means of those runs that succeeded."""
    mean: float | None
    """None where a run failed: the value is out."""


@dataclass(frozen=True)
class RowSummary:
    """What a row's reported runs say."""

    before: float
    final: Estimate
    """At the end of each run."""
    equal: Mapping[str, Estimate]
    """By axis: at the point that every run of the row's kind reaches."""
    area: Estimate
    """Mean height of the curve over tokens, up to the same point."""
    reach: Mapping[str, ThresholdCrossing]
    """By axis; empty where nothing was learned by any row."""
    curves: Mapping[str, CurveBand]
    means: Mapping[str, float]
    """Steps, updates, tokens, seconds, CPU seconds, … of a run."""
    scores: Mapping[str, tuple[float, ...]]
    """By axis, and `area`: by seed, what the estimates and the pairs are made of."""


def common_endpoints(outcomes: Sequence[RunOutcome]) -> dict[str, float]:
    """By axis: how far every one of the runs goes."""
    return {axis: min(outcome.axis(axis)[-1] for outcome in outcomes) for axis in AXES}


def summarise_row(
    outcomes: Sequence[RunOutcome],
    common: Mapping[str, float],
    grids: Mapping[str, Sequence[float]],
    level: float | None,
) -> RowSummary:
    """The figures of a row.

    found: its runs, by seed. common: by axis, where all rows of its kind are compared. grids: by axis, the curves' points.
    level: the threshold's score.
    """
    scores = {axis: tuple(float(interpolate(o.axis(axis), o.score, common[axis])) for o in outcomes) for axis in AXES}
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
    """Every run's curve at the grid's points, between its evaluations linearly; then the band over runs."""
    end = min(o.axis(axis)[-1] for o in outcomes)
    inside = [x for x in grid if x <= end]
    table = np.array([interpolate(o.axis(axis), o.score, inside) for o in outcomes])
    beyond: list[float | None] = [None] * (len(grid) - len(inside))
    columns = [[round(float(x), 4) for x in column] for column in bootstrap_band(table)]
    value, low, high = ((*column, *beyond) for column in columns)
    return CurveBand(value, low, high)


def average_outcomes(outcomes: Sequence[RunOutcome]) -> dict[str, float]:
    """Means over the runs, of what all of them have."""
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
    """The row's grid, value by value."""
    outcomes = results.outcomes
    return tuple(
        TunedValue(
            value,
            tuple(
                outcomes[job].after for seed in plan.tuning_seeds if (job := Job(row.label, value, seed)) in outcomes
            ),
            mean_final_score(plan, row.label, value, outcomes),
        )
        for value in (row.grid if row.is_tuned else ())
    )


def describe_run(job: Job, outcome: RunOutcome, command: str) -> dict[str, Any]:
    """One reported run, whole, as the JSON has it."""
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
