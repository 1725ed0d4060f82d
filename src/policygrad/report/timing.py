"""Summarise a run's trace: the share of each phase, and the longest gaps, in which nothing was sampled and nothing learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from policygrad.trackers.console import format_duration
from policygrad.trackers.trace import read_events, trace_files

# Spans of rank 0 that are shown, and what they are.
PHASES = {
    "sample": "sampling",
    "environment reset": "starting episodes",
    "environment step": "the environment, and decoding",
    "score": "scoring",
    "score steps": "scoring of steps",
    "learn": "learning",
    "publish": "publishing weights",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "log": "logging",
    "snapshot": "copies of the state",
    "record": "records for `policygrad verify`",
    "load": "loading",
    "export": "writing the model",
    "read back": "reading the model back",
}
WORK = ("sample", "learn")
"""What the time of a run is for: a gap is time outside of these."""
MAX_GAPS, MIN_GAP = 5, 10_000  # gaps that are named, and microseconds of the shortest one
Interval = tuple[int, int]  # microseconds


@dataclass(frozen=True)
class Gap:
    """A time in which neither the sampler nor the learner worked."""

    seconds: float
    start: float  # seconds after the trace's first span
    during: str  # the spans that took most of it, such as `score 80%`; "" = none that is recorded


@dataclass(frozen=True)
class TraceSummary:
    """Where the time went. Shares are of the time in which the run's processes lived; phases may overlap."""

    seconds: float
    phases: tuple[tuple[str, float, float], ...]  # (description, seconds, share), the longest first
    idle: float  # share of the time in which nothing was sampled or learned, between the first and the last such work
    gaps: tuple[Gap, ...]  # the longest first

    def describe(self) -> list[str]:
        """Return the summary as sentences."""
        parts = [f"{what} {share:.0%}" for what, _, share in self.phases if share >= 0.005]
        lines = [f"Of {_seconds(self.seconds)}: {', '.join(parts)}. Neither sampling nor learning: {self.idle:.0%}."]
        if self.gaps:
            gaps = (
                f"{_seconds(g.seconds)} at {_seconds(g.start)}{f' ({g.during})' if g.during else ''}" for g in self.gaps
            )
            lines.append(f"Longest gaps: {'; '.join(gaps)}.")
        return lines


def summarise_traces(folder: Path) -> TraceSummary | None:
    """Summarise the trace in a run's folder; None if it was not traced.

    Raises:
        RunError: A file cannot be read.
    """
    files = trace_files(folder)
    return summarise_events(event for path in files for event in read_events(path))


def summarise_events(events: Iterable[Mapping[str, Any]]) -> TraceSummary | None:
    """Summarise the events of a trace; None without any span of the trainer."""
    by_name = dict[str, list[Interval]]()
    for event in events:
        if event.get("ph") == "X" and event.get("pid") == 1 and (name := event.get("name")) in (*PHASES, "step"):
            start, duration = event.get("ts"), event.get("dur")
            if isinstance(start, int) and isinstance(duration, int):
                by_name.setdefault(str(name), []).append((start, start + duration))
    if not by_name:
        return None
    merged = {name: merge_intervals(intervals) for name, intervals in by_name.items()}
    first = min(a for intervals in merged.values() for a, _ in intervals)
    alive = _length(merge_intervals([i for intervals in merged.values() for i in intervals])) or 1
    phases = [
        (PHASES[name], _length(merged[name]) / 1e6, _length(merged[name]) / alive) for name in PHASES if name in merged
    ]
    working = merge_intervals([i for name in WORK for i in merged.get(name, ())])
    within = merge_intervals(merged.get("step", ()))  # the time between two processes of a run is no gap
    idle = sorted(_intersect(_gaps(working), within), key=lambda gap: gap[0] - gap[1])
    reasons = {name: x for name, x in merged.items() if name in PHASES and name not in WORK}
    longest = [(a, b) for a, b in idle[:MAX_GAPS] if b - a >= MIN_GAP]
    gaps = (Gap((b - a) / 1e6, (a - first) / 1e6, _explain(reasons, (a, b))) for a, b in longest)
    total = _length(within) or 1
    return TraceSummary(
        alive / 1e6, tuple(sorted(phases, key=lambda phase: -phase[1])), _length(idle) / total, tuple(gaps)
    )


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, ascending and disjoint."""
    merged = list[Interval]()
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _gaps(intervals: Sequence[Interval]) -> list[Interval]:
    return [(a, b) for (_, a), (b, _) in pairwise(intervals)]


def _intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two ascending lists of disjoint intervals."""
    result, i, j = list[Interval](), 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            result.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def _length(intervals: Iterable[Interval]) -> int:
    return sum(b - a for a, b in intervals)


def _explain(reasons: Mapping[str, Sequence[Interval]], gap: Interval) -> str:
    """Return the phases that took at least a tenth of a gap."""
    shares = {name: _length(_intersect(x, [gap])) / (gap[1] - gap[0]) for name, x in reasons.items()}
    large = sorted((name for name, share in shares.items() if share >= 0.1), key=lambda name: -shares[name])
    return ", ".join(f"{PHASES[name]} {shares[name]:.0%}" for name in large)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else format_duration(seconds)
