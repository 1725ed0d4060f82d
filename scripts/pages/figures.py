"""Line charts side by side as one SVG, on light and on dark pages: of the lab's findings, and of what a gate lets through."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import pairwise
from typing import Any

from pages import tables as probe
from policygrad.algorithms import ALGORITHMS
from policygrad.core.algorithm import Algorithm
from policygrad.core.gates import (
    Clip,
    ClipCov,
    ClippedImportance,
    DivergenceClip,
    GeometricMean,
    PolicyShaping,
    SecondMomentFilter,
)
from policygrad.core.vine import SelfNormalised

ACROSS, WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 3, 330, 240, 50, 24, 30, 44
"""At most so many panels beside each other, and what each takes: its size, and the margins around its axes."""
ROW, LETTER = 24, 7.2
"""The legend: the height of a row, and about how wide a letter is."""
LIGHT = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#57606a")
DARK = ("#58a6ff", "#f0883e", "#56d364", "#bc8cff", "#ff7bb5", "#8b949e")
DASHES = ("", "6 4", "2 3", "9 3 2 3", "12 4", "1 3")
"""So that a curve is told from another in print, and shows through one that lies on it."""
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


def chart(title: str, drawn: Mapping[str, Any], width: int = WIDTH) -> str:
    """The SVG of what `policygrad.lab.plots.FindingPlot.drawn` gives: an x axis, panels, lines of named series.

    A value of None is no point; `x` may say its own `low` and `high`. width: of one panel.
    """
    panels = drawn["panels"]
    across = min(ACROSS, len(panels))
    head, legend = _legend(drawn["series"], across * width)
    places = [(n % across * width, head + n // across * HEIGHT, width) for n in range(len(panels))]
    shapes = [shape for at, panel in zip(places, panels, strict=True) for shape in _panel(*at, drawn["x"], panel)]
    wide, high = across * width, head + -(-len(panels) // across) * HEIGHT
    colours = " ".join(f".c{i} {{ stroke: {colour} }}" for i, colour in enumerate(LIGHT))
    night = " ".join(f".c{i} {{ stroke: {colour} }}" for i, colour in enumerate(DARK))
    dark = f"@media (prefers-color-scheme: dark) {{{NIGHT}\n  {night}\n  }}"
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high:g}" width="{wide}" role="img">'
    style = f"<style>{STYLE}\n  {colours}\n  {dark}\n</style>"
    page = f'<rect class="page" width="{wide}" height="{high:g}" rx="8"/>'
    return "\n".join([begin, f"<title>{escape(title)}</title>", style, page, *legend, *shapes, "</svg>"]) + "\n"


def _legend(series: Sequence[str], width: float) -> tuple[float, list[str]]:
    """(its height, its shapes)."""
    x, y, shapes = 16.0, 12.0, []
    for i, name in enumerate(series):
        wide = 44 + LETTER * len(name)
        if i and x + wide > width:
            x, y = 16.0, y + ROW
        shapes.append(f'<path class="curve c{i}" {_dash(i)}d="M{x:g} {y + 5:g}h26"/>')
        shapes.append(f'<text x="{x + 32:g}" y="{y + 9:g}">{escape(name)}</text>')
        x += wide
    return y + ROW, shapes


def _dash(number: int) -> str:
    return f'stroke-dasharray="{DASHES[number]}" ' if DASHES[number] else ""


def _panel(left: float, top: float, width: float, x: Mapping[str, Any], panel: Mapping[str, Any]) -> Iterator[str]:
    """Grid, ticks, the axes' names, and the lines; what lies beyond the axes is cut off."""
    values = [v for line in panel["lines"] for v in line["values"] if v is not None]
    start, end = left + LEFT, left + width - RIGHT
    roof, floor = top + TOP, top + HEIGHT - BOTTOM
    xs = Scale(_given(x, "low", min(x["values"])), _given(x, "high", max(x["values"])), start, end, x["log"])
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
    for line in panel["lines"]:
        places = [
            f"{xs(a) - start:.1f} {ys(v) - roof + 2:.1f}"
            for a, v in zip(x["values"], line["values"], strict=True)
            if v is not None and not (panel["log"] and v <= 0)
        ]
        number = line["series"]
        yield f'<path class="curve c{number}" {_dash(number)}d="M{"L".join(places)}"/>'
    yield "</svg>"


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
    return f"{value:.4g}".replace("-", "−")


