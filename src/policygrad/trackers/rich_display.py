"""The live display on a terminal. The only tracker that needs rich."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Self, TextIO

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from policygrad.trackers.base import RunInfo
from policygrad.trackers.console import format_duration, format_number, strip_control_chars
from policygrad.trackers.live_view import (
    LiveTracker,
    LiveView,
    choose_axis_limits,
    choose_x_end,
    downsample,
    smooth_points,
)

_DOT = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a braille character


@dataclass(frozen=True)
class BraillePlot:
    """A plot in braille characters, each 2 dots wide and 4 high. Dots under the line are hidden: a character has one colour."""

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
        """Return the characters of one row, counted from the top, each with True if the line passes through it."""
        cells = [(row, column) for column in range(self.columns)]
        bits = [(self._line.get(cell) or self._dots.get(cell, 0), cell in self._line) for cell in cells]
        return [(chr(0x2800 + dots) if dots else " ", line) for dots, line in bits]


def plot_points(
    points: Sequence[tuple[float, float]], end: int, columns: int, rows: int
) -> tuple[BraillePlot, float, float]:
    """Plot points over steps 1 to `end` and their smoothed line. Returns the plot and the ends of the value axis."""
    canvas = BraillePlot(columns, rows)
    points = downsample(points)
    width, height = 2 * columns - 1, 4 * rows - 1
    low, high = choose_axis_limits([value for _, value in points])

    def at(step: float, value: float) -> tuple[int, int]:
        return round((step - 1) / (end - 1) * width), round((value - low) / (high - low) * height)

    for step, value in points:
        canvas.dot(*at(step, value), line=False)
    columns_seen: dict[int, list[int]] = {}
    for step, value in smooth_points(points):
        x, y = at(step, value)
        columns_seen.setdefault(x, []).append(y)
    path = [(x, round(sum(ys) / len(ys))) for x, ys in sorted(columns_seen.items())]
    for (x0, y0), (x1, y1) in zip(path, path[1:] or path, strict=False):
        length = max(x1 - x0, abs(y1 - y0), 1)
        for i in range(length + 1):
            canvas.dot(round(x0 + (x1 - x0) * i / length), round(y0 + (y1 - y0) * i / length), line=True)
    return canvas, low, high


ACCENT, GOOD, BAD, REMARK = "cyan", "green", "red", "yellow"
CELL = 11  # columns of one metric
CURVE_ROWS = 6  # at least; more on a tall terminal
SIDE_BY_SIDE = 104  # minimum columns to put curve and sample side by side


def render_view(view: LiveView, console: Console, width: int, height: int) -> list[RenderableType]:
    """Render the view for a terminal of this size. If it does not fit, the sample is left out first, then the curve."""
    activity: RenderableType = Text()
    if view.phase:
        name = Text(f"{view.phase}  ", style=REMARK)
        done = Text(f"{view.phase_done / view.phase_total:.0%}", style="dim") if view.phase_total else None
        activity = _bar(name, view.phase_done, view.phase_total, done, width, REMARK) if done else Text(" ") + name
    parts: list[RenderableType] = [Text(), _progress(view, width), activity]
    room = height - 1 - len(parts)
    if view.metrics:
        # Labels over values: one row if six fit, else narrower rows, as many as fit.
        fit = max(1, (width - 1) // CELL)
        cells = view.metrics[: max(fit, min(6, fit * max(1, (room - 1) // 2)))]
        text = Text(no_wrap=True)
        for row in (cells[i : i + fit] for i in range(0, len(cells), fit)):
            text.append(" " + "".join(label.ljust(CELL) for label, _ in row) + "\n ", "dim")
            for label, value in row:
                text.append(value.ljust(CELL), f"bold {GOOD}" if label == "reward" else "bold")
            text.append("\n")
            room -= 2
        text.rstrip()
        parts += [text, Text()]
        room -= 1
    curve = len(view.rewards) > 0 and width >= 30 and room >= CURVE_ROWS + 2
    sample = view.sample is not None and width >= 30
    if curve and sample and width >= SIDE_BY_SIDE:
        half, block = width // 2, min(room, 12)
        side_by_side = Table.grid(padding=0)
        side_by_side.add_column(width=half)
        side_by_side.add_row(_curve(view, half, block - 2), _sample(view, console, width - half, block))
        return [*parts, side_by_side]
    if curve:
        rows = CURVE_ROWS if room < 24 else CURVE_ROWS + 2
        parts.append(_curve(view, width, rows))
        room -= rows + 2
    if sample and room >= 5:
        parts.append(_sample(view, console, width, min(room, 12)))
    return parts


def _progress(view: LiveView, width: int) -> RenderableType:
    left = "" if view.eta is None else f"  {format_duration(view.eta)} left"
    times = f"  {format_duration(view.elapsed)}{left}" if width >= 40 else ""
    label = Text.assemble(f"{view.unit} ", (view.progress, "bold"), (times, "dim"))
    return _bar(Text(), view.fraction, 1, label, width, ACCENT)


def _bar(before: Text, done: float, total: float, after: Text, width: int, style: str) -> RenderableType:
    """Render a bar between two texts, over the full width."""
    before.truncate(max(0, width - after.cell_len - 14))
    size = max(4, width - 5 - before.cell_len - after.cell_len)
    grid = Table.grid(padding=0)
    bar = ProgressBar(max(total, 1), done, size, complete_style=style, finished_style=GOOD)
    grid.add_row(Text(" ") + before, bar, Text("  ") + after)
    return grid


def _curve(view: LiveView, width: int, rows: int) -> RenderableType:
    end, gutter, first = choose_x_end(view.step, view.total), 8, f"{view.unit} 1"
    columns = width - gutter - 4
    picture, low, high = plot_points(view.rewards, end, columns, rows)
    labels = {0: format_number(high), rows // 2: "reward", rows - 1: format_number(low)}
    text = Text(no_wrap=True)
    for row in range(rows):
        text.append(f"{labels.get(row, ''):>{gutter}} {'┤' if row in (0, rows - 1) else '│'}", "dim")
        for char, line in picture.row(row):
            text.append(char, GOOD if line else "dim")
        text.append("\n")
    text.append(f"{'':>{gutter}} └{'─' * columns}\n", "dim")
    text.append(f"{'':{gutter + 1}}{first}{end:>{columns + 1 - len(first)}}", "dim")
    return text


def _sample(view: LiveView, console: Console, width: int, height: int) -> RenderableType:
    """Show the end of the prompt and the completion, without its middle if it is long: the answer is at the end."""
    assert view.sample is not None
    inner, lines = width - 4, height - 2
    prompt = _wrap(view.sample.prompt, console, inner, "dim")
    completion = _wrap(view.sample.completion, console, inner, "")
    space = lines - min(len(prompt), 2 if lines >= 5 else 1)  # at least 2
    if len(completion) > space:
        head = (space - 1) // 2
        completion = (*completion[:head], Text("…", "dim"), *completion[head + 1 - space :])
    prompt = prompt[max(0, len(prompt) + len(completion) - lines) :]
    gap = [Text()] if len(prompt) + len(completion) < lines else []
    reward = view.sample.reward
    colour = GOOD if reward is not None and reward > 0 else BAD
    mark = Text("" if reward is None else f"reward {format_number(reward)}", f"not dim bold {colour}")
    return Panel(
        Text("\n").join([*prompt, *gap, *completion]),
        box=ROUNDED,
        border_style="dim",
        title=Text(f"a sample of {view.unit} {view.sample_step}"),
        title_align="left",
        subtitle=mark,
        subtitle_align="right",
        width=width,
        height=height,
    )


@lru_cache(maxsize=4)  # a sample is drawn many times
def _wrap(text: str, console: Console, width: int, style: str) -> tuple[Text, ...]:
    """Wrap to `width` columns, without blank lines and without the middle of a very long text."""
    if len(text) > 8000:
        text = text[:4000] + "\n" + text[-4000:]
    lines = [line.rstrip() for line in strip_control_chars(text).split("\n") if line.strip()]
    return tuple(part for line in lines for part in Text(line, style).wrap(console, width))


def format_pairs(values: Mapping[str, str], style: str, names: str = "dim") -> RenderableType:
    """Render names and values as rows; changes such as (+0.43) are coloured."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, value in values.items():
        text = Text(strip_control_chars(value), style, overflow="fold")
        for match in re.finditer(r"\(([+-])[\d.]+%?\)", text.plain):
            text.stylize(GOOD if match[1] == "+" else BAD, *match.span())
        grid.add_row(Text(f" {strip_control_chars(name)}", names), text)
    return grid


