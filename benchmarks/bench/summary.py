"""From steps to medians and spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any


@dataclass(frozen=True)
class Estimate:
    """Of repeats in processes of their own."""

    median: float
    low: float
    """The least."""
    high: float
    """The largest."""
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        """Raises ValueError without any value."""
        values = list(values)
        if not values:
            raise ValueError("an estimate needs at least one value")
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        said = short(self.median)
        return said if self.count == 1 else f"{said} ({short(self.low)}–{short(self.high)})"


def short(value: float) -> str:
    """Three digits: 0.0123, 1.23, 12.3, 123, 1,234."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits)}f}"


def per_step(record: Mapping[str, Any], unit: str) -> float:
    """Median seconds of a process's steps, `unit` = cpu or wall; the first is left out, it also warms up."""
    return statistics.median(float(step[unit]) for step in record["steps"][1:])


@dataclass(frozen=True)
class Row:
    """One side of one work."""

    side: str
    threads: int
    cpu: Estimate
    """Seconds per step."""
    wall: Estimate
    """Seconds per step."""
    memory: Estimate
    """MiB."""


def rows(measurements: Mapping[str, Mapping[str, Any]], work: str) -> list[Row]:
    """Of a work's measurements `work/side/threads/repeat`, by side and threads."""
    found: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for key, record in measurements.items():
        name, side, threads, _ = key.split("/")
        if name == work:
            found.setdefault((int(threads), side), []).append(record)
    return [
        Row(
            side,
            threads,
            Estimate.of(per_step(r, "cpu") for r in records),
            Estimate.of(per_step(r, "wall") for r in records),
            Estimate.of(r["peak_mib"] for r in records),
        )
        for (threads, side), records in sorted(found.items(), key=lambda item: item[0])
    ]


def reached(record: Mapping[str, Any], accuracy: float, unit: str) -> float | None:
    """Seconds of training, `unit` = cpu or wall, until a process's curve has first come to an accuracy, with straight lines between
    the steps that were measured; None where it never does."""
    spent = [0.0, *accumulate(float(step[unit]) for step in record["steps"])]
    curve = [(spent[step], float(found)) for step, found in record["curve"]]
    for (before, low), (after, high) in pairwise(curve):
        if low < accuracy <= high:
            return before + (after - before) * (accuracy - low) / (high - low)
    return None


def linearity(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, list[float]]:
    """(slope of the line through 0 that lies best among the points on a logarithmic scale, how far each point is from it, as a
    share of it)."""
    slope = math.exp(statistics.fmean(math.log(s / n) for n, s in zip(sizes, seconds, strict=True)))
    return slope, [s / (slope * n) - 1 for n, s in zip(sizes, seconds, strict=True)]
