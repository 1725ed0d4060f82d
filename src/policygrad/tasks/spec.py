"""The spelling of a mix: `gcd+2*chain_sum:min_terms=2,max_digits=1`."""

import ast
import math
import re
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.embedded import Component

_OPEN, _CLOSE, _QUOTES = "([{", ")]}", "'\""
_WEIGHT = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*\*")
_LITERALS = {"true": True, "false": False, "none": None}


def parse_mix(text: str) -> tuple[Component, ...]:
    """Read datasets joined by `+`, each `[weight*]name[:key=value,...]`. Raises DataError that quotes the bad part."""
    return tuple(_parse_component(part, text) for part in _split(text, "+"))


def _parse_component(part: str, whole: str) -> Component:
    weight, part = weighted(part, whole)
    name, colon, settings = part.partition(":")
    name = name.strip()
    if not name:
        raise DataError(f"task {whole!r}: a dataset's name is missing; write name[:key=value,...] joined by '+'")
    config: dict[str, Any] = {}
    for setting in _split(settings, ",") if colon else []:
        key, equals, value = setting.partition("=")
        if not (equals and key.strip() and value.strip()):
            raise DataError(
                f"task {whole!r}: {setting.strip()!r} is not key=value (as in chain_sum:max_digits=1,allow_negation=true)"
            )
        config[key.strip()] = _value(value.strip())
    return Component(name, weight, config)


def weighted(part: str, whole: str) -> tuple[float, str]:
    """(weight, the rest) of one part of a mix; 1 where none is said. Raises DataError for one that is not above 0."""
    found = _WEIGHT.match(part)
    if not found:
        return 1.0, part
    weight = float(found.group(1))
    if not (weight > 0 and math.isfinite(weight)):
        raise DataError(f"task {whole!r}: the weight {found.group(1)} must be positive; drop the dataset instead")
    return weight, part[found.end() :]


def _value(text: str) -> Any:
    """A Python literal (number, list, quoted text), true / false / none, or else the text itself."""
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _split(text: str, separator: str) -> list[str]:
    """Split outside of brackets and quotes, so that a value may be a list. `1e+3` is one number, not a mix."""
    parts, depth, quote, start = [], 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in _QUOTES:
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char == separator and depth == 0 and not re.search(r"[\d.][eE]$", text[:i]):
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]
