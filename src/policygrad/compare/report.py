"""The comparison as data: rows, pairs, and the sentences that say what it can and cannot tell. All pages are made from it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

from policygrad.compare import statements, summary
from policygrad.compare.outcomes import AXES, Outcome
from policygrad.compare.plan import Job, Plan, Row
from policygrad.compare.statistics import (
    LEVEL,
    Estimate,
    interquartile_mean,
    probability_of_improvement,
    separation_by_chance,
)
from policygrad.compare.summary import POINTS, Summary, Tried
from policygrad.compare.work import Results
from policygrad.errors import ConfigError

THRESHOLD = 0.8
"""The share of the way from the score before training to the best row's final one."""
FORMAT = 1


@dataclass(frozen=True)
class RowReport:
    """A row, what it was, and what came of it."""

    label: str
    algorithm: str
    words: str
    """Of `policygrad train`, the tuned option included."""
    change: str
    reason: str
    settings: Mapping[str, Any]
    knob: str
    value: float | None
    edge: str
    """`smallest` or `largest` where the chosen value ends the grid; else empty."""
    tuning: tuple[Tried, ...]
    kind: int
    """Rows of one kind are measured on the same problems in the same way: only they are compared by score."""
    runs: tuple[Mapping[str, Any], ...]
    failed: tuple[Mapping[str, Any], ...]
    """Runs without a result, tuning runs included: seed, value, error."""
    summary: Summary | None
    """None where no reported run succeeded."""


@dataclass(frozen=True)
class Pair:
    """P(the first is above the second), by axis at equal tokens, updates, seconds, and of the area under the curves."""

    first: str
    second: str
    probability: Mapping[str, Estimate]
    apart: Mapping[str, bool]
    """Whether the interval leaves ½ out, with so many runs that chance alone seldom separates them."""


@dataclass(frozen=True)
class Kind:
    """Rows whose scores mean the same."""

    measure: Mapping[str, Any]
    labels: tuple[str, ...]
    equal: Mapping[str, float]
    """By axis: how far every run of these rows goes."""
    threshold: float | None
    """A score; None where no row learned anything."""


@dataclass(frozen=True)
class Report:
    """A comparison, finished or stopped."""

    command: str
    version: str
    tokens: int
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    ladder: Mapping[str, Any]
    share: float
    """Of the way, at which the threshold is."""
    stopped: bool
    kinds: tuple[Kind, ...]
    axes: Mapping[str, tuple[float, ...]]
    """By axis: the points of all curves."""
    rows: tuple[RowReport, ...]
    pairs: tuple[Pair, ...]
    says: tuple[str, ...] = ()
    """What can be read off it."""
    differs: tuple[str, ...] = ()
    """What differs between the rows besides the algorithm."""
    limits: tuple[str, ...] = ()
    """What cannot be concluded."""
    format: int = field(default=FORMAT)

    def row(self, label: str) -> RowReport:
        return next(row for row in self.rows if row.label == label)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))  # type: ignore[no-any-return]


def report(plan: Plan, results: Results, share: float = THRESHOLD) -> Report:
    """What the results say. share: in (0, 1], see `THRESHOLD`."""
    if not 0 < share <= 1:
        raise ConfigError(f"the threshold is a share of the way in (0, 1], not {share:g}")
    found = {row.label: _reported(plan, row, results) for row in plan.rows}
    measures = list(dict.fromkeys(json.dumps(row.measure, sort_keys=True) for row in plan.rows))
    kind_of = {row.label: measures.index(json.dumps(row.measure, sort_keys=True)) for row in plan.rows}
    kinds = tuple(_kind(i, plan, kind_of, found, share) for i in range(len(measures)))
    axes = {axis: _grid([o for runs in found.values() for o in runs.values()], axis) for axis in AXES}
    rows = tuple(
        _row(plan, row, results, kinds[kind_of[row.label]], kind_of[row.label], found, axes) for row in plan.rows
    )
    whole = Report(
        command=plan.command,
        version=plan.version,
        tokens=plan.tokens,
        seeds=plan.seeds,
        tuning_seeds=plan.tuning_seeds if any(row.tuned for row in plan.rows) else (),
        ladder=plan.ladder,
        share=share,
        stopped=results.stopped,
        kinds=kinds,
        axes=axes,
        rows=rows,
        pairs=_pairs(rows),
    )
    return statements.said(whole)


