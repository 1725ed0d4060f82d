"""What the services have in common: which of their runs is this one, and what they can be told of it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policygrad.trackers.base import RunInfo, in_words

PROJECT = "policygrad"
"""What runs are filed under where the service's own environment variable does not say."""
IDENTITIES = "tracked.json"
"""In the run's folder: service → the name it knows this run by, so that a resumed run goes on there."""
SHOWN = 16
"""Completions of a step, at most, that a service is sent; all are in completions.jsonl."""


def project(variable: str) -> str:
    """The service's own environment variable, or ours."""
    return os.environ.get(variable) or PROJECT


def title(info: RunInfo) -> str:
    """What the run is called: its folder's name."""
    return info.folder.name if info.folder is not None else info.title


def identity(info: RunInfo, service: str) -> str | None:
    """What the service knows this run by, where an earlier process began it there."""
    if info.folder is None or info.first_step == 1:
        return None
    file = info.folder / IDENTITIES
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found.get(service)


def remember(folder: Path | None, service: str, name: str) -> None:
    """For `identity`."""
    if folder is not None:
        file = folder / IDENTITIES
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        new = file.with_name(file.name + ".new")
        new.write_text(json.dumps(known | {service: name}) + "\n", encoding="utf-8")
        os.replace(new, file)


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that are numbers, and finite."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A nested configuration as one level, names joined with dots; lists and objects as text."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


COLUMNS = ("step", "prompt", "completion", "reward", "advantage", "tokens", "truncated")


def table(step: int, completions: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """`SHOWN` completions, evenly spaced over the step's, with `COLUMNS`."""
    stride = max(1, math.ceil(len(completions) / SHOWN))
    return [
        [step, in_words(row.get("prompt", "")), *(row.get(name) for name in COLUMNS[2:])]
        for row in completions[::stride]
    ]
