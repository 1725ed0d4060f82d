"""docs/measured.svg: a small panel per algorithm, its learning curve with its band beside grpo's; on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

ACROSS, WIDTH, HEIGHT, LEFT, TOP = 6, 178, 132, 40, 34
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - 22, HEIGHT - 50
BESIDE = "grpo"
STYLE = """
  .page { fill: #ffffff } .grid { stroke: #d8dee4 } .band { fill: #0969da; opacity: .18 } .curve { fill: none; stroke: #0969da;
  stroke-width: 1.8 } .beside { fill: none; stroke: #8c959f; stroke-width: 1.2; stroke-dasharray: 3 3 }
  text { font-family: ui-sans-serif, system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; font-size: 12px }
  .small { font-size: 10px; fill: #57606a }"""
DARK = """
  .page { fill: #0d1117 } .grid { stroke: #30363d } .band { fill: #58a6ff } .curve { stroke: #58a6ff } .beside { stroke: #8b949e }
  text { fill: #e6edf3 } .small { fill: #9198a1 }"""


def curves(found: dict[str, Any] | None) -> str:
    """The SVG of a report; one that says so where there is none."""
    rows = [row for row in found["rows"] if row["summary"]] if found else []
    if found is None or not rows:
        return _svg(400, 60, ['<text x="20" y="35">Not measured yet.</text>'])
    xs = found["axes"]["tokens"]
    beside = next((row["summary"]["curves"]["tokens"]["value"] for row in rows if row["label"] == BESIDE), None)
    down = -(-len(rows) // ACROSS)
    shapes = [
        f'<text class="small" x="{LEFT}" y="16">held-out score over sampled tokens, 0 to {xs[-1]:,.0f}; dashed: {BESIDE}</text>'
    ]
    for number, row in enumerate(rows):
        x, y = LEFT + number % ACROSS * WIDTH, TOP + number // ACROSS * HEIGHT
        shapes += _panel(x, y, row, xs, None if row["label"] == BESIDE else beside, first=number % ACROSS == 0)
    return _svg(LEFT + ACROSS * WIDTH, TOP + down * HEIGHT, shapes)


def _panel(
    x: float, y: float, row: dict[str, Any], xs: Sequence[float], beside: list[float] | None, *, first: bool
) -> list[str]:
    curve = row["summary"]["curves"]["tokens"]
    bottom, end = y + 16 + PLOT_HEIGHT, xs[-1] or 1.0

    def points(values: Sequence[float | None], order: int = 1) -> list[str]:
        pairs = [(a, v) for a, v in zip(xs, values, strict=True) if v is not None][::order]
        return [f"{x + PLOT_WIDTH * a / end:.1f} {bottom - PLOT_HEIGHT * v:.1f}" for a, v in pairs]

    shapes = [f'<text x="{x}" y="{y + 10}">{escape(row["label"])}</text>']
    for level in (0.0, 0.5, 1.0):
        height = bottom - PLOT_HEIGHT * level
        shapes.append(f'<path class="grid" d="M{x} {height:.1f}h{PLOT_WIDTH}"/>')
        if first:
            shapes.append(f'<text class="small" x="{x - 6}" y="{height + 3:.1f}" text-anchor="end">{level:g}</text>')
    if beside is not None:
        shapes.append(f'<path class="beside" d="M{"L".join(points(beside))}"/>')
    shapes.append(f'<path class="band" d="M{"L".join([*points(curve["high"]), *points(curve["low"], -1)])}Z"/>')
    return [*shapes, f'<path class="curve" d="M{"L".join(points(curve["value"]))}"/>']


def _svg(width: float, height: float, shapes: Sequence[str]) -> str:
    style = f"<style>{STYLE}\n  @media (prefers-color-scheme: dark) {{{DARK}\n  }}\n</style>"
    page = f'<rect class="page" width="{width:g}" height="{height:g}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    title = "<title>Learning curves of every algorithm</title>"
    return "\n".join([head, title, style, page, *shapes, "</svg>"]) + "\n"
