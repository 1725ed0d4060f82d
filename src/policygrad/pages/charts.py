"""Line charts side by side as one SVG, written as text: of findings, of gates, and of what `--export` writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

ACROSS, WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 3, 330, 240, 50, 24, 30, 44
"""At most so many panels beside each other, and what each takes: its size, and the margins around its axes."""
ROW, LETTER = 24, 7.2
"""The legend: the height of a row, and about how wide a letter is."""
LIGHT = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#57606a")
DARK = ("#58a6ff", "#f0883e", "#56d364", "#bc8cff", "#ff7bb5", "#8b949e")
DASHES = ("", "6 4", "2 3", "9 3 2 3", "12 4", "1 3")
"""So that a curve is told from another in print, and shows through one that lies on it."""
FEW = 20
"""Points of a curve with a band up to which each is marked."""
STYLE = """
  .page { fill: #ffffff } .grid { stroke: #d8dee4 } .curve { fill: none; stroke-width: 2; stroke-linejoin: round }
  text { font-family: ui-sans-serif, system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; font-size: 13px }
  .small { font-size: 11px; fill: #57606a }"""
NIGHT = """
  .page { fill: #0d1117 } .grid { stroke: #30363d } text { fill: #e6edf3 } .small { fill: #9198a1 }"""


@dataclass(frozen=True)
class Scale:
    """From a number to its place."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log(x) for x in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Some five round numbers; on a logarithmic scale powers of ten, or 1, 2, 5 where few of them fit."""
        if self.log:
            span = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            powers = [10.0**n for n in span if self.low <= 10.0**n <= self.high]
            fine = [m * 10.0**n for n in span for m in (1, 2, 5) if self.low <= m * 10.0**n <= self.high]
            return powers if len(powers) > 2 else fine
        step = _round((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round(step: float) -> float:
    """The nearest of 1, 2, 5 times a power of ten from above."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if step <= m * power * (1 + 1e-9))


def chart(title: str, drawn: Mapping[str, Any], width: int = WIDTH, dark: bool = True) -> str:
    """Draw what `policygrad.lab.plots.ClaimPlot.to_data` gives: an x axis, panels, lines of named series.

    A value of None is no point; `x` may say its own `low` and `high`. A line may have a band, `band_low` and `band_high`, and
    `names` of its values, which are then points instead of a line.

    Args:
        width: Of one panel, in pixels.
        dark: Whether the picture is dark where the reader's scheme is.
    """
    panels = drawn["panels"]
    across = min(ACROSS, len(panels))
    head, legend = _legend(drawn["series"], across * width)
    places = [(n % across * width, head + n // across * HEIGHT, width) for n in range(len(panels))]
    shapes = [shape for at, panel in zip(places, panels, strict=True) for shape in _panel(*at, drawn["x"], panel)]
    wide, high = across * width, head + -(-len(panels) // across) * HEIGHT
    filled = any("band_low" in line or "names" in line for panel in panels for line in panel["lines"])
    colours, night = (_colour_rules(palette, filled) for palette in (LIGHT, DARK))
    at_night = f"@media (prefers-color-scheme: dark) {{{NIGHT}\n  {night}\n  }}\n" if dark else ""
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high:g}" width="{wide}" role="img">'
    style = f"<style>{STYLE}\n  {colours}\n  {at_night}</style>"
    page = f'<rect class="page" width="{wide}" height="{high:g}" rx="8"/>'
    return "\n".join([begin, f"<title>{escape(title)}</title>", style, page, *legend, *shapes, "</svg>"]) + "\n"


def _colour_rules(palette: Sequence[str], filled: bool) -> str:
    lines = [f".c{i} {{ stroke: {colour} }}" for i, colour in enumerate(palette)]
    areas = [f".f{i} {{ fill: {colour} }}" for i, colour in enumerate(palette)] if filled else []
    return " ".join(lines + areas)


def _legend(series: Sequence[str], width: float) -> tuple[float, list[str]]:
    """(its height, its shapes)."""
    x, y, shapes = 16.0, 12.0, []
    for i, name in enumerate(series):
        wide = 44 + LETTER * len(name)
        if i and x + wide > width:
            x, y = 16.0, y + ROW
        shapes.append(f'<path class="curve c{i % len(LIGHT)}" {_dash(i)}d="M{x:g} {y + 5:g}h26"/>')
        shapes.append(f'<text x="{x + 32:g}" y="{y + 9:g}">{escape(name)}</text>')
        x += wide
    return y + ROW, shapes


def _dash(number: int) -> str:
    dash = DASHES[(number + number // len(LIGHT)) % len(DASHES)]
    return f'stroke-dasharray="{dash}" ' if dash else ""


def _panel(left: float, top: float, width: float, x: Mapping[str, Any], panel: Mapping[str, Any]) -> Iterator[str]:
    """Grid, ticks, the axes' names, and the lines; what lies beyond the axes is cut off."""
    shown = [line.get(key, ()) for line in panel["lines"] for key in ("values", "band_low", "band_high")]
    values = [v for of_line in shown for v in of_line if v is not None]
    start, end = left + LEFT, left + width - RIGHT
    roof, floor = top + TOP, top + HEIGHT - BOTTOM
    first, last = _given(x, "low", min(x["values"])), _given(x, "high", max(x["values"]))
    xs = Scale(first, last if last > first else first + 1, start, end, x["log"])
    ys = Scale(*_range(values, panel), floor, roof, panel["log"])
    for tick in ys.ticks():
        yield f'<path class="grid" d="M{start:g} {ys(tick):.1f}H{end:g}"/>'
        yield f'<text class="small" x="{start - 6:g}" y="{ys(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
    for tick in xs.ticks():
        yield f'<path class="grid" d="M{xs(tick):.1f} {floor:g}v4"/>'
        yield f'<text class="small" x="{xs(tick):.1f}" y="{floor + 17:g}" text-anchor="middle">{_number(tick)}</text>'
    yield f'<text class="small" x="{start:g}" y="{top + 18:g}">{escape(panel["label"])}</text>'
    yield f'<text class="small" x="{(start + end) / 2:g}" y="{floor + 34:g}" text-anchor="middle">{escape(x["label"])}</text>'
    yield f'<svg x="{start:g}" y="{roof - 2:g}" width="{end - start:g}" height="{floor - roof + 4:g}" overflow="hidden">'
    taken = list[tuple[float, float, float]]()
    for line in panel["lines"]:
        yield from _draw_line(line, panel["log"], x["values"], lambda a, v: (xs(a) - start, ys(v) - roof + 2), taken)
    yield "</svg>"


def _draw_line(
    line: Mapping[str, Any],
    log: bool,
    xs: Sequence[float],
    place: Callable[[float, float], tuple[float, float]],
    taken: list[tuple[float, float, float]],
) -> Iterator[str]:
    """Yield a line's band, and the line, or its points where these have names.

    taken: (left, right, y) of the names in the panel; one that would cover another is left to the point's own title.
    """
    number = line["series"]
    colour = number % len(LIGHT)

    def corners(values: Sequence[float | None]) -> list[str]:
        there = [(a, v) for a, v in zip(xs, values, strict=True) if v is not None and not (log and v <= 0)]
        return ["{:.1f} {:.1f}".format(*place(a, v)) for a, v in there]

    if "band_low" in line:
        outline = "L".join([*corners(line["band_high"]), *reversed(corners(line["band_low"]))])
        yield f'<path class="f{colour}" fill-opacity="0.15" d="M{outline}Z"/>'
    places = corners(line["values"])
    if "names" in line:
        names = [name for name, value in zip(line["names"], line["values"], strict=True) if value is not None]
        for at, name in zip(places, names, strict=True):
            across, down = at.split()
            yield f'<circle class="f{colour}" cx="{across}" cy="{down}" r="4"><title>{escape(name)}</title></circle>'
            left, y = float(across) + 6, float(down) - 5
            right = left + LETTER * len(name)
            if not any(left < b and a < right and abs(y - other) < ROW / 2 for a, b, other in taken):
                taken.append((left, right, y))
                yield f'<text class="small" x="{left:.1f}" y="{y:.1f}">{escape(name)}</text>'
        return
    yield f'<path class="curve c{colour}" {_dash(number)}d="M{"L".join(places)}"/>'
    if "band_low" in line and len(places) <= FEW:
        for across, down in map(str.split, places):
            yield f'<circle class="f{colour}" cx="{across}" cy="{down}" r="2.8"/>'


def _range(values: Sequence[float], panel: Mapping[str, Any]) -> tuple[float, float]:
    """Of the y axis, with a little room where the panel does not say where it ends."""
    positive = [v for v in values if v > 0] if panel["log"] else values
    low, high = _given(panel, "low", min(positive)), _given(panel, "high", max(positive))
    if panel["log"]:
        return low / 1.2, high * 1.2
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low if panel["low"] is not None else low - room, high if panel["high"] is not None else high + room


def _given(output: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = output.get(name)
    return otherwise if value is None else value


def _number(value: float) -> str:
    """0.3 and not 0.30000000000000004; a minus is a minus."""
    return f"{value:,.0f}" if 1e4 <= value < 1e7 else f"{value:.4g}".replace("-", "−")