class _Console(Console):
    """Raises BrokenPipeError, at which rich's own console would end the program."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError: this display is dropped, and the run continues


class TerminalTracker(LiveTracker):
    """Redraws in place, four times a second. Other output appears above the display."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console
        self._live: Live | None = None

    @classmethod
    def for_stream(cls, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Self:
        return cls(_Console(file=stream, force_terminal=True, highlight=False), clock)

    def start(self, info: RunInfo) -> None:
        self.close()
        self._console.print(Text.assemble("\n ", (strip_control_chars(info.title), f"bold {ACCENT}")))
        if info.facts:
            self._console.print(format_pairs(info.facts, ""))
        super().start(info)
        self._live = Live(
            self,
            console=self._console,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),  # leave a redirected stream alone
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        before = self._view.phase
        super().phase(text, done, total)
        if self._live is None and self._view.phase not in ("", before):  # before the start, such as loading the model
            self._console.print(Text(f" {strip_control_chars(text)}", "dim"))

    def note(self, text: str) -> None:
        self._console.print(format_pairs({"!": text}, REMARK, REMARK))

    def finish(self, summary: Mapping[str, str]) -> None:
        self.close()
        view = self.view
        word = ("done", f"bold {GOOD}") if self._progress.is_finished else ("stopped", f"bold {REMARK}")
        place = f"  {view.unit} {view.progress} after {format_duration(view.elapsed)}"
        self._console.print(Text.assemble("\n ", word, (place, "dim")))
        if summary:
            self._console.print(format_pairs(summary, "bold"))
        self._console.print()

    def close(self) -> None:
        """Stop redrawing and release the terminal; the last display stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from render_view(self.view, console, options.max_width, console.height)
