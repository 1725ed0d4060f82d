"""How a run's rewards are computed, and when their failures end it: data only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from policygrad.errors import ConfigError
from policygrad.rewards.workers.limits import check_names, listed, size

Sandbox = Literal["none", "auto", "bubblewrap", "landlock"]
"""A wall around reward workers, by name; auto = the first that stands."""
NAMES: Any = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="NAME,NAME",
    instance_from_str=lambda words: listed(words[0]),
    is_instance=lambda value: isinstance(value, tuple) and all(isinstance(name, str) for name in value),
    str_from_instance=lambda value: [",".join(value) or "none"],
)
"""Names with commas between them, as one word of a command line."""


@dataclass(frozen=True)
class Isolation:
    """What a worker process that runs reward functions may take, and what it gets to see."""

    memory: str = "4GiB"
    """What a worker may take beyond what it has when it is loaded (4GiB, 500MB, none); on Linux. A reward model has no limit."""
    environment: Annotated[tuple[str, ...], NAMES] = ()
    """Environment variables that workers get besides the usual ones (docs/rewards-isolation.md), such as an API key's."""

    sandbox: Sandbox = "none"
    """A wall around workers: no network, few files to read, none to write (docs/rewards-isolation.md); not for a reward model."""

    show_output: bool = False
    """Let what reward functions print through to standard error; without it their last lines are shown where one fails."""

    def __post_init__(self) -> None:
        size(self.memory, "rewards.memory")
        check_names(self.environment, "rewards.environment")


@dataclass(frozen=True)
class Rewarding(Isolation):
    """How reward functions run: in worker processes that can be killed."""

    workers: int = 2
    """Worker processes."""
    budget: float = 10.0
    """Seconds per sample before its worker is killed and the sample fails."""
    failing: float = 0.5
    """A step is failing when more than this share of its samples has no reward."""
    patience: int = 3
    """Failing steps in a row that stop the run, resumably; a first step or evaluation with no reward at all does too. 0 = never."""

    def __post_init__(self) -> None:
        if self.workers < 1 or not 0 < self.budget < math.inf:
            raise ConfigError(
                f"rewards.workers must be at least 1 and rewards.budget above 0 and finite, not {self.workers}, {self.budget}"
            )
        if not 0 <= self.failing < 1 or self.patience < 0:
            raise ConfigError(
                "rewards.failing must be at least 0 and below 1 and rewards.patience at least 0 (0 = never), not "
                f"{self.failing}, {self.patience}"
            )
        super().__post_init__()
