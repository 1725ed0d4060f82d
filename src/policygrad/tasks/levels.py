"""The number of an example of a task that has levels of difficulty says at which it is made."""

from __future__ import annotations

SPAN = 1 << 40
"""Examples of a level."""


def placed(index: int, level: int) -> int:
    """The number of a level's example with this index; of level 0, the index."""
    return level * SPAN + index


def of_place(place: int) -> tuple[int, int]:
    """(level, index) of an example's number."""
    return divmod(place, SPAN)
