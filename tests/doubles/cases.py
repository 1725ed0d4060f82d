"""Many cases of milliseconds in one test, whose failure still says which of them it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def naming(*case: object) -> Iterator[None]:
    """What is raised inside gets a note with the case's name."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case: {', '.join(map(str, case))}")
        raise


def keep_fast(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """The cases as pytest's parameters: those that are named, or the first one, in the fast tier, all others in the full one."""
    listed = list(cases)
    kept = fast or (listed[0],)
    assert all(case in listed for case in kept), f"{kept} are not all among {listed}"
    return [case if case in kept else pytest.param(case, marks=pytest.mark.full) for case in listed]
