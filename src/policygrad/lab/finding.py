"""A claim of the field, and what came of it when it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """One experiment. The sentence is made from the numbers, also where they speak against the claim."""

    name: str
    claim: str
    """As it is usually said."""
    holds: bool
    """Whether the numbers bear it out, here."""
    sentence: str
    """What was found."""
    numbers: Mapping[str, float]
    error: float | None = None
    """Standard error of the number that decides; None = exact, no sampling."""
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Columns of equal length, to plot; the first one is the x axis."""


def percent(x: float) -> str:
    """12 %, 0.3 %."""
    return f"{100 * x:.0f} %" if abs(x) >= 0.0995 else f"{100 * x:.2g} %"


def tiny(x: float) -> str:
    """4e-16, or 0 where it is nothing at all."""
    return f"{x:.0e}" if x else "0"


def verdict(holds: bool, yes: str, no: str) -> str:
    """The wording for either outcome."""
    return yes if holds else no
