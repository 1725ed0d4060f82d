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
