"""Committed reports of comparisons, and how pages write their figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from measure_algorithms import RESULTS
from policygrad.algorithms import ALGORITHMS

Data = dict[str, Any]


def load(name: str = "algorithms") -> Data | None:
    """A committed report; None where there is none yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def files(name: str) -> str:
    there = [
        f"[{name}.{kind}](results/{name}.{kind})" for kind in ("json", "html") if (RESULTS / f"{name}.{kind}").exists()
    ]
    return " and ".join(there) or f"`docs/results/{name}.json` and `.html`"


def link(name: str) -> str:
    return f"[`{name}`](algorithms/{name}.md)" if name in ALGORITHMS else f"`{name}`"


def estimate(x: Mapping[str, float]) -> str:
    return f"{x['value']:.3f} [{x['low']:.3f}, {x['high']:.3f}]"


def short(x: float) -> str:
    """38, 1.2k, 250k."""
    return f"{x:.0f}" if x < 1000 else f"{x / 1000:.3g}k"
