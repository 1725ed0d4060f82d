"""How a run's rewards are computed, and when their failures end it: data only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from policygrad.errors import ConfigError
from policygrad.rewards.workers.limits import check_variable_names, parse_names, parse_size

SandboxChoice = Literal["none", "auto", "bubblewrap", "landlock"]
"""A wall around reward workers, by name; auto = the first that stands."""
VARIABLE_NAMES: Any = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="NAME,NAME",
    instance_from_str=lambda words: parse_names(words[0]),
    is_instance=lambda value: isinstance(value, tuple) and all(isinstance(name, str) for name in value),
    str_from_instance=lambda value: [",".join(value) or "none"],
)
"""Names with commas between them, as one word of a command line."""


@dataclass(frozen=True)
class Isolation:
    """What a worker process that runs reward functions may take, and what it gets to see."""

    memory: str = "4GiB"
    """What a worker may take beyond what it has when it is loaded (4GiB, 500MB, none); on Linux. A reward model has no limit."""
    environment: Annotated[tuple[str, ...], VARIABLE_NAMES] = ()
    """Environment variables that workers get besides the usual ones (docs/rewards-isolation.md), such as an API key's."""

    sandbox: SandboxChoice = "none"
    """A wall around workers: no network, few files to read, none to write (docs/rewards-isolation.md); not for a reward model."""

    show_output: bool = False
    """Let what reward functions print through to standard error; without it their last lines are shown where one fails."""

    def __post_init__(self) -> None:
        parse_size(self.memory, "rewards.memory")
        check_variable_names(self.environment, "rewards.environment")


@dataclass(frozen=True)
class RewardConfig(Isolation):
    """How reward functions run: in worker processes that can be killed."""

    num_workers: int = 2
    """Worker processes."""
    timeout: float = 10.0
    """Seconds per sample before its worker is killed and the sample fails."""
    max_failed_fraction: float = 0.5
    """A step is failing when more than this share of its samples has no reward."""
    max_failed_steps: int = 3
    """Failing steps in a row that stop the run, resumably; a first step or evaluation with no reward at all does too. 0 = never."""

    def __post_init__(self) -> None:
        if self.num_workers < 1 or not 0 < self.timeout < math.inf:
            raise ConfigError(
                f"rewards.num_workers must be at least 1 and rewards.timeout above 0 and finite, not {self.num_workers}, {self.timeout}"
            )
        if not 0 <= self.max_failed_fraction < 1 or self.max_failed_steps < 0:
            raise ConfigError(
                "rewards.max_failed_fraction must be at least 0 and below 1 and rewards.max_failed_steps at least 0 (0 = never), not "
                f"{self.max_failed_fraction}, {self.max_failed_steps}"
            )
        super().__post_init__()
