"""The display in a notebook: that of the terminal with more curves, as HTML redrawn in place below the cell."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any

from policygrad.trackers.base import RunInfo, Sample
from policygrad.trackers.console import format_duration, format_number, strip_control_chars
from policygrad.trackers.live_view import (
    LiveTracker,
    LiveView,
    choose_axis_limits,
    choose_x_end,
    downsample,
    smooth_points,
)

WIDTH, HEIGHT, GUTTER, MARGIN = 640, 170, 60, 12  # of the first curve, in pixels; the others are half as wide
GREEN, BLUE = "#2a9d4a", "#3b7dd8"
MAX_CHARS = 4000  # of a prompt or a completion; the middle of a longer one is left out


class NotebookTracker(LiveTracker):
    """Redraws at most twice a second, and at the end. Needs IPython, which every notebook has."""

    INTERVAL = 0.5  # seconds

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._ipython: Any = import_module("IPython.display")
        self._reset()

    def _reset(self) -> None:
        self._handle: Any = None  # of the output to redraw
        self._info: RunInfo | None = None
        self._notes: list[str] = []
        self._summary: Mapping[str, str] | None = None
        self._drawn, self._current = -math.inf, True

    def start(self, info: RunInfo) -> None:
        super().start(info)
        self._info, self._summary = info, None
        self._draw(now=True)

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        before = self._view.phase
        super().phase(text, done, total)
        self._draw(now=self._view.phase != before)

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        super().log(step, metrics, completions)
        self._draw(now=self._progress.is_finished)

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._draw(now=True)

    def finish(self, summary: Mapping[str, str]) -> None:
        self._summary = dict(summary)
        self._draw(now=True)

    def close(self) -> None:
        """Keep the last display; a later run draws below it."""
        if not self._current:
            self._draw(now=True)
        self._reset()

    def _draw(self, *, now: bool) -> None:
        self._current = now or self._clock() - self._drawn >= self.INTERVAL
        if not self._current:
            return
        self._drawn = self._clock()
        html = self._ipython.HTML(render_output(self._info, self.view, self._notes, self._summary))
        if self._handle is None:
            self._handle = self._ipython.display(html, display_id=True)
        else:
            self._handle.update(html)


def render_output(info: RunInfo | None, view: LiveView, notes: Sequence[str], summary: Mapping[str, str] | None) -> str:
    """Return the output as HTML. Text of models, data and users is escaped, so that no completion becomes markup."""
    parts = []
    if info is not None:
        word = "" if summary is None else "done · " if view.fraction >= 1 else "stopped · "
        left = "" if view.eta is None or summary is not None else f" · {format_duration(view.eta)} left"
        place = f"{word}{view.unit} {view.progress} · {format_duration(view.elapsed)}{left}"
        parts += [f"<b>{_text(info.title)}</b>", _table(info.facts), _bar(place, view.fraction)]
    if view.phase:
        parts.append(_bar(view.phase, view.phase_done / view.phase_total if view.phase_total else None))
    if view.metrics:
        labels, values = (_row(cells) for cells in zip(*view.metrics, strict=True))
        parts.append(f'<table><tr style="opacity:.6">{labels}</tr><tr style="font-weight:bold">{values}</tr></table>')
    parts += [render_curve(view, name, WIDTH if i == 0 else WIDTH // 2) for i, name in enumerate(view.curves)]
    if view.sample is not None:
        parts.append(_sample(view.sample, f"a sample of {view.unit} {view.sample_step}"))
    parts += [f'<div style="color:#b58900">! {_text(note)}</div>' for note in notes]
    return f'<div style="max-width:{WIDTH}px">{"".join([*parts, _table(summary or {})])}</div>'


def render_curve(view: LiveView, name: str, width: int) -> str:
    """Draw one curve as an SVG `width` pixels wide: a dot per step, and the smoothed line."""
    end, points = choose_x_end(view.step, view.total), downsample(view.curves[name])
    low, high = choose_axis_limits([value for _, value in points])
    left, right, top, bottom = GUTTER, width - MARGIN, MARGIN, HEIGHT - 2 * MARGIN

    def at(step: float, value: float) -> str:
        x = left + (step - 1) / (end - 1) * (right - left)
        return f"{x:.1f},{bottom - (value - low) / (high - low) * (bottom - top):.1f}"

    def label(x: int, y: int, anchor: str, text: str) -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{_text(text)}</text>'

    dots = "".join(f"M{at(*point)}h0" for point in points)
    line = " ".join(at(*point) for point in smooth_points(points))
    heights = ((top, format_number(high)), ((top + bottom) // 2, name), (bottom, format_number(low)))
    labels = [label(left - 6, y + 4, "end", text) for y, text in heights]
    labels += [label(left, HEIGHT - 4, "start", f"{view.unit} 1"), label(right, HEIGHT - 4, "end", str(end))]
    title = f"{_text(name)} by {_text(view.unit)}"
    return (
        f'<svg viewBox="0 0 {width} {HEIGHT}" width="{width / WIDTH:.0%}" role="img" aria-label="{title}" fill="none">'
        f'<path d="M{left},{top}V{bottom}H{right}" stroke="currentColor" opacity=".4"/>'
        f'<path d="{dots}" stroke="currentColor" opacity=".35" stroke-width="3" stroke-linecap="round"/>'
        f'<polyline points="{line}" stroke="{GREEN if name == "reward" else BLUE}" stroke-width="2"/>'
        f'<g fill="currentColor" font-size="11" opacity=".7">{"".join(labels)}</g></svg>'
    )


def _bar(text: str, share: float | None) -> str:
    bar = "" if share is None else f' <progress value="{share:.4f}" max="1"></progress>'
    return f"<div>{_text(text)}{bar}</div>"


def _sample(sample: Sample, title: str) -> str:
    """Show prompt and completion in scrolling boxes."""
    title += "" if sample.reward is None else f", reward {format_number(sample.reward)}"
    style = "white-space:pre-wrap;overflow:auto;max-height:16em;margin:0"
    prompt = f'<pre style="{style};opacity:.6">{_text(sample.prompt)}</pre>'
    completion = f'<pre style="{style}">{_text(sample.completion)}</pre>'
    return f'<details open="open"><summary>{_text(title)}</summary>{prompt}{completion}</details>'


def _table(values: Mapping[str, str]) -> str:
    rows = "".join(f"<tr>{_row(pair)}</tr>" for pair in values.items())
    return f"<table>{rows}</table>" if rows else ""


def _row(cells: Sequence[str]) -> str:
    return "".join(f'<td style="text-align:left">{_text(cell)}</td>' for cell in cells)


def _text(text: str) -> str:
    if len(text) > MAX_CHARS:
        text = f"{text[: MAX_CHARS // 2]}\n…\n{text[-MAX_CHARS // 2 :]}"
    return escape(strip_control_chars(text))
