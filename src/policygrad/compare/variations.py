"""A grid over options of train: one row of a comparison for each combination of values, named by what differs."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import product
from typing import NamedTuple

from policygrad.errors import ConfigError
from policygrad.utils.argv import merge_argv, split_outside_brackets

MAX_ROWS = 100
"""More rows than anybody reads in one table."""


class Variation(NamedTuple):
    """An option of train with the values to try."""

    option: str  # as a flag
    values: tuple[str, ...]


class VariedRow(NamedTuple):
    """A combination of values."""

    label: str
    argv: tuple[str, ...]


def parse_variation(text: str) -> Variation:
    """Parse `lr=1e-6,1e-5` or `algorithm.gate=Clip(low=0.1),OnPolicy`. Raises ConfigError for fewer than two values."""
    name, equals, values = text.partition("=")
    option = f"--{name.strip().lstrip('-').replace('_', '-')}"
    tried = tuple(split_outside_brackets(values)) if values.strip() else ()
    if not equals or not re.fullmatch(r"--[a-z][\w.-]*", option):
        raise ConfigError(f"--vary {text!r}: write an option of train and its values, as in lr=1e-6,1e-5")
    if len(tried) < 2 or not all(tried):
        raise ConfigError(f"--vary {text!r}: give {option} two values or more, joined by commas, as in lr=1e-6,1e-5")
    if len({*tried}) < len(tried):
        raise ConfigError(f"--vary {text!r}: give each value once")
    return Variation(option, tried)


def vary_row(argv: Sequence[str], texts: Sequence[str], switches: Collection[str]) -> list[VariedRow]:
    """Return a row for each combination of values, the last option's changing fastest.

    Args:
        argv: An algorithm and its options, which the values are added to, or replace.
        texts: Options of train with their values.
        switches: Flags that take no value; theirs are true and false.

    Raises:
        ConfigError: A text cannot be read, an option is there twice, or the combinations are too many.
    """
    variations = [parse_variation(text) for text in texts]
    options = [variation.option for variation in variations]
    if twice := [option for option in options if options.count(option) > 1]:
        raise ConfigError(f"--vary {twice[0]} is there twice: give all its values at once, {twice[0][2:]}=A,B,C")
    number = 1
    for variation in variations:
        number *= len(variation.values)
    if number > MAX_ROWS:
        raise ConfigError(f"--vary makes {number:,} rows, and a comparison has at most {MAX_ROWS}: give fewer values")
    names, rows = _name_options(options), list[VariedRow]()
    for values in product(*(variation.values for variation in variations)):
        pairs = list(zip(options, values, strict=True))
        added = [word for option, value in pairs for word in _write(option, value, switches)]
        label = "+".join(f"{names[option]}-{_clean(value)}" for option, value in pairs)
        same = sum(row.label == label or row.label.startswith(f"{label}.") for row in rows)
        rows.append(VariedRow(f"{label}.{same + 1}" if same else label, merge_argv(argv[:1], argv[1:], added)))
    return rows


def _name_options(options: Sequence[str]) -> dict[str, str]:
    """Return the shortest end of each option's name that no other has: high for --algorithm.gate.high."""
    names = dict[str, str]()
    for option in options:
        words = option[2:].split(".")
        others = [other[2:].split(".") for other in options if other != option]
        size = next((n for n in range(1, len(words) + 1) if all(o[-n:] != words[-n:] for o in others)), len(words))
        names[option] = ".".join(words[-size:])
    return names


def _write(option: str, value: str, switches: Collection[str]) -> tuple[str, ...]:
    if option not in switches:
        return (option, value)
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"--vary {option[2:]}: it is a switch, and its values are true and false, not {value!r}")
    return (option,) if value.lower() == "true" else ()


def _clean(value: str) -> str:
    """Return a value as a part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "-", value).strip("-") or "none"
