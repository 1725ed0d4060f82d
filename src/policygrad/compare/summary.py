"""One row of a comparison: its curves, its figures at equal tokens, updates and seconds, and how it came by its learning rate."""

from __future__ import annotations

import statistics as means
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policygrad.compare.plan import Job, Plan, Row
from policygrad.compare.runner import AXES, Outcome, Results, mean_final
from policygrad.compare.statistics import Estimate, at, band, estimate, first_crossing, mean_height, median_crossing

POINTS = 61
"""Of a curve, as it is reported."""


@dataclass(frozen=True)
class Reach:
    """When a row's runs first score at least the threshold, along one axis."""

    median: float | None
    """A run that never does counts as later than any other; None where that is half of them or more."""
    each: tuple[float | None, ...]
    """By seed; None = never within the budget."""

    @property
    def reached(self) -> int:
        return sum(x is not None for x in self.each)


@dataclass(frozen=True)
class Curve:
    """Interquartile mean and interval of the runs' curves, at the axis' points; None beyond where the shortest run ends."""

    value: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True)
class Tried:
    """A value of a row's grid, on the tuning seeds."""

    value: float
    scores: tuple[float, ...]
    """Final held-out means of those runs that succeeded."""
    mean: float | None
    """None where a run failed: the value is out."""


@dataclass(frozen=True)
class Summary:
    """What a row's reported runs say."""

    before: float
    final: Estimate
    """At the end of each run."""
    equal: Mapping[str, Estimate]
    """By axis: at the point that every run of the row's kind reaches."""
    area: Estimate
    """Mean height of the curve over tokens, up to the same point."""
    reach: Mapping[str, Reach]
    """By axis; empty where nothing was learned by any row."""
    curves: Mapping[str, Curve]
    means: Mapping[str, float]
    """Steps, updates, tokens, seconds, CPU seconds, … of a run."""
    scores: Mapping[str, tuple[float, ...]]
    """By axis, and `area`: by seed, what the estimates and the pairs are made of."""


def ends(found: Sequence[Outcome]) -> dict[str, float]:
    """By axis: how far every one of the runs goes."""
    return {axis: min(outcome.axis(axis)[-1] for outcome in found) for axis in AXES}


def summary(
    found: Sequence[Outcome], common: Mapping[str, float], grids: Mapping[str, Sequence[float]], level: float | None
) -> Summary:
    """The figures of a row.

    found: its runs, by seed. common: by axis, where all rows of its kind are compared. grids: by axis, the curves' points.
    level: the threshold's score.
    """
    scores = {axis: tuple(float(at(o.axis(axis), o.score, common[axis])) for o in found) for axis in AXES}
    scores["area"] = tuple(mean_height(o.tokens, o.score, common["tokens"]) for o in found)
    reach = {}
    for axis in AXES if level is not None else ():
        each = [first_crossing(o.axis(axis), o.score, level) for o in found if level is not None]
        reach[axis] = Reach(median_crossing(each), tuple(each))
    return Summary(
        before=means.fmean(o.before for o in found),
        final=estimate([o.after for o in found]),
        equal={axis: estimate(scores[axis]) for axis in AXES},
        area=estimate(scores["area"]),
        reach=reach,
        curves={axis: curve(found, axis, grids[axis]) for axis in AXES},
        means=averages(found),
        scores=scores,
    )


def curve(found: Sequence[Outcome], axis: str, grid: Sequence[float]) -> Curve:
    """Every run's curve at the grid's points, between its evaluations linearly; then the band over runs."""
    end = min(o.axis(axis)[-1] for o in found)
    inside = [x for x in grid if x <= end]
    table = np.array([at(o.axis(axis), o.score, inside) for o in found])
    beyond: list[float | None] = [None] * (len(grid) - len(inside))
    columns = [[round(float(x), 4) for x in column] for column in band(table)]
    value, low, high = ((*column, *beyond) for column in columns)
    return Curve(value, low, high)


def averages(found: Sequence[Outcome]) -> dict[str, float]:
    """Means over the runs, of what all of them have."""
    rows = [
        {
            "steps": float(o.steps),
            **{axis: o.axis(axis)[-1] for axis in AXES},
            **{f"whole_{name}" if name == "seconds" else name: value for name, value in o.cost.items()},
            **o.signs,
            **({} if o.gated is None else {"gated": o.gated}),
        }
        for o in found
    ]
    shared = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: means.fmean(row[name] for row in rows) for name in shared}


def tried(plan: Plan, row: Row, results: Results) -> tuple[Tried, ...]:
    """The row's grid, value by value."""
    found = results.outcomes
    return tuple(
        Tried(
            value,
            tuple(found[job].after for seed in plan.tuning_seeds if (job := Job(row.label, value, seed)) in found),
            mean_final(plan, row.label, value, found),
        )
        for value in (row.grid if row.tuned else ())
    )


def run(job: Job, outcome: Outcome, command: str) -> dict[str, Any]:
    """One reported run, whole, as the JSON has it."""
    points = {axis: [round(x, 2) for x in outcome.axis(axis)] for axis in AXES}
    return {
        "seed": job.seed,
        "command": command,
        "before": outcome.before,
        "after": outcome.after,
        "after_stderr": round(outcome.error, 5),
        "steps": outcome.steps,
        **{axis: values[-1] for axis, values in points.items()},
        "cost": dict(outcome.cost),
        "signs": {name: round(value, 4) for name, value in outcome.signs.items()},
        "gated": None if outcome.gated is None else round(outcome.gated, 6),
        "curve": {**points, "score": [round(x, 5) for x in outcome.score]},
    }
