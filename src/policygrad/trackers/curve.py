"""What a curve needs before it is drawn: fewer points, a smoothed line, and round axes."""

from __future__ import annotations

import math
from collections.abc import Sequence


def smooth(values: Sequence[float], span: float) -> list[float]:
    """Weighted means with weights that fall off by e over `span` values to either side, so without delay."""
    decay = math.exp(-1 / span)

    def sums(series: Sequence[float]) -> list[tuple[float, float]]:
        total = weight = 0.0
        out = []
        for value in series:
            total, weight = decay * total + value, decay * weight + 1
            out.append((total, weight))
        return out

    pairs = zip(values, sums(values), reversed(sums(values[::-1])), strict=True)
    return [(a[0] + b[0] - value) / (a[1] + b[1] - 1) for value, a, b in pairs]


def horizon(step: int, total: int) -> int:
    """Where the step axis ends: the run's length halved until the curve fills at least half of it, but not below 10."""
    end = total
    while end >= 2 * step and end // 2 >= 10:
        end = math.ceil(end / 2)
    return max(end, step, 2)


def limits(values: Sequence[float]) -> tuple[float, float]:
    """The value axis: from the least to the greatest, outward to a round number; one unit long when they are the same."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(1.0, abs(high)):
        unit = max(1.0, 1e-3 * abs(high))
        return (low, low + unit) if low <= 0 else (high - unit, high)
    unit = 10.0 ** math.floor(math.log10((high - low) / 2))
    return math.floor(low / unit + 1e-9) * unit, math.ceil(high / unit - 1e-9) * unit


def thinned(points: Sequence[tuple[float, float]], most: int = 500) -> Sequence[tuple[float, float]]:
    """Of a long run the means of neighbouring steps, so that drawing takes no longer than for a short one."""
    share = len(points) // most + 1
    return points if share == 1 else [_mean(points[i : i + share]) for i in range(0, len(points), share)]


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The line through points: their values over a sixteenth of them to either side."""
    values = smooth([value for _, value in points], max(1.0, len(points) / 16))
    return [(step, value) for (step, _), value in zip(points, values, strict=True)]


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)
