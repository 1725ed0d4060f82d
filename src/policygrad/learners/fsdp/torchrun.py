"""Whether torchrun has started this process as one of several."""

from __future__ import annotations

import os

from policygrad.errors import ConfigError


def launched() -> tuple[int, int] | None:
    """(which of the processes this is, how many there are); None where torchrun has started none, or one alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return (rank, size) if size > 1 else None


def ranks_of(asked: int) -> int:
    """The number of ranks: torchrun's where it has started several, else what was asked for.

    Raises:
        ConfigError: another number was asked for than torchrun has started.
    """
    found = launched()
    if found is None:
        return asked
    if asked not in (1, found[1]):
        raise ConfigError(
            f"torchrun has started {found[1]} processes, and learner.ranks is {asked}: say --learner.ranks {found[1]}, or let "
            f"torchrun start {asked}"
        )
    return found[1]


def check_alone(ranks: int) -> None:
    """Raises ConfigError where one of torchrun's processes would learn for itself, beside the others."""
    found = launched()
    if found is not None and (ranks == 1 or found[0] > 0):
        raise ConfigError(
            f"torchrun has started {found[1]} processes, and each would do the whole run: let torchrun start "
            "`-m policygrad train …`, or start one process and set learner.ranks, which starts the others"
        )
