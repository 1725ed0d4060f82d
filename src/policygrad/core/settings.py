"""Settings of parts: dataclass fields that declare which values they take, which is checked when a part is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from math import inf, isfinite
from typing import Any

from policygrad.errors import ConfigError

MAX_REPEATS = 10**6  # maximum epochs, minibatches or rounds per rollout: far above any sensible value
COUNT = f"at least 1 and at most {MAX_REPEATS:,}"
# What a number must be, in the words of the message. NaN is in no range.
RANGES: dict[str, Callable[[float], bool]] = {
    COUNT: lambda x: 1 <= x <= MAX_REPEATS,
    "0 or 1": lambda x: x in (0, 1),
    "a finite number": isfinite,
    "above 0": lambda x: x > 0,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "above 0 and finite": lambda x: 0 < x < inf,
    "at least 0": lambda x: x >= 0,  # and infinity, as 'no bound'
    "at least 0 and finite": lambda x: 0 <= x < inf,
    "at least 1": lambda x: x >= 1,
    "at least 2": lambda x: x >= 2,
    "between 0 and 1": lambda x: 0 < x < 1,
    "above 1": lambda x: x > 1,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
}


def setting(default: Any, requirement: str, unit: str = "", *, hint: str = "") -> Any:
    """Declare a field whose value is in one of `RANGES`, or None if that is its default; unit and hint complete the message."""
    holds = RANGES[requirement]
    rule = (lambda x: default is None if x is None else holds(x), f"{requirement} {unit}".rstrip(), hint)
    return field(default=default, metadata={"policygrad": rule})


def choice(**meanings: str) -> Any:
    """Declare a field that takes one of these strings, by default the first; each has a meaning for the message, or ""."""
    names = tuple(meanings)
    *others, last = (f"{name!r} ({meaning})" if meaning else repr(name) for name, meaning in meanings.items())
    rule = (lambda x: x in names, f"{', '.join(others)} or {last}", "")
    return field(default=names[0], metadata={"policygrad": rule})


def check_settings(part: Any) -> None:
    """Raise ConfigError for the first field of a dataclass whose value is not as `setting` or `choice` declares."""
    for f in fields(part):
        if "policygrad" in f.metadata:
            holds, requirement, hint = f.metadata["policygrad"]
            check_setting(part, f.name, holds(getattr(part, f.name)), requirement, hint)


def check_setting(part: object, name: str, valid: bool, requirement: str, hint: str = "") -> None:
    """Raise ConfigError unless `valid`. The message names the part, the setting, the requirement, the value and the hint."""
    if not valid:
        reason = f": {hint}" if hint else ""
        raise ConfigError(f"{type(part).__name__}.{name} must be {requirement}, not {getattr(part, name)!r}{reason}")
