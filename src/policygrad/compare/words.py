"""Command-line words as layers: what a later layer says of an option replaces what an earlier one said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def options(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(option, its words with the option first) of words that begin with an option; "" for words before the first one."""
    held: list[str] = []
    for word in words:
        if word.startswith("--") and held:
            yield name(held[0]), tuple(held)
            held = []
        held.append(word)
    if held:
        yield name(held[0]), tuple(held)


def name(word: str) -> str:
    """`--max_tokens=5` -> `--max-tokens`; "" for a word that is no option."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else ""


def names(words: Sequence[str]) -> set[str]:
    """Every option that the words set."""
    return {option for option, _ in options(words) if option}


def values(words: Sequence[str], option: str) -> list[str]:
    """All that the words give an option, wherever they do."""
    given = [held for name_, held in options(words) if name_ == option]
    return [word for held in given for word in (held[0].partition("=")[2], *held[1:]) if word]


def layered(*layers: Sequence[str]) -> tuple[str, ...]:
    """All layers as one; an option stands where it was first named, with the last one's words."""
    found: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        for option, words in options(layer):
            found[option] = words
    return tuple(word for words in found.values() for word in words)
