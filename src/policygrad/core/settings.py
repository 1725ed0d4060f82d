"""Settings of parts: dataclass fields that declare which values they take, which is checked when a part is built, and when they
act."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field, fields
from math import isfinite, isnan
from types import MappingProxyType
from typing import Any

from policygrad.errors import ConfigError

MAX_REPEATS = 10**6  # maximum epochs, minibatches or rounds per rollout: far above any sensible value
COUNT = f"at least 1 and at most {MAX_REPEATS:,}"
# What a number must be, in the words of the message. A number is finite, unless the field is unbounded; NaN is in no range.
RANGES: dict[str, Callable[[float], bool]] = {
    "": lambda x: True,
    COUNT: lambda x: 1 <= x <= MAX_REPEATS,
    "0 or 1": lambda x: x in (0, 1),
    "a finite number": isfinite,
    "a number": lambda x: not isnan(x),
    "above 0": lambda x: x > 0,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "at least 0": lambda x: x >= 0,
    "at least 1": lambda x: x >= 1,
    "at least 2": lambda x: x >= 2,
    "between 0 and 1": lambda x: 0 < x < 1,
    "above 1": lambda x: x > 1,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
}


def setting(default: Any, requirement: str, unit: str = "", *, hint: str = "", unbounded: bool = False) -> Any:
    """Declare a field whose value is in one of `RANGES`, or None if that is its default.

    Args:
        unit: completes the message, as `hint` does.
        unbounded: infinity is accepted, as "no bound".
    """
    is_in_range = RANGES[requirement]

    def holds(x: Any) -> bool:
        return default is None if x is None else is_in_range(x) and (unbounded or _is_finite(x))

    rule = (holds, f"{requirement} {unit}".strip(), hint)
    return field(default=default, metadata={"policygrad": rule, "unbounded": unbounded})


def choice(**meanings: str) -> Any:
    """Declare a field that takes one of these strings, by default the first; each has a meaning for the message, or ""."""
    names = tuple(meanings)
    *others, last = (f"{name!r} ({meaning})" if meaning else repr(name) for name, meaning in meanings.items())
    rule = (lambda x: x in names, f"{', '.join(others)} or {last}", "")
    return field(default=names[0], metadata={"policygrad": rule})


SET, ABOVE_0 = "set", "above 0"
"""Of a setting on which others depend: any value but None, False and (); a number above 0."""


def acts_with(declared: Any, **others: Any) -> Any:
    """Say of a field that it acts only where another setting of its part has a value, as in `mode="refill"`, or is `SET`."""
    declared.metadata = MappingProxyType({**declared.metadata, "acts_with": others})
    return declared


def find_settings_without_effect(part: Any) -> Iterator[tuple[str, str]]:
    """Yield (setting, why it has no effect beside the part's others), from what fields declare with `acts_with`."""
    for f in fields(part):
        for other, needed in f.metadata.get("acts_with", {}).items():
            value = getattr(part, other)
            if needed == SET and (value is None or value is False or value == ()):
                yield f.name, f"it needs {other}, which is {_format(value)}. Set {other}, or leave this out"
            elif needed == ABOVE_0 and not value > 0:
                yield f.name, f"it needs {other} above 0, which is {value}. Change it, or leave this out"
            elif needed not in (SET, ABOVE_0, value):
                yield f.name, f"it needs {other} = {needed}, which is {value}. Change it, or leave this out"


def _format(value: Any) -> str:
    return "not set" if value is None else "empty" if value == () else str(value)


def check_settings(part: Any) -> None:
    """Raise ConfigError for the first field of a dataclass whose value is not as `setting` or `choice` declares; NaN and infinity
    are no number of any field that does not say so."""
    for f in fields(part):
        value = getattr(part, f.name)
        if "policygrad" in f.metadata:
            holds, requirement, hint = f.metadata["policygrad"]
            is_silent = _is_finite(value) or "finite" in requirement or f.metadata.get("unbounded")
            finite = "" if is_silent else " and finite" if requirement else "a finite number"
            check_setting(part, f.name, holds(value), requirement + finite, hint)
        else:
            check_setting(part, f.name, _is_finite(value), "a number")


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or isfinite(value)


def check_setting(part: object, name: str, valid: bool, requirement: str, hint: str = "") -> None:
    """Raise ConfigError unless `valid`. The message names the part, the setting, the requirement, the value and the hint."""
    if not valid:
        reason = f": {hint}" if hint else ""
        raise ConfigError(f"{type(part).__name__}.{name} must be {requirement}, not {getattr(part, name)!r}{reason}")
