"""Seconds of a piece of code, and the tables that component benches make."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


def cpu_seconds(
    works: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Median CPU seconds of each, all threads, or seconds of another clock; they take turns, after one call each that is not
    counted."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            start = clock()
            work()
            times[name].append(clock() - start)
    return {name: statistics.median(found) for name, found in times.items()}


@dataclass(frozen=True)
class Table:
    """What a component bench has found."""

    title: str
    note: str
    """What was compared, in a sentence."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
