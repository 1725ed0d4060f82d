"""How a run reads its data: the map it names, loaded."""

from __future__ import annotations

from typing import Any

from policygrad.errors import ConfigError
from policygrad.tasks.reading import Reading
from policygrad.training.config.own import load_own


def row_reading(map: Any, skip_bad_rows: bool, decontaminate: int = 0) -> Reading:
    """With a function, or the one that is so called.

    Raises:
        ConfigError: no such file or function, or what is none.
    """
    found = load_own(map, "--map") if isinstance(map, str) else map
    if found is not None and not callable(found):
        raise ConfigError(f"--map {map} is no function: give one that takes a row, a dict, and returns a row or None")
    return Reading(found, skip_bad_rows, decontaminate)
