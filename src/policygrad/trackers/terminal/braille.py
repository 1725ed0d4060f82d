"""A small scatter plot with a smoothed line, in braille: each character is 2 dots wide and 4 high."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policygrad.trackers.curve import limits, smoothed, thinned

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


def plot(points: Sequence[tuple[float, float]], end: int, columns: int, rows: int) -> tuple[Plot, float, float]:
    """Points over steps 1 to `end`, and their smoothed line; with the least and greatest value of the axis."""
    canvas = Plot(columns, rows)
    points = thinned(points)
    width, height = 2 * columns - 1, 4 * rows - 1
    low, high = limits([value for _, value in points])

    def at(step: float, value: float) -> tuple[int, int]:
        return round((step - 1) / (end - 1) * width), round((value - low) / (high - low) * height)

    for step, value in points:
        canvas.dot(*at(step, value), line=False)
    columns_seen: dict[int, list[int]] = {}
    for step, value in smoothed(points):
        x, y = at(step, value)
        columns_seen.setdefault(x, []).append(y)
    path = [(x, round(sum(ys) / len(ys))) for x, ys in sorted(columns_seen.items())]
    for (x0, y0), (x1, y1) in zip(path, path[1:] or path, strict=False):
        length = max(x1 - x0, abs(y1 - y0), 1)
        for i in range(length + 1):
            canvas.dot(round(x0 + (x1 - x0) * i / length), round(y0 + (y1 - y0) * i / length), line=True)
    return canvas, low, high
