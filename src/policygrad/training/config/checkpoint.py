"""Options of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from policygrad.core.base import format_steps
from policygrad.errors import ConfigError
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.optional_arg import optional_arg
from policygrad.utils.field_types import check_field_types, describe_idle, list_changed


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run's state is saved."""

    every: int = 25
    """Steps between checkpoints; one is always written at the end and at --stop-after."""
    keep: int = 2
    """Number of checkpoints kept on disk; those written by a stop are deleted first."""
    keep_best: Annotated[str | None, optional_arg("METRIC", "none")] = None
    """Keep the model with the best value of this evaluation metric, such as eval/reward, in RUN/best."""

    def __post_init__(self) -> None:
        check_field_types(self, "checkpoint")
        if self.every < 1 or self.keep < 1:
            raise ConfigError(
                f"checkpoint.every and checkpoint.keep must be at least 1, not {self.every} and {self.keep}"
            )
        if self.keep_best is not None and not self.keep_best.startswith("eval/"):
            raise ConfigError(
                f"checkpoint.keep_best names a metric of evaluations, such as eval/reward, not {self.keep_best!r}"
            )

    def find_idle(self, steps: int) -> Iterator[str]:
        """Yield options that can have no effect in a run of so many steps, each with a remedy."""
        if self.every >= steps:
            reason = f"the run has {format_steps(steps)}, and a checkpoint at its end in any case. Set it below {steps}"
            yield from describe_idle(list_changed("checkpoint", self, ["every"]), reason)

    def check(self, evaluation: EvaluationConfig) -> None:
        """Raise ConfigError for a best model that no evaluation would choose."""
        if self.keep_best and not evaluation.measures_during_training:
            raise ConfigError(
                f"checkpoint.keep_best={self.keep_best!r} compares evaluations during training, and this run has none: set "
                "evaluation.every (and evaluation.problems or benchmarks) above 0, or leave it out"
            )
