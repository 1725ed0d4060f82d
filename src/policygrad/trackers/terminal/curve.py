"""A small scatter plot with a smoothed line, in braille: each character is 2 dots wide and 4 high."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_DOT = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a braille character


@dataclass(frozen=True)
class Plot:
    """Dots, and a line that has the characters it passes through to itself: two colours do not fit into one."""

    columns: int
    rows: int
    _dots: dict[tuple[int, int], int] = field(default_factory=dict)
    _line: dict[tuple[int, int], int] = field(default_factory=dict)

    def dot(self, x: int, y: int, line: bool) -> None:
        """Set a dot; x from the left in [0, 2 columns), y from the bottom in [0, 4 rows)."""
        cell = (self.rows - 1 - y // 4, x // 2)
        layer = self._line if line else self._dots
        layer[cell] = layer.get(cell, 0) | _DOT[3 - y % 4][x % 2]

    def row(self, row: int) -> list[tuple[str, bool]]:
        """The characters of one row, from the top, each with whether the line is in it."""
        cells = [(row, column) for column in range(self.columns)]
        bits = [(self._line.get(cell) or self._dots.get(cell, 0), cell in self._line) for cell in cells]
        return [(chr(0x2800 + dots) if dots else " ", line) for dots, line in bits]


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


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)


def plot(points: Sequence[tuple[float, float]], end: int, columns: int, rows: int) -> tuple[Plot, float, float]:
    """Points over steps 1 to `end`, and their smoothed line; with the least and greatest value of the axis.

    Of a long run each point is the mean of neighbouring steps, so that drawing takes no longer than for a short one.
    """
    canvas = Plot(columns, rows)
    if (share := len(points) // 500 + 1) > 1:
        points = [_mean(points[i : i + share]) for i in range(0, len(points), share)]
    width, height = 2 * columns - 1, 4 * rows - 1
    values = [value for _, value in points]
    low, high = limits(values)

    def at(step: float, value: float) -> tuple[int, int]:
        return round((step - 1) / (end - 1) * width), round((value - low) / (high - low) * height)

    for step, value in points:
        canvas.dot(*at(step, value), line=False)
    columns_seen: dict[int, list[int]] = {}
    for (step, _), value in zip(points, smooth(values, max(1.0, len(points) / 16)), strict=True):
        x, y = at(step, value)
        columns_seen.setdefault(x, []).append(y)
    path = [(x, round(sum(ys) / len(ys))) for x, ys in sorted(columns_seen.items())]
    for (x0, y0), (x1, y1) in zip(path, path[1:] or path, strict=False):
        length = max(x1 - x0, abs(y1 - y0), 1)
        for i in range(length + 1):
            canvas.dot(round(x0 + (x1 - x0) * i / length), round(y0 + (y1 - y0) * i / length), line=True)
    return canvas, low, high
