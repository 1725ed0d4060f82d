"""Plain lines of text, for logs and pipes; formats of metrics, numbers and times."""

from __future__ import annotations

import math
import re
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from policygrad.trackers.base import RunInfo, Tracker, choose_sample

Z_95 = 1.96
"""Standard errors on either side of a mean that make its 95 % interval."""


def format_number(value: float, digits: int = 2) -> str:
    """Format briefly, in a steady width: 0.41, 0.003, 2.1e-05, 14.2, 1,024."""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}" if size < 1e7 else f"{value:.1e}"
    if size == 0 or size >= 0.095:
        return f"{value:.{1 if size >= 10 else digits}f}"
    return f"{value:.3f}" if size >= 0.00095 else f"{value:.0e}"


def format_count(value: float) -> str:
    """Format as 812, 2.1k, 21k, 3.4M."""
    if not math.isfinite(value):
        return str(float(value))
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.{1 if value < 9.95 * size else 0}f}{unit}"
    return f"{value:.0f}"


def name_state(text: str) -> str:
    """Return a phase without its numbers: waiting for 13 programs, then for 12, is one state."""
    return re.sub(r"(?<![\w.-])\d[\d,.]*(?![\w-])", "N", text)


def format_duration(seconds: float) -> str:
    """Format as 8s, 1m40s, 2h05m, 3d04h."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02}s"
    if rounded < 86400:
        return f"{rounded // 3600}h{rounded // 60 % 60:02}m"
    return f"{rounded // 86400}d{rounded // 3600 % 24:02}h"


def format_change(before: float, after: float, digits: int = 2, half_width: float = 0.0) -> str:
    """Format as `0.31 -> 0.74  (+0.43)`, or with half of the change's 95 % interval as `0.15 -> 0.09  (-0.06 ± 0.08 at 95 %, within
    noise)`."""
    change = f"{before:.{digits}f} -> {after:.{digits}f}  ({after - before:+.{digits}f}"
    if not half_width:
        return f"{change})"
    noise = ", within noise" if abs(after - before) <= half_width else ""
    return f"{change} ± {half_width:.{digits}f} at 95 %{noise})"


FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (  # metric, label, format
    ("reward", "reward", format_number),
    ("loss", "loss", lambda x: format_number(x, 3)),
    ("accuracy", "accuracy", format_number),
    ("margin", "margin", format_number),
    ("teacher/kl", "teacher kl", format_number),
    ("kl", "kl", format_number),
    ("entropy", "entropy", format_number),
    ("completions/mean_length", "length", lambda x: format_number(x, 1)),
    ("tokens_per_second", "tok/s", format_count),
    ("grad_norm", "grad", format_number),
    ("completions/truncated_ratio", "cut off", lambda x: f"{x:.0%}"),
    ("frac_reward_zero_std", "no spread", lambda x: f"{x:.0%}"),
    ("clip_ratio/high", "clip high", lambda x: f"{x:.1%}"),
    ("clip_ratio/low", "clip low", lambda x: f"{x:.1%}"),
)


def format_metrics(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (label, value) of the metrics present, the most important first."""
    return [(label, write(float(metrics[name]))) for name, label, write in FIELDS if metrics.get(name) is not None]


def summarise_metrics(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (label, text) of the main metrics, for one line of text."""
    keys = ("reward", "loss", "accuracy", "margin", "teacher kl", "kl", "entropy", "length", "tok/s", "cut off")
    named = [(k, value) for k, value in format_metrics(metrics) if k in keys and (k, value) != ("cut off", "0%")]
    return [(k, f"{value} {k}" if k in ("tok/s", "cut off") else f"{k} {value}") for k, value in named]


def strip_control_chars(text: str) -> str:
    """Make text safe to print, with a known width: control characters become visible symbols."""
    out = []
    for char in text.replace("\r\n", "\n").replace("\ufe0f", "").expandtabs(4):
        kind = unicodedata.category(char)
        if char == "\n" or kind[0] != "C":
            out.append("\n" if kind in ("Zl", "Zp") else char)
        elif ord(char) < 32:
            out.append(chr(0x2400 + ord(char)))
        elif kind != "Cf":  # format characters (which reverse a line or join emoji) are dropped
            out.append("\ufffd")
    return "".join(out)


def to_one_line(text: str, width: int = 120) -> str:
    """Return the text on one line of at most `width` characters, without its middle: the answer is at the end."""
    flat = text.strip().replace("\n", "\\n")
    return flat if len(flat) <= width else f"{flat[: width // 2]} ... {flat[-width // 2 :]}"


class RunProgress:
    """Progress of a run in steps and in sampled tokens."""

    def __init__(self, info: RunInfo) -> None:
        self.info, self.step = info, info.first_step - 1
        self.sampled: float = info.sampled_tokens

    def advance(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record that step number `step` is done."""
        self.step = step
        self.sampled += metrics.get("tokens/sampled", 0)

    @property
    def fraction(self) -> float:
        """Fraction done, in [0, 1]: of the steps or of the tokens, whichever is larger."""
        of_tokens = self.sampled / self.info.token_budget if self.info.token_budget else 0.0
        return min(1.0, max(self.step / max(1, self.info.steps), of_tokens))

    @property
    def is_finished(self) -> bool:
        """True after the last step."""
        return self.fraction >= 1

    @property
    def steps_left(self) -> float:
        """Remaining steps, at the tokens per step so far."""
        steps = float(self.info.steps - self.step)
        per_step = (self.sampled - self.info.sampled_tokens) / max(1, self.step - self.info.first_step + 1)
        if self.info.token_budget and per_step:
            steps = min(steps, (self.info.token_budget - self.sampled) / per_step)
        return max(0.0, steps)

    @property
    def label(self) -> str:
        """`12/200`, with a token budget `12/200  2.1k/21k tokens`."""
        total = self.info.steps
        steps = f"{self.step:>{len(str(total))}}/{total}"
        if not self.info.token_budget:
            return steps
        return f"{steps}  {format_count(self.sampled)}/{format_count(self.info.token_budget)} {self.info.token_unit}"


class RateEstimator:
    """Mean seconds per step over the last 20 steps, without the first one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._times: deque[float] = deque(maxlen=20)
        self._warm = False

    def begin(self) -> None:
        """Start timing the first step, after an evaluation for example."""
        if not self._times:
            self._last = self._clock()

    def end(self) -> None:
        """Record the end of a step."""
        now = self._clock()
        if not self._warm and self._times:  # the first step compiles and allocates
            self._times.clear()
            self._warm = True
        self._times.append(now - self._last)
        self._last = now

    def eta(self, steps: float) -> float | None:
        """Return the estimated seconds for so many steps; None before the first one is done."""
        return steps * sum(self._times) / len(self._times) if self._times else None


class PlainTracker(Tracker):
    """Prints about 25 steps of a run of any length, or one a minute if steps are slow, and a few samples."""

    LINES, SAMPLES, QUIET = 24, 4, 60.0  # step lines and samples per run; seconds between steps that are shown at least
    PHASE_QUIET = 20.0  # seconds of a phase, such as an evaluation, after which its progress is shown

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._pace = RateEstimator(clock)
        self._progress, self._every = RunProgress(RunInfo("")), 1
        self._printed = self._started = clock()
        self._lines = 0
        self._widths: dict[str, int] = {}
        self._phases = {""}  # printed already: each state is printed once, whatever its numbers

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
        if (state := name_state(text)) not in self._phases:
            self._phases.add(state)
            self._print(text)
        elif done < total and self._clock() - self._printed >= self.PHASE_QUIET:
            self._print(f"  {done}/{total}")

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self._pace.end()
        progress, before = self._progress, int(self._progress.fraction * self.LINES)
        progress.advance(step, metrics)
        on_time = step == progress.info.first_step or step % self._every == 0 or progress.is_finished
        on_time = on_time or (progress.info.token_budget is not None and int(progress.fraction * self.LINES) > before)
        if not on_time and self._clock() - self._printed < self.QUIET:
            return
        parts = [f"{progress.info.step_unit} {progress.label}"]
        for name, text in summarise_metrics(metrics):
            self._widths[name] = max(self._widths.get(name, 0), len(text))
            parts.append(text.ljust(self._widths[name]))
        left = self._pace.eta(progress.steps_left)
        if left is not None and not progress.is_finished:
            parts.append(f"left {format_duration(left)}")
        self._print("  ".join(parts))
        sample = choose_sample(step, completions)
        if sample and (self._lines % (self.LINES // self.SAMPLES) == 0 or progress.is_finished):
            reward = "" if sample.reward is None else f"  (reward {format_number(sample.reward)})"
            self._print(f"    prompt      {to_one_line(sample.prompt)}")
            self._print(f"    completion  {to_one_line(sample.completion)}{reward}")
        self._lines += 1

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def finish(self, summary: Mapping[str, str]) -> None:
        progress, seconds = self._progress, self._clock() - self._started
        place = f"{progress.info.step_unit} {progress.label.strip()} after {format_duration(seconds)}"
        self._print(f"{'done' if progress.is_finished else 'stopped'} at {place}")
        width = max(map(len, summary), default=0)
        for name, value in summary.items():
            self._print(f"  {name:<{width}}  {value}")

    def _print(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = strip_control_chars(text).rstrip().encode(encoding, "replace").decode(encoding)
        self._stream.write(line + "\n")
        self._stream.flush()
        self._printed = self._clock()