POINTS, GATE_WIDTH = 240, 560
JUMP = 20
"""A curve is broken where w moves by more than a twentieth of the axis from one point to the next."""
SIGNS = {"Ψ > 0": 1.0, "Ψ < 0": -1.0}
OF = {
    GeometricMean: "of an answer of one token, whose mean is its own",
    DivergenceClip: "of a token that π_old gave e⁻³ ≈ 0.05; the bounds of a likelier one are nearer to 1",
    SecondMomentFilter: "of a token that is not among those left out, which weigh 0",
    ClipCov: "of a token that is not among those drawn, which weigh 0",
    PolicyShaping: "of what the policy sampled; a demonstration's weight is in the formula",
    SelfNormalised: "of one of four equally likely tokens of a state, the others at r = 1",
}
"""What the picture is of, where a token's weight depends on more than its ratio and Ψ's sign."""


@cache
def owner(name: str) -> str:
    """The first algorithm that has the same gate on the same kind of ratio: one picture serves them all."""
    return next(n for n, a in ALGORITHMS.items() if _shape(a) == _shape(ALGORITHMS[name]))


def owners() -> list[str]:
    """One algorithm per picture."""
    return list(dict.fromkeys(map(owner, ALGORITHMS)))


def _shape(a: Algorithm) -> tuple[str, str]:
    return repr(a.gate), repr(a.ratio)


def reach(a: Algorithm) -> tuple[float, float]:
    """The ratios that are shown: five times as far as a clip, beyond what others bound."""
    if isinstance(a.gate, Clip):
        far = 5 * max(a.gate.low, a.gate.high)
        return max(0.0, 1 - far), 1 + far
    return (0.0, 6.0) if isinstance(a.gate, ClippedImportance | DivergenceClip) else (0.0, 3.0)


def gate_figure(name: str) -> str:
    """The SVG."""
    a = ALGORITHMS[name]
    low, high = reach(a)
    ratios = tuple(low + (high - low) * (i + 0.5) / POINTS for i in range(POINTS))  # no bound is one of them
    weights = [probe.gate_weights(a, psi, ratios) for psi in SIGNS.values()]
    top = 1.08 * max(1.0, *(max(w) for w in weights))
    lines = [
        {"series": number, "values": part}
        for number, values in enumerate(weights)
        for part in _unbroken(values, top / JUMP)
    ]
    x = {"label": axis(a), "values": ratios, "log": False, "low": low, "high": high}
    panel = {"label": "w", "log": False, "low": 0.0, "high": top, "lines": lines}
    return chart(f"The gate of {name}", {"x": x, "series": list(SIGNS), "panels": [panel]}, width=GATE_WIDTH)


def axis(a: Algorithm) -> str:
    """What the ratio is of."""
    unit = probe.ratio_unit(a)
    kind = "a token" if unit == "token" else "the whole answer" if "completion" in unit else ""
    return f"r, the ratio of {kind}" if kind else "r, which is 1 here: there is no ratio"


def _unbroken(values: Sequence[float], jump: float) -> list[list[float | None]]:
    """The curve's pieces, each as long as the whole, None where it is another's."""
    ends = [i for i in range(1, len(values)) if abs(values[i] - values[i - 1]) > jump]
    bounds = [0, *ends, len(values)]
    return [[v if start <= i < end else None for i, v in enumerate(values)] for start, end in pairwise(bounds)]


def gate_section(name: str) -> str:
    """The picture in the algorithm's page, and what it is of."""
    a = ALGORITHMS[name]
    note = OF.get(type(a.gate), "")
    picture = f"![w over r, for Ψ > 0 and for Ψ < 0](gates/{owner(name)}.svg)"
    return f"{picture}\n\nThe gate w over {axis(a)}" + (f"; here {note}." if note else ".")
