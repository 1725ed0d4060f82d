"""When a step is taken for a divergence, and what is done about it: data only."""

from __future__ import annotations

from dataclasses import dataclass

from policygrad.errors import ConfigError

ACTIONS = ("warn", "skip", "rollback", "stop")


@dataclass(frozen=True)
class Guard:
    """A step's entropy, KL and gradient norm are compared with the median of the steps before it."""

    action: str = "warn"
    """At a spike: warn; skip (undo the step's updates); rollback (to the last checkpoint, at a lower rate); stop, resumably."""
    window: int = 8
    """Steps that a step is compared with; with fewer behind it none is a spike."""
    grad_norm: float = 10.0
    """A gradient norm above so many times the median, and above 1, is a spike; 0 = none is."""
    kl: float = 10.0
    """Likewise a KL to the reference or to the old policy, above 0.1 nats."""
    entropy: float = 3.0
    """An entropy so many times above the median (and above 1 nat) or below it (from 0.3 nats) is a spike; 0 = none is."""
    lower: float = 0.5
    """A rollback multiplies the learning rate by this."""
    patience: int = 8
    """Steps in a row, undone or without any spread of rewards, that stop the run where the action is not warn; 0 = never."""

    def __post_init__(self) -> None:
        _check(self, "grad_norm", "kl", "entropy")


@dataclass(frozen=True)
class RowsGuard:
    """Of a training on rows with their answers: a step's loss and gradient norm are compared with the median of those before it."""

    action: str = "warn"
    """At a spike: warn; skip (undo the step); rollback (to the last checkpoint, at a lower rate); stop, resumably."""
    window: int = 8
    """Steps that a step is compared with; with fewer behind it none is a spike."""
    grad_norm: float = 10.0
    """A gradient norm above so many times the median, and above 1, is a spike; 0 = none is."""
    loss: float = 3.0
    """Likewise a loss, above 1 nat."""
    lower: float = 0.5
    """A rollback multiplies the learning rate by this."""
    patience: int = 8
    """Steps in a row, undone, that stop the run where the action is not warn; 0 = never."""

    def __post_init__(self) -> None:
        _check(self, "grad_norm", "loss")


def _check(guard: Guard | RowsGuard, *factors: str) -> None:
    """Raises ConfigError for what makes no sense."""
    if guard.action not in ACTIONS:
        raise ConfigError(f"guard.action must be one of {', '.join(ACTIONS)}, not {guard.action!r}")
    if guard.window < 2 or guard.patience < 0:
        raise ConfigError(
            "guard.window must be at least 2 and guard.patience at least 0 (0 = never), not "
            f"{guard.window}, {guard.patience}"
        )
    for name in factors:
        value = getattr(guard, name)
        if not (value == 0 or value > 1):
            raise ConfigError(f"guard.{name} must be above 1, or 0 to look away, not {value}")
    if not 0 < guard.lower < 1:
        raise ConfigError(f"guard.lower must be above 0 and below 1, not {guard.lower}")
