"""Options of a run's rewards: how they are computed, and when their failures stop the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from policygrad.errors import ConfigError
from policygrad.rewards.workers.limits import SandboxChoice, parse_size
from policygrad.utils.child_environment import check_variable_names, parse_names
from policygrad.utils.field_types import check_field_types

# Names separated by commas, as one argument of a command line.
VARIABLE_NAMES: Any = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="NAME,NAME",
    instance_from_str=lambda args: parse_names(args[0]),
    is_instance=lambda value: isinstance(value, tuple) and all(isinstance(name, str) for name in value),
    str_from_instance=lambda value: [",".join(value) or "none"],
)


@dataclass(frozen=True)
class Isolation:
    """Limits of the worker processes that run reward functions, and what they can access."""

    memory: str = "4GiB"
    """Memory a worker may use beyond what it has after loading (4GiB, 500MB, none), on Linux. A reward model has no limit."""
    environment: Annotated[tuple[str, ...], VARIABLE_NAMES] = ()
    """Environment variables that workers get besides the default ones (docs/isolation.md), such as an API key."""

    sandbox: SandboxChoice = "none"
    """Sandbox around workers, except a reward model: no network, few readable files, none writable (docs/isolation.md)."""

    show_output: bool = False
    """Print what reward functions print to standard error. Otherwise only the last lines are shown, in messages of failures."""

    def __post_init__(self) -> None:
        parse_size(self.memory, "rewards.memory")
        check_variable_names(self.environment, "rewards.environment")


@dataclass(frozen=True)
class RewardConfig(Isolation):
    """Settings of the worker processes that run reward functions, and of when their failures stop the run."""

    num_workers: int = 2
    """Worker processes."""
    timeout: float = 10.0
    """Seconds per sample before its worker is killed and the sample fails."""
    max_failed_fraction: float = 0.5
    """A step fails when more than this fraction of its samples has no reward."""
    max_failed_steps: int = 3
    """Failed steps in a row that stop the run, resumably; a first step or evaluation without any reward does, too. 0 = never."""

    def __post_init__(self) -> None:
        check_field_types(self, "rewards")
        if self.num_workers < 1 or not 0 < self.timeout < math.inf:
            raise ConfigError(
                "rewards.num_workers must be at least 1 and rewards.timeout above 0 and finite, not "
                f"{self.num_workers}, {self.timeout}"
            )
        if not 0 <= self.max_failed_fraction < 1 or self.max_failed_steps < 0:
            raise ConfigError(
                "rewards.max_failed_fraction must be at least 0 and below 1 and rewards.max_failed_steps at least 0 (0 = never), "
                f"not {self.max_failed_fraction}, {self.max_failed_steps}"
            )
        super().__post_init__()
