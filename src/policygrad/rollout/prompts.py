"""Which of the task's examples a step takes, and how a prompt is known when it comes again."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

from policygrad.tasks.rows import prompt_key
from policygrad.tasks.types import Example

ALL_SOLVED = "every prompt that came up rests, solved or too hard: they are sampled again"

PATIENCE = 64
"""Further prompts that are looked at, for tasks in which one stands more than once."""


def number(example: Example) -> int:
    """A prompt's own number in [0, 2^63): the same in every epoch and every run, whatever its place."""
    return int.from_bytes(sha256(prompt_key(example.prompt).encode()).digest()[:8], "big") >> 1


def upcoming(
    examples: Callable[[int], Example], count: int, position: int, resting: frozenset[int]
) -> tuple[list[tuple[int, Example]], bool]:
    """(`count` examples with their places, from `position` on, those that rest passed over; whether all of them rest).

    In an epoch each prompt comes once, so that even across the end of one no more than twice the resting prompts follow each
    other; a run longer than that, and by `PATIENCE`, means that there are no others, and from there on they are taken as they
    come.
    """
    found: list[tuple[int, Example]] = []
    run, all_rest = 0, False
    while len(found) < count:
        example = examples(position)
        if resting and not all_rest and number(example) in resting:
            run += 1
            all_rest = run > 2 * len(resting) + PATIENCE
        else:
            run = 0
            found.append((position, example))
        position += 1
    return found, all_rest
