"""A command's arguments by option, as they are written: no option needs to be known, and no value is parsed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest


def iter_options(argv: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (option, its arguments, the option first); "" for arguments before the first option."""
    starts = [i for i, word in enumerate(argv) if i == 0 or word.startswith("--")]
    for start, end in zip_longest(starts, starts[1:]):
        yield option_name(argv[start]), tuple(argv[start:end])


def option_name(word: str) -> str:
    """Return `--max-tokens` for `--max_tokens=5`; "" if it is not an option."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else ""


def option_names(argv: Sequence[str]) -> set[str]:
    """Return all options that are set."""
    return {option for option, _ in iter_options(argv) if option}


def option_values(argv: Sequence[str], option: str) -> list[str]:
    """Return all values given to an option."""
    given = [arguments for name, arguments in iter_options(argv) if name == option]
    return [value for x in given for value in (x[0].partition("=")[2], *x[1:]) if value]


def split_outside_brackets(text: str, separator: str = ",") -> list[str]:
    """Split a value, but not within brackets or quotes: what is joined may hold lists and calls. `1e+3` is one number."""
    parts, depth, quote, start = list[str](), 0, "", 0
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == separator and depth == 0 and not re.search(r"[\d.][eE]$", text[:i]):
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:])]


def merge_argv(*layers: Sequence[str]) -> tuple[str, ...]:
    """Merge argument lists: an option keeps its first place and takes its last values."""
    merged = {option: argv for layer in layers for option, argv in iter_options(layer)}
    return tuple(word for argv in merged.values() for word in argv)
