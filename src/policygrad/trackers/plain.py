"""Lines of text for a log: what is told where there is no terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from policygrad.trackers.base import RunInfo, Sample, Tracker, pick_sample
from policygrad.trackers.progress import Pace, RunProgress
from policygrad.trackers.words import clean, described, duration, number, one_line


class PlainTracker(Tracker):
    """Some 25 steps of a run whatever its length, or one a minute when steps are slow; a few samples."""

    LINES, SAMPLES, QUIET = 24, 4, 60.0  # step lines and samples per run; seconds

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._pace = Pace(clock)
        self._progress, self._every = RunProgress(RunInfo("")), 1
        self._printed = self._started = clock()
        self._lines = 0
        self._widths: dict[str, int] = {}
        self._phases = {""}  # said already: what happens at every step is not said every time

    def start(self, info: RunInfo) -> None:
        self._print(info.title)
        for name, value in info.facts.items():
            self._print(f"  {name}: {value}")
        self._progress = RunProgress(info)
        self._every = max(1, math.ceil((info.steps - info.first_step + 1) / self.LINES))
        self._started = self._clock()
        self._pace.begin()

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        if done >= total:
            self._pace.begin()
        if text not in self._phases:
            self._phases.add(text)
            self._print(text)
        elif done < total and self._clock() - self._printed >= self.QUIET:
            self._print(f"  {done}/{total}")

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self._pace.end()
        progress, before = self._progress, int(self._progress.share * self.LINES)
        progress.advance(step, metrics)
        on_time = step == progress.info.first_step or step % self._every == 0 or progress.over
        on_time = on_time or (progress.info.tokens is not None and int(progress.share * self.LINES) > before)
        if not on_time and self._clock() - self._printed < self.QUIET:
            return
        parts = [f"{progress.info.unit} {progress.words}"]
        for name, text in described(metrics):
            self._widths[name] = max(self._widths.get(name, 0), len(text))
            parts.append(text.ljust(self._widths[name]))
        left = self._pace.left(progress.left)
        self._print("  ".join([*parts, f"left {duration(left)}" if not progress.over and left is not None else ""]))
        sample = pick_sample(step, completions)
        if sample and (self._lines % (self.LINES // self.SAMPLES) == 0 or progress.over):
            self._show(sample)
        self._lines += 1

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def finish(self, summary: Mapping[str, str]) -> None:
        progress, seconds = self._progress, self._clock() - self._started
        place = f"{progress.info.unit} {progress.words.strip()} after {duration(seconds)}"
        self._print(f"{'done' if progress.over else 'stopped'} at {place}")
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
