"""Runs of one configuration as one series, and every metric over the steps, thinned so that a page can hold it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from policygrad.report.reading import Points, RunFiles
from policygrad.training.config.words import short

POINTS = 300
"""Of a curve; more are put together."""
OWN = ("seed", "output", "track", "overwrite")
"""Options in which two runs of one configuration may differ."""
NAMED = 3
"""Differences that a label names."""


@dataclass(frozen=True)
class Series:
    """Runs that differ in their seed alone."""

    label: str
    runs: tuple[RunFiles, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.runs[0].config


def grouped(runs: Sequence[RunFiles]) -> tuple[Series, ...]:
    """By configuration, in the order given, each with a label that tells it from the others."""
    found: dict[str, list[RunFiles]] = {}
    for run in runs:
        key = json.dumps([run.kind, {k: v for k, v in run.config.items() if k not in OWN}], sort_keys=True, default=str)
        found.setdefault(key, []).append(run)
    groups = list(found.values())
    names = [_name(group[0]) for group in groups]
    flat = [dict(_flat({k: v for k, v in group[0].config.items() if k not in OWN})) for group in groups]
    return tuple(
        Series(_label(name, flat[i], [f for f, n in zip(flat, names, strict=True) if n == name]), tuple(groups[i]))
        for i, name in enumerate(names)
    )


def _name(run: RunFiles) -> str:
    algorithm = run.config.get("algorithm", {})
    return str(algorithm.get("name", run.kind)) if isinstance(algorithm, Mapping) else run.kind


def _label(name: str, own: Mapping[str, str], alike: Sequence[Mapping[str, str]]) -> str:
    """The name, and where others have it too what differs between them."""
    keys = dict.fromkeys(key for flat in alike for key in flat)
    differ = [key for key in keys if len({flat.get(key) for flat in alike}) > 1]
    said = [f"{key.removeprefix('algorithm.')}={own.get(key, '–')}" for key in differ[:NAMED]]
    more = [f"and {len(differ) - NAMED} more"] if len(differ) > NAMED else []
    return " ".join([name, *said, *more])


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and values in words."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, short(value)


def drawn(series: Sequence[Series], name: str, most: int = POINTS) -> dict[str, Any]:
    """A metric for the script: {x: [step], lines: [{value, low, high} or None, by series], per: steps of a point}.

    A value is the mean over runs and over the steps that a point stands for; low and high are the ends of these, left out where
    there is nothing to put together.
    """
    points = [[run.metrics.get(name, ()) for run in group.runs] for group in series]
    every = [p for group in points for p in group]
    last = max((p[-1][0] for p in every if p), default=0)
    per = max(1, -(-last // most)) if max(map(len, every), default=0) > most else 1
    found = [_together(group, per, last) for group in points]
    xs = sorted({x for line in found for x in line})
    return {"x": xs, "lines": [_line(line, xs) for line in found], "per": per}


def _together(points: Sequence[Points], per: int, last: int) -> dict[int, list[float]]:
    """All values by the last step of the `per` that they are put together with."""
    found: dict[int, list[float]] = {}
    for run in points:
        for step, value in run:
            found.setdefault(min(last, -(-step // per) * per), []).append(value)
    return found


def _line(values: Mapping[int, Sequence[float]], xs: Sequence[int]) -> dict[str, Any] | None:
    if not values:
        return None
    line: dict[str, Any] = {"value": [_rounded(fmean(values[x])) if x in values else None for x in xs]}
    if any(len(v) > 1 for v in values.values()):
        line["low"] = [_rounded(min(values[x])) if x in values else None for x in xs]
        line["high"] = [_rounded(max(values[x])) if x in values else None for x in xs]
    return line


def _rounded(x: float) -> float:
    """To what a pixel can show."""
    return float(f"{x:.5g}")
