"""Numbers with their word."""

from __future__ import annotations


def counted(shown: object, words: str) -> str:
    """`1 second`, `1,200 seconds`: a number as it is shown, and what it counts, which is given in the plural."""
    return f"{shown} {words.removesuffix('s') if str(shown) == '1' else words}"
