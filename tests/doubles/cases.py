"""Many cases of milliseconds in one test, whose failure still says which of them it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming(*case: object) -> Iterator[None]:
    """What is raised inside gets a note with the case's name."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case: {', '.join(map(str, case))}")
        raise
