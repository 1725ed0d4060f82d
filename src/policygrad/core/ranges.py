"""What a part's number may be: each refusal names the part, its field, the range and the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from policygrad.errors import ConfigError

MOST = 10**6
"""Epochs, minibatches or rounds of one rollout: thousands of times what anybody takes, and still an end."""


def not_negative(part: object, **values: float) -> None:
    """Raises ConfigError for a field below 0, or NaN; infinity bounds nothing, and is allowed."""
    _check(part, values, lambda x: x >= 0, "at least 0")


def positive(part: object, **values: float) -> None:
    """Raises ConfigError for a field that is not above 0, or not finite."""
    _check(part, values, lambda x: 0 < x < math.inf, "above 0 and finite")


def unit(part: object, **values: float) -> None:
    """Raises ConfigError for a field outside [0, 1]."""
    _check(part, values, lambda x: 0 <= x <= 1, "in [0, 1]")


def count(part: object, **values: int) -> None:
    """Raises ConfigError for a number of repetitions below 1, or beyond `MOST`."""
    _check(part, values, lambda x: x >= 1, "at least 1")
    _check(part, values, lambda x: x <= MOST, f"at most {MOST:,}")


def _check(part: object, values: Mapping[str, float], holds: Callable[[float], bool], said: str) -> None:
    for name, value in values.items():
        if not holds(value):
            raise ConfigError(f"{type(part).__name__}.{name} must be {said}, not {value}")
