"""Summarise one row of a comparison: curves, scores at equal tokens, updates and seconds, and the tuning of its option."""

from __future__ import annotations

import statistics as means
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policygrad.compare.plan import Job
from policygrad.compare.runner import AXES, RunOutcome
from policygrad.compare.statistics import (
    Estimate,
    bootstrap_band,
    estimate_iqm,
    first_crossing,
    mean_height,
    median_crossing,
)


@dataclass(frozen=True)
class ThresholdCrossing:
    """When a row's runs first reach the threshold, along one axis."""

    median: float | None  # runs that never reach it count as the latest; None if these are half or more
    each: tuple[float | None, ...]  # by seed; None = not within the budget

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
    scores: tuple[float, ...]  # final scores of successful runs
    mean: float | None  # None if a run failed, which excludes the value


@dataclass(frozen=True)
class RowSummary:
    """Summary of a row's reported runs."""

    before: float
    final: Estimate  # at the end of each run
    equal: Mapping[str, Estimate]  # axis -> score at the point that every run of the row's kind reaches
    area: Estimate  # mean height of the curve over tokens, up to the same point
    reach: Mapping[str, ThresholdCrossing]  # axis -> crossing; empty if no row learned anything
    curves: Mapping[str, CurveBand]
    means: Mapping[str, float]  # means over runs: steps, updates, tokens, seconds, CPU seconds, learning rate, …
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
    reach, curves = {}, {}
    for axis in AXES:
        if level is not None:
            each = [first_crossing(o.axis(axis), o.score, level) for o in outcomes]
            reach[axis] = ThresholdCrossing(median_crossing(each), tuple(each))
        inside = [x for x in grids[axis] if x <= min(o.axis(axis)[-1] for o in outcomes)]
        beyond = [None] * (len(grids[axis]) - len(inside))
        band = bootstrap_band([np.interp(inside, o.axis(axis), o.score) for o in outcomes])
        curves[axis] = CurveBand(*((*(round(float(x), 4) for x in column), *beyond) for column in band))
    figures = [
        {
            "steps": float(o.steps),
            **{axis: o.axis(axis)[-1] for axis in AXES},
            **{f"whole_{name}" if name == "seconds" else name: value for name, value in o.cost.items()},
            **o.diagnostics,
            **({} if o.lr is None else {"lr": o.lr}),
            **({} if o.gated_fraction is None else {"gated_fraction": o.gated_fraction}),
        }
        for o in outcomes
    ]
    shared = [name for name in figures[0] if all(name in row for row in figures)]
    return RowSummary(
        before=means.fmean(o.before for o in outcomes),
        final=estimate_iqm([o.after for o in outcomes]),
        equal={axis: estimate_iqm(scores[axis]) for axis in AXES},
        area=estimate_iqm(scores["area"]),
        reach=reach,
        curves=curves,
        means={name: means.fmean(row[name] for row in figures) for name in shared},
        scores=scores,
    )


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
