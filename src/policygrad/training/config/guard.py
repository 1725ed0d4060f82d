"""Options of the guard against divergence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from policygrad.core.algorithm import Algorithm
from policygrad.core.base import format_steps
from policygrad.errors import ConfigError
from policygrad.utils.field_types import check_field_types, describe_idle, list_changed

GUARD_ACTIONS = ("warn", "skip", "rollback", "stop")


@dataclass(frozen=True)
class _GuardOptions:
    action: str = "warn"
    """On a spike: warn; skip (undo the step); rollback (to the last checkpoint, at a lower learning rate); stop, resumably."""
    window: int = 8
    """Number of steps that a step is compared with; before that many are done, nothing is a spike."""
    grad_norm: float = 10.0
    """Spike: a gradient norm above this many times the median, and above 1. 0 = never."""
    lr_factor: float = 0.5
    """A rollback multiplies the learning rate by this."""
    max_consecutive_alarms: int = 8
    """Stop after this many consecutive steps with a spike or with constant rewards, unless action is warn. 0 = never."""

    def __post_init__(self) -> None:
        check_field_types(self, "guard")
        if self.action not in GUARD_ACTIONS:
            raise ConfigError(f"guard.action must be one of {', '.join(GUARD_ACTIONS)}, not {self.action!r}")
        if self.window < 2 or self.max_consecutive_alarms < 0:
            raise ConfigError(
                "guard.window must be at least 2 and guard.max_consecutive_alarms at least 0 (0 = never), not "
                f"{self.window}, {self.max_consecutive_alarms}"
            )
        for name in ("grad_norm", "kl", "entropy", "loss"):
            value = getattr(self, name, 0)
            if not (value == 0 or value > 1):
                raise ConfigError(f"guard.{name} must be above 1, or 0 to ignore it, not {value}")
        if not 0 < self.lr_factor < 1:
            raise ConfigError(f"guard.lr_factor must be above 0 and below 1, not {self.lr_factor}")

    def find_idle(self, steps: int) -> Iterator[str]:
        """Yield options that can have no effect in a run of so many steps, each with a remedy."""
        if self.window >= steps and (changed := list_changed("guard", self, [f.name for f in fields(self)])):
            reason = (
                f"the guard compares a step with guard.window = {self.window} before it, and the run has {format_steps(steps)}. "
                "Set a smaller window (from 2), more --steps, or leave this out"
            )
            yield from describe_idle(changed, reason)
            return
        if self.action != "rollback":
            reason = f"guard.action is {self.action}. Set it to rollback, or leave this out"
            yield from describe_idle(list_changed("guard", self, ["lr_factor"]), reason)
        if self.action == "warn":
            reason = "guard.action is warn, which stops no run. Set it to skip, rollback or stop, or leave this out"
            yield from describe_idle(list_changed("guard", self, ["max_consecutive_alarms"]), reason)


@dataclass(frozen=True)
class GuardConfig(_GuardOptions):
    """Compare each step's entropy, KL and gradient norm with the median of the steps before it."""

    kl: float = 10.0
    """Spike: a KL to the reference or to the old policy above this many times the median, and above 0.1 nats. 0 = never."""
    entropy: float = 3.0
    """Spike: an entropy this many times above the median (and above 1 nat) or below it (from 0.3 nats). 0 = never."""

    def check(self, algorithm: Algorithm) -> None:
        """Raise ConfigError for an action that the algorithm's updates do not have."""
        if self.action == "rollback" and not algorithm.update_rule.uses_lr:
            raise ConfigError(
                f"guard.action=rollback lowers the learning rate, and {type(algorithm.update_rule).__name__} has none: use skip, "
                "stop or warn"
            )


@dataclass(frozen=True)
class SupervisedGuardConfig(_GuardOptions):
    """Compare each step's loss and gradient norm with the median of the steps before it."""

    loss: float = 3.0
    """Spike: a loss above this many times the median, and above 1 nat. 0 = never."""
