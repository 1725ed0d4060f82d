"""The state of a live display, shared by the terminal and the notebook, and the preparation of its curves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from policygrad.trackers.base import RunInfo, Sample, Tracker, choose_sample
from policygrad.trackers.console import RateEstimator, RunProgress, format_metrics, strip_control_chars

SAMPLE_HOLD_SECONDS = 3.0  # seconds for which a sample stays, so that it can be read
# Metric -> name of its curve, for metrics kept as curves.
CURVE_METRICS = {
    "reward": "reward",
    "loss": "loss",
    "accuracy": "accuracy",
    "entropy": "entropy",
    "completions/mean_length": "length",
}


@dataclass(frozen=True)
class LiveView:
    """Everything the live display shows; `eta` and `elapsed` in seconds."""

    unit: str = "step"
    total: int = 1
    step: int = 0
    fraction: float = 0.0  # done, in [0, 1]
    progress: str = "0/1"  # steps done of all
    elapsed: float = 0.0
    eta: float | None = None
    phase: str = ""
    phase_done: int = 0
    phase_total: int = 0
    metrics: Sequence[tuple[str, str]] = ()  # (label, value)
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)  # name -> (step, value)
    sample: Sample | None = None
    sample_step: int = 0

    @property
    def rewards(self) -> Sequence[tuple[int, float]]:
        """The reward curve; empty without one."""
        return self.curves.get("reward", ())


class LiveTracker(Tracker):
    """Keeps a `LiveView` up to date; subclasses draw it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._pace = clock, RateEstimator(clock)
        self._progress, self._view = RunProgress(RunInfo("")), LiveView()
        self._curves: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVE_METRICS.values()}
        self._started, self._sampled = clock(), -math.inf

    @property
    def view(self) -> LiveView:
        """The current state."""
        curves = {name: tuple(points) for name, points in self._curves.items() if points}
        return replace(self._view, elapsed=self._clock() - self._started, curves=curves)

    def start(self, info: RunInfo) -> None:
        self._curves = {name: [] for name in CURVE_METRICS.values()}
        for step, value in info.history:
            self._point("reward", step, value)
        self._sampled = -math.inf
        self._progress = RunProgress(info)
        self._view = self._with_progress(LiveView(unit=info.step_unit, total=info.steps))
        self._started = self._clock()
        self._pace.begin()

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        if done >= total:
            self._pace.begin()
        if done >= total > 0:
            text, done, total = "", 0, 0
        self._view = replace(
            self._view, phase=" ".join(strip_control_chars(text).split()), phase_done=done, phase_total=total
        )

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self._pace.end()
        for metric, name in CURVE_METRICS.items():
            self._point(name, step, metrics.get(metric))
        self._progress.advance(step, metrics)
        left = None if self._progress.is_finished else self._pace.eta(self._progress.steps_left)
        view = replace(self._with_progress(self._view), metrics=format_metrics(metrics), eta=left, phase="")
        sample = choose_sample(step, completions)
        if sample is not None and (self._clock() - self._sampled >= SAMPLE_HOLD_SECONDS or self._progress.is_finished):
            self._sampled = self._clock()
            view = replace(view, sample=sample, sample_step=step)
        self._view = view

    def _with_progress(self, view: LiveView) -> LiveView:
        progress = self._progress
        return replace(view, step=progress.step, fraction=progress.fraction, progress=progress.label.strip())

    def _point(self, name: str, step: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            # the bounds keep the length of the axis finite
            self._curves[name].append((step, max(-1e30, min(1e30, float(value)))))


def smooth_values(values: Sequence[float], span: float) -> list[float]:
    """Smooth by weighted means, with weights that fall by a factor e per `span` values to either side, so without delay."""
    decay = math.exp(-1 / span)

    def sums(series: Sequence[float]) -> list[tuple[float, float]]:
        total = weight = 0.0
        out = []
        for value in series:
            total, weight = decay * total + value, decay * weight + 1
            out.append((total, weight))
        return out

    pairs = zip(values, sums(values), reversed(sums(values[::-1])), strict=True)
    return [(a[0] + b[0] - value) / (a[1] + b[1] - 1) for value, a, b in pairs]


def choose_x_end(step: int, total: int) -> int:
    """Return the end of the step axis: the run's length, halved until the curve fills at least half of it, at least 10."""
    end = total
    while end >= 2 * step and end // 2 >= 10:
        end = math.ceil(end / 2)
    return max(end, step, 2)


def choose_axis_limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the value axis: smallest and largest value, rounded outward; one unit apart if they are equal."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(1.0, abs(high)):
        unit = max(1.0, 1e-3 * abs(high))
        return (low, low + unit) if low <= 0 else (high - unit, high)
    unit = 10.0 ** math.floor(math.log10((high - low) / 2))
    return math.floor(low / unit + 1e-9) * unit, math.ceil(high / unit - 1e-9) * unit


def downsample(points: Sequence[tuple[float, float]], most: int = 500) -> Sequence[tuple[float, float]]:
    """Average neighbouring steps of a long run, so that drawing takes no longer than for a short one."""
    size = len(points) // most + 1
    return points if size == 1 else [_mean(points[i : i + size]) for i in range(0, len(points), size)]


def smooth_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the smoothed line through points, with a span of a sixteenth of them."""
    values = smooth_values([value for _, value in points], max(1.0, len(points) / 16))
    return [(step, value) for (step, _), value in zip(points, values, strict=True)]


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)
