"""Whether torchrun has started this process as one of several."""

from __future__ import annotations

import os

from policygrad.errors import ConfigError


def torchrun_rank() -> tuple[int, int] | None:
    """(which of the processes this is, how many there are); None where torchrun has started none, or one alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return (rank, size) if size > 1 else None


def resolve_world_size(requested: int) -> int:
    """The number of ranks: torchrun's where it has started several, else what was asked for.

    Raises:
        ConfigError: another number was asked for than torchrun has started.
    """
    launched = torchrun_rank()
    if launched is None:
        return requested
    if requested not in (1, launched[1]):
        raise ConfigError(
            f"torchrun has started {launched[1]} processes, and learner.world_size is {requested}: say --learner.world-size {launched[1]}, or let "
            f"torchrun start {requested}"
        )
    return launched[1]


def check_not_torchrun(world_size: int) -> None:
    """Raises ConfigError where one of torchrun's processes would learn for itself, beside the others."""
    launched = torchrun_rank()
    if launched is not None and (world_size == 1 or launched[0] > 0):
        raise ConfigError(
            f"torchrun has started {launched[1]} processes, and each would do the whole run: let torchrun start "
            "`-m policygrad train …`, or start one process and set learner.world_size, which starts the others"
        )
