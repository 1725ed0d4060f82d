"""The catalog: what `show` and the documentation tell about each named algorithm, and about the origin of its defaults."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class AlgorithmInfo:
    """A named algorithm: its source, the problems it addresses, how it fails, and how it differs from the published one."""

    title: str
    source: str
    addresses: str
    failure_modes: str
    objective: str
    """The published objective in our notation; lines of plain text. r is π_θ/π_old of a token, s its mean over a completion."""
    parent: str | None = None  # the algorithm that it modifies
    deviations: str = ""  # deviations from the publication, one line without a full stop; "" if none are known
    defaults: dict[str, str] = field(default_factory=dict)
    """`Part.setting` or `samples_per_prompt` -> origin of the default. A setting that is missing here has its parent's origin if
    the values are equal, and is otherwise our choice."""


EQUATION = "∇J = Σ ( c · w · Ψ + k ) ∇log π_θ"
"""The equation that every algorithm is a row of."""

_TABLE = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))

CATALOG: dict[str, AlgorithmInfo] = {name: AlgorithmInfo(**entry) for name, entry in _TABLE["algorithms"].items()}
DEFAULT_SOURCES: dict[str, str] = _TABLE["defaults"]
"""`Part.setting` -> origin of a part's own default, where no publication mentions it."""
RECIPE_FIELDS = frozenset(_TABLE["recipe_fields"])
"""Settings whose origin is never inherited from the parent: how often a rollout is used is specific to each publication."""
