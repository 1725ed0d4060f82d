"""The callback by which the program reports its progress."""

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int], None]
"""Called with what happens now, the number of results so far, and their total; an empty text clears it."""


def ignore_progress(text: str, done: int, total: int) -> None:
    """Report nothing."""
