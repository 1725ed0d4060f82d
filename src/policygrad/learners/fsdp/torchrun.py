"""The number of learning processes, torchrun's or the option's. Imports no torch."""

from __future__ import annotations

import os

from policygrad.errors import ConfigError

ONE_PROCESS_HINT = "train in one process (learner.world_size=1)"


def torchrun_rank() -> tuple[int, int] | None:
    """Return (rank, world size) under torchrun; None without torchrun or with a single process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return (rank, size) if size > 1 else None


def is_on_one_machine() -> bool:
    """Return whether torchrun has started all of its processes on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def resolve_world_size(requested: int) -> int:
    """Return torchrun's world size, or the requested one without torchrun. Raises ConfigError if they differ."""
    launched = torchrun_rank()
    if launched is None:
        return requested
    if requested not in (1, launched[1]):
        raise ConfigError(
            f"learner.world_size={requested} and torchrun has started {launched[1]} processes: set --learner.world-size "
            f"{launched[1]}, or let torchrun start {requested}"
        )
    return launched[1]


def check_not_torchrun(world_size: int) -> None:
    """Raise ConfigError if each of torchrun's processes would train by itself."""
    launched = torchrun_rank()
    if launched is not None and (world_size == 1 or launched[0] > 0):
        raise ConfigError(
            f"torchrun has started {launched[1]} processes, and each would train the full run: let torchrun start "
            "`-m policygrad train …`, or start one process and set learner.world_size, which starts the others"
        )
