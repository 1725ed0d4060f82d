"""Rewards that are handed over as functions: workers import the module they are in, and this one is imported in no time."""

from __future__ import annotations


def digits_first(prompts: object, completions: list[str], **columns: object) -> list[float]:
    """1 where a completion begins with a digit."""
    return [float(c[:1].isdigit()) for c in completions]


def shouted(prompts: object, completions: list[str], **columns: object) -> list[float]:
    """1 for what only a demonstration says here: a short answer with an exclamation mark at its end."""
    return [float(len(c) < 4 and c.endswith("!")) for c in completions]


def brief(prompts: object, completions: list[str], **columns: object) -> list[float]:
    """The fewer characters the better."""
    return [-float(len(c)) for c in completions]


def count_digits(prompts: object, completions: list[str], **columns: object) -> list[float]:
    """The number of digits, of one completion."""
    return [float(sum(c.isdigit() for c in completions[0]))]


def nothing_or_raise(prompts: object, completions: list[str], **columns: object) -> list[float | None]:
    """None, 1 or an exception by the length of one completion."""
    return [None if len(completions[0]) % 3 else 1 / (len(completions[0]) % 2)]
