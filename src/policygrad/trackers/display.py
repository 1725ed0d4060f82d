"""What a display is, and the two that need no terminal: `PlainDisplay` for logs and `Silent` for tests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from policygrad.trackers.progress import Course, Outline, Pace
from policygrad.trackers.words import clean, described, duration, number, one_line


@dataclass(frozen=True)
class Sample:
    """One completion to look at."""

    prompt: str
    completion: str
    reward: float | None = None


class Display(Protocol):
    """Follows one run. Used as a context manager, so that Ctrl-C and errors leave the terminal as it was."""

    def start(self, outline: Outline) -> None:
        """What the run sets out to do, before its first step."""

    def phase(self, text: str) -> None:
        """What happens now, such as an evaluation or a part of a long step; "" or the next step ends it."""

    def phase_progress(self, done: int, total: int) -> None:
        """How far the phase is; it is over at `done == total`."""

    def step(self, step: int, metrics: Mapping[str, float], sample: Sample | None = None) -> None:
        """Step number `step` is done. Any metric may be absent."""

    def note(self, text: str) -> None:
        """A warning or a remark that has to stay readable."""

    def finish(self, summary: Mapping[str, str]) -> None:
        """The run is over; `summary` is name and value, such as `change(before, after)`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class Silent:
    """Says nothing."""

    def start(self, outline: Outline) -> None: ...

    def phase(self, text: str) -> None: ...

    def phase_progress(self, done: int, total: int) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float], sample: Sample | None = None) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self, summary: Mapping[str, str]) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class PlainDisplay(Silent):
    """Lines for a log: some 25 steps of a run whatever its length, or one a minute when steps are slow; a few samples."""

    LINES, SAMPLES, QUIET = 24, 4, 60.0  # step lines and samples per run; seconds

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._pace = Pace(clock)
        self._course, self._every = Course(Outline("")), 1
        self._printed = self._started = clock()
        self._lines = 0
        self._widths: dict[str, int] = {}
        self._phases = {""}  # said already: what happens at every step is not said every time

    def start(self, outline: Outline) -> None:
        self._print(outline.title)
        for name, value in outline.facts.items():
            self._print(f"  {name}: {value}")
        self._course = Course(outline)
        self._every = max(1, math.ceil((outline.steps - outline.first_step + 1) / self.LINES))
        self._started = self._clock()
        self._pace.begin()

    def phase(self, text: str) -> None:
        self._pace.begin()
        if text not in self._phases:
            self._phases.add(text)
            self._print(text)

    def phase_progress(self, done: int, total: int) -> None:
        if done >= total:
            self._pace.begin()
        elif self._clock() - self._printed >= self.QUIET:
            self._print(f"  {done}/{total}")

    def step(self, step: int, metrics: Mapping[str, float], sample: Sample | None = None) -> None:
        self._pace.end()
        course, before = self._course, int(self._course.share * self.LINES)
        course.advance(step, metrics)
        on_time = step == course.outline.first_step or step % self._every == 0 or course.over
        on_time = on_time or (course.outline.tokens is not None and int(course.share * self.LINES) > before)
        if not on_time and self._clock() - self._printed < self.QUIET:
            return
        parts = [f"step {course.words}"]
        for name, text in described(metrics):
            self._widths[name] = max(self._widths.get(name, 0), len(text))
            parts.append(text.ljust(self._widths[name]))
        left = self._pace.left(course.left)
        self._print("  ".join([*parts, f"left {duration(left)}" if not course.over and left is not None else ""]))
        if sample and (self._lines % (self.LINES // self.SAMPLES) == 0 or course.over):
            self._show(sample)
        self._lines += 1

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def finish(self, summary: Mapping[str, str]) -> None:
        word = "done" if self._course.over else "stopped"
        self._print(f"{word} at step {self._course.words.strip()} after {duration(self._clock() - self._started)}")
        width = max(map(len, summary), default=0)
        for name, value in summary.items():
            self._print(f"  {name:<{width}}  {value}")

    def _show(self, sample: Sample) -> None:
        reward = "" if sample.reward is None else f"  (reward {number(sample.reward)})"
        self._print(f"    prompt      {one_line(sample.prompt)}")
        self._print(f"    completion  {one_line(sample.completion)}{reward}")

    def _print(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = clean(text).rstrip().encode(encoding, "replace").decode(encoding)
        self._stream.write(line + "\n")
        self._stream.flush()
        self._printed = self._clock()
