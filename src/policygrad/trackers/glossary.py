"""What every metric of a run means: `metrics.toml` as data, for `policygrad show METRIC` and docs/metrics.md."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class MetricDoc:
    """Of one metric, or of those that a pattern names."""

    name: str
    """`*` stands for what the run names: a reward function, a part."""
    unit: str
    text: str
    interpretation: str = ""
    """What it means when it moves, and what to do; "" where nothing need be done."""


@dataclass(frozen=True)
class MetricSection:
    """Metrics that belong together."""

    title: str
    metrics: tuple[MetricDoc, ...]


@cache
def load_glossary() -> tuple[MetricSection, ...]:
    """All there are."""
    read = tomllib.loads((files("policygrad.trackers") / "metrics.toml").read_text(encoding="utf-8"))
    return tuple(MetricSection(c["title"], tuple(MetricDoc(**m) for m in c["metrics"])) for c in read["chapters"])


def find_metric_doc(name: str) -> MetricDoc | None:
    """Of a metric; None for one that nobody has described. An exact name is before a pattern, and patterns are in their order."""
    every = [metric for chapter in load_glossary() for metric in chapter.metrics]
    exact = (m for m in every if m.name == name)
    return next(exact, None) or next((m for m in every if fnmatchcase(name, m.name)), None)
