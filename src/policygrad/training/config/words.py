"""A configuration in words, from its TOML alone: whoever reads of a run need not have the parts that a user wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARTS = {
    "psi": "advantage Ψ",
    "ratio": "ratio",
    "gate": "gate w",
    "aggregate": "average c",
    "terms": "terms k",
    "corrections": "corrections",
    "shaping": "reward shaping",
    "filters": "filters",
    "critic": "critic",
    "reward_model": "reward model",
    "step": "step",
}
"""Of an algorithm, in the equation's order."""


def short(value: Any) -> str:
    """An option's value: a part as `Clip(low=0.2, high=0.28)`, a list with commas."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{k}={short(v)}" for k, v in value.items() if k != "part")
        return f"{value['part']}({inside})" if "part" in value and inside else str(value.get("part", inside))
    if isinstance(value, list):
        return ", ".join(map(short, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def parts(algorithm: Mapping[str, Any]) -> dict[str, str]:
    """Where a part goes -> the part; what is absent is left out."""
    said = {label: short(algorithm[key]) for key, label in PARTS.items() if key in algorithm}
    return {label: text for label, text in said.items() if text not in ("", "none")}
