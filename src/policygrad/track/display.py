"""What a display is, and the two that need no terminal: `PlainDisplay` for logs and `Silent` for tests."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from policygrad.track.words import clean, described, duration, number, one_line


@dataclass(frozen=True)
class Sample:
    """One completion to look at."""

    prompt: str
    completion: str
    reward: float | None = None


class Display(Protocol):
    """Follows one run. Used as a context manager, so that Ctrl-C and errors leave the terminal as it was."""

    def start(
        self,
        title: str,
        facts: Mapping[str, str],
        total_steps: int,
        first_step: int = 1,
        history: Sequence[tuple[int, float]] = (),
    ) -> None:
        """`first_step` is the first that this process does; `history` is (step, reward) of those before it."""

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

    def start(
        self,
        title: str,
        facts: Mapping[str, str],
        total_steps: int,
        first_step: int = 1,
        history: Sequence[tuple[int, float]] = (),
    ) -> None: ...

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
        self._total = self._every = self._first = 1
        self._printed = self._started = clock()
        self._lines = self._step = 0
        self._widths: dict[str, int] = {}
        self._phases = {""}  # said already: what happens at every step is not said every time

    def start(
        self,
        title: str,
        facts: Mapping[str, str],
        total_steps: int,
        first_step: int = 1,
        history: Sequence[tuple[int, float]] = (),
    ) -> None:
        self._print(title)
        for name, value in facts.items():
            self._print(f"  {name}: {value}")
        self._total, self._first, self._step = total_steps, first_step, first_step - 1
        self._every = max(1, math.ceil((total_steps - first_step + 1) / self.LINES))
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
        self._step = step
        on_time = step in (self._first, self._total) or step % self._every == 0
        if not on_time and self._clock() - self._printed < self.QUIET:
            return
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}"]
        for name, text in described(metrics):
            self._widths[name] = max(self._widths.get(name, 0), len(text))
            parts.append(text.ljust(self._widths[name]))
        left = self._pace.left(self._total - step)
        self._print("  ".join([*parts, f"left {duration(left)}" if step < self._total and left is not None else ""]))
        if sample and (self._lines % (self.LINES // self.SAMPLES) == 0 or step == self._total):
            self._show(sample)
        self._lines += 1

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def finish(self, summary: Mapping[str, str]) -> None:
        word = "done" if self._step >= self._total else "stopped"
        self._print(f"{word} at step {self._step}/{self._total} after {duration(self._clock() - self._started)}")
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


class Pace:
    """Seconds from step to step: the mean over the last 20. The first does not count once there is another."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._times: deque[float] = deque(maxlen=20)
        self._warm = False

    def begin(self) -> None:
        """What came before the first step, such as an evaluation, is over."""
        if not self._times:
            self._last = self._clock()

    def end(self) -> None:
        """A step is done."""
        now = self._clock()
        if not self._warm and self._times:  # the first step compiles and allocates
            self._times.clear()
            self._warm = True
        self._times.append(now - self._last)
        self._last = now

    def left(self, steps: int) -> float | None:
        """Seconds for so many more steps; None before the first."""
        return steps * sum(self._times) / len(self._times) if self._times else None
