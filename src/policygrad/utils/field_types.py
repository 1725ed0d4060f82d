"""The fields of a configuration: their types are checked where it is made in Python, and those that were changed are listed."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

from policygrad.errors import ConfigError

_KINDS: dict[Any, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "a text"),
    types.NoneType: (types.NoneType, "None"),
}


def check_field_types(config: Any, section: str = "") -> None:
    """Raise ConfigError for the first field whose value is of another type than declared; fields of any type are not checked.

    Args:
        config: A dataclass.
        section: Its name as an option, which messages put before the field's; "" = none.
    """
    kind: Any = type(config)
    for name, hint in _read_hints(kind).items():
        value = getattr(config, name)
        expected = _describe_mismatch(value, hint)
        if expected:
            option = f"{section}.{name}" if section else name
            raise ConfigError(f"{option} must be {expected}, not {value!r:.200} ({type(value).__name__})")


def list_changed(section: str, config: object, names: Iterable[str]) -> list[str]:
    """Return those of a section's options that have another value than the default, as `section.name = value`.

    Args:
        section: Its name as an option; "" = none.
    """
    usual = {f.name: f.default for f in fields(config)}  # type: ignore[arg-type]
    changed = {name: value for name in names if (value := getattr(config, name)) != usual[name]}
    texts = {name: " ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in changed.items()}
    return [f"{section}.{name} = {text}".lstrip(".") for name, text in texts.items()]


def describe_idle(settings: Sequence[str], reason: str) -> Iterator[str]:
    """Yield that these settings have no effect, and why, with a remedy; nothing if there are none."""
    if settings:
        listed = " and ".join(", ".join(settings).rsplit(", ", 1)) if len(settings) > 1 else settings[0]
        yield f"{listed} {'have' if len(settings) > 1 else 'has'} no effect: {reason}"


@functools.cache
def _read_hints(kind: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _describe_mismatch(value: Any, hint: Any) -> str:
    """Return what a value of this type would be; "" if the value is one."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [_describe_mismatch(value, option) for option in typing.get_args(hint)]
        return " or ".join(options) if all(options) else ""
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        if not isinstance(value, tuple | list):
            return f"a tuple, such as ({value!r:.60},)"
        if kinds[-1] is ...:
            return next(
                (f"a tuple of which each is {text}" for x in value if (text := _describe_mismatch(x, kinds[0]))), ""
            )
        is_like = len(value) == len(kinds) and not any(map(_describe_mismatch, value, kinds))
        return "" if is_like else f"a tuple of {len(kinds)}"
    if hint in _KINDS:
        kind, text = _KINDS[hint]
        return "" if isinstance(value, kind) and (hint is bool or not isinstance(value, bool)) else text
    if isinstance(hint, type) and is_dataclass(hint):
        return "" if isinstance(value, hint) else f"a policygrad.{hint.__name__}, such as {hint.__name__}()"
    return ""