def _reported(plan: Plan, row: Row, results: Results) -> dict[Job, Outcome]:
    """The row's reported runs that are finished, by seed."""
    if row.label not in results.chosen:
        return {}
    jobs = [Job(row.label, results.chosen[row.label], seed) for seed in plan.seeds]
    return {job: results.outcomes[job] for job in jobs if job in results.outcomes}


def _kind(
    number: int, plan: Plan, kind_of: Mapping[str, int], found: Mapping[str, Mapping[Job, Outcome]], share: float
) -> Kind:
    rows = [row for row in plan.rows if kind_of[row.label] == number]
    runs = {row.label: list(found[row.label].values()) for row in rows if found[row.label]}
    everything = [o for outcomes in runs.values() for o in outcomes]
    level = None
    if everything:
        before = sum(o.before for o in everything) / len(everything)
        best = max(float(interquartile_mean([o.after for o in outcomes])) for outcomes in runs.values())
        level = before + share * (best - before) if best > before else None
    equal = summary.ends(everything) if everything else {}
    return Kind(rows[0].measure, tuple(row.label for row in rows), equal, level)


def _grid(found: Sequence[Outcome], axis: str) -> tuple[float, ...]:
    """Points from 0 to the end of the longest run."""
    end = max((o.axis(axis)[-1] for o in found), default=0.0)
    return tuple(round(end * i / (POINTS - 1), 3) for i in range(POINTS)) if end else (0.0,)


def _row(
    plan: Plan,
    row: Row,
    results: Results,
    kind: Kind,
    number: int,
    found: Mapping[str, Mapping[Job, Outcome]],
    axes: Mapping[str, Sequence[float]],
) -> RowReport:
    value, runs = results.chosen.get(row.label), found[row.label]
    job = Job(row.label, value, plan.seeds[0])
    edges = {min(row.grid): "smallest", max(row.grid): "largest"} if row.tuned else {}
    failed = [
        {"seed": job.seed, "value": job.value, "error": error}
        for job, error in results.failures.items()
        if job.row == row.label
    ]
    return RowReport(
        label=row.label,
        algorithm=row.algorithm,
        words=shlex.join(plan.train_words(job)[1:-4]),
        change=row.change,
        reason=row.reason,
        settings=row.settings,
        knob=row.knob,
        value=value,
        edge=edges.get(value, "") if value is not None else "",
        tuning=summary.tried(plan, row, results),
        kind=number,
        runs=tuple(summary.run(job, o, shlex.join(["policygrad", *plan.train_words(job)])) for job, o in runs.items()),
        failed=tuple(failed),
        summary=summary.summary(list(runs.values()), kind.equal, axes, kind.threshold) if runs else None,
    )


def _pairs(rows: Sequence[RowReport]) -> tuple[Pair, ...]:
    """All pairs of one kind."""
    return tuple(
        _pair(a.label, b.label, a.summary.scores, b.summary.scores)
        for a, b in combinations(rows, 2)
        if a.kind == b.kind and a.summary is not None and b.summary is not None
    )


def _pair(first: str, second: str, x: Mapping[str, Sequence[float]], y: Mapping[str, Sequence[float]]) -> Pair:
    found = {name: probability_of_improvement(x[name], y[name]) for name in x}
    enough = separation_by_chance(len(x["tokens"]), len(y["tokens"])) <= 1 - LEVEL
    return Pair(first, second, found, {name: enough and not p.low <= 0.5 <= p.high for name, p in found.items()})
