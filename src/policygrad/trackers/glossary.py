"""Descriptions of all metrics, read from `metrics.toml` for `policygrad show METRIC` and docs/metrics.md."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class MetricDoc:
    """Description of a metric, or of all metrics that match a pattern."""

    name: str  # may contain `*`, for a name given by the run such as a reward function
    unit: str
    text: str
    interpretation: str = ""  # how to read a change, and what to do about it; "" if nothing is to be done
    title: str = ""  # the metric in plain words, over its curve; "" = its name


@dataclass(frozen=True)
class MetricSection:
    """A group of related metrics."""

    title: str
    metrics: tuple[MetricDoc, ...]


@cache
def load_glossary() -> tuple[MetricSection, ...]:
    """Return all sections."""
    read = tomllib.loads((files("policygrad.trackers") / "metrics.toml").read_text(encoding="utf-8"))
    return tuple(MetricSection(c["title"], tuple(MetricDoc(**m) for m in c["metrics"])) for c in read["chapters"])


def find_metric_doc(name: str) -> MetricDoc | None:
    """Return the description of a metric; None without one. An exact name comes before patterns, which are tried in order."""
    docs = [metric for chapter in load_glossary() for metric in chapter.metrics]
    exact = (m for m in docs if m.name == name)
    return next(exact, None) or next((m for m in docs if fnmatchcase(name, m.name)), None)
