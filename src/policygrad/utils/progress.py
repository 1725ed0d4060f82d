"""How a program reports its progress: a callback that is given a text, how much is done, and of how much."""

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int], None]
"""Told what happens now, and how far it is: answers so far, of how many. "" = it is over."""


def ignore_progress(text: str, done: int, total: int) -> None:
    """Told, and says nothing."""
