"""Where each token begins in the text that several decode to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_PENDING = 8
"""Tokens that may wait for the rest of a character: one has four bytes at most."""


def find_offsets(decode: Callable[[list[int]], str], ids: Sequence[int]) -> tuple[int, ...]:
    """Return the characters of the text before each token, without those of a character that the token completes.

    Tokens are decoded with those before them: alone, some lose the blank that they begin with, or are a part of a character.
    """
    offsets, length = list[int](), 0
    context, settled = 0, 0  # tokens before those that are decoded, and before those whose text is not yet counted
    for end in range(1, len(ids) + 1):
        offsets.append(length)
        before, text = decode(list(ids[context:settled])), decode(list(ids[context:end]))
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or end - settled > MOST_PENDING:
            length += len(text) - len(before)
            context, settled = settled, end
    return tuple(offsets)
