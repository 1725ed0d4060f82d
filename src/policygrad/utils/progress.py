"""The callback by which long operations report their progress. It stands below all rooms because rewards, samplers and training
report through it."""

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int], None]  # (description, done, total); an empty description ends the report


def ignore_progress(description: str, done: int, total: int) -> None:
    """Do nothing."""
