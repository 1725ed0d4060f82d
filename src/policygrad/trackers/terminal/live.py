"""The live display: progress, the metrics of the last step, the reward so far, and a completion as the model writes now."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from policygrad.trackers.display import Sample, Silent
from policygrad.trackers.progress import Course, Outline, Pace
from policygrad.trackers.terminal.picture import ACCENT, GOOD, REMARK, View, draw, pairs
from policygrad.trackers.words import clean, duration, shown

HOLD = 3.0  # seconds for which a sample stays, so that it can be read


class RichDisplay(Silent):
    """Redraws in place, four times a second. Whatever is printed meanwhile appears above."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._pace = Pace(clock)
        self._course, self._view = Course(Outline("")), View()
        self._rewards: list[tuple[int, float]] = []
        self._started, self._sampled = clock(), -math.inf
        self._live: Live | None = None

    @classmethod
    def on(cls, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Self:
        return cls(Console(file=stream, force_terminal=True, highlight=False), clock)

    def start(self, outline: Outline) -> None:
        self.close()
        self._console.print(Text.assemble("\n ", (clean(outline.title), f"bold {ACCENT}")))
        if outline.facts:
            self._console.print(pairs(outline.facts, ""))
        self._rewards = []
        for step, value in outline.history:
            self._reward(step, value)
        self._sampled = -math.inf
        self._course = Course(outline)
        self._view = self._placed(View())
        self._started = self._clock()
        self._pace.begin()
        self._live = Live(
            self,
            console=self._console,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),  # a redirected stream is the user's, not the terminal's
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def phase(self, text: str) -> None:
        self._pace.begin()
        if text and self._live is None:  # before the start, such as loading the model
            self._console.print(Text(f" {clean(text)}", "dim"))
        self._view = replace(self._view, phase=" ".join(clean(text).split()), phase_done=0, phase_total=0)

    def phase_progress(self, done: int, total: int) -> None:
        self._view = replace(self._view, phase_done=done, phase_total=total)
        if done >= total:
            self.phase("")

    def step(self, step: int, metrics: Mapping[str, float], sample: Sample | None = None) -> None:
        self._pace.end()
        self._reward(step, metrics.get("reward"))
        self._course.advance(step, metrics)
        left = None if self._course.over else self._pace.left(self._course.left)
        self._view = replace(self._placed(self._view), metrics=shown(metrics), left=left, phase="")
        if sample is not None and (self._clock() - self._sampled >= HOLD or self._course.over):
            self._sampled = self._clock()
            self._view = replace(self._view, sample=sample, sample_step=step)

    def note(self, text: str) -> None:
        self._console.print(pairs({"!": text}, REMARK, REMARK))

    def finish(self, summary: Mapping[str, str]) -> None:
        self.close()
        words, time = self._course.words.strip(), duration(self._clock() - self._started)
        word = ("done", f"bold {GOOD}") if self._course.over else ("stopped", f"bold {REMARK}")
        self._console.print(Text.assemble("\n ", word, (f"  step {words} after {time}", "dim")))
        if summary:
            self._console.print(pairs(summary, "bold"))
        self._console.print()

    def _placed(self, view: View) -> View:
        course = self._course
        return replace(
            view, step=course.step, total=course.outline.steps, share=course.share, words=course.words.strip()
        )

    def _reward(self, step: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self._rewards.append((step, max(-1e30, min(1e30, float(value)))))  # the axis' length stays finite

    def close(self) -> None:
        """Stop redrawing and give the terminal back; the last picture stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = replace(self._view, elapsed=self._clock() - self._started, rewards=tuple(self._rewards))
        yield from draw(view, console, options.max_width, console.height)
