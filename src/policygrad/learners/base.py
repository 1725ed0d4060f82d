"""The interface of learners, which own the weights, in one process or in many, and their optional abilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.weight_sync.base import PublishedWeights

if TYPE_CHECKING:
    from policygrad.learners.fsdp.processes import WorkerGroup
    from policygrad.learners.fsdp.watchdog import ControlStore

T = TypeVar("T")


@dataclass(frozen=True)
class LearnerSpec:
    """What a learner trains a model with, whichever backend computes it."""

    algorithm: Algorithm
    lr: float | None
    """Peak learning rate; None if the update rule uses none."""
    steps: int
    """Rollouts of the run, for the learning-rate schedule."""
    temperature: float = 1.0
    """Temperature at which completions are sampled."""
    config: LearnerConfig = field(default_factory=LearnerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@runtime_checkable
class Learner(Protocol):
    """Owns and updates the policy's weights."""

    @property
    def version(self) -> int:
        """Number of updates that made the weights."""

    def evaluate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Fill the Batch fields named in `needs`: log-probabilities, values, score norms."""

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """Update the weights on one rollout, with Ψ [B, T], by the algorithm's update rule."""

    def publish(self) -> PublishedWeights:
        """Return the weights that a sampler should use next."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, JSON values): all that a resumed run needs."""

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint."""


# Optional abilities, which callers test for with isinstance.


@runtime_checkable
class CloseableLearner(Protocol):
    """A learner that holds something until the run ends, such as other processes."""

    def close(self) -> None:
        """Release it."""


@runtime_checkable
class ReferenceLearner(Protocol):
    """A learner that may hold a reference model."""

    @property
    def reference_parameters(self) -> int:
        """Parameters of the reference in memory beside the policy's; 0 without one."""


@runtime_checkable
class CheckedLearner(Protocol):
    """A learner that can tell an incomplete state from a complete one."""

    def check_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a checkpoint lacks a part of the state, before anything is restored."""


@runtime_checkable
class SnapshotLearner(Protocol):
    """A learner whose `state` is cheap: references to tensors of this process."""

    supports_snapshots: bool  # the trainer may copy the state after every step


@runtime_checkable
class CutsLongTexts(Protocol):
    """A learner that may read a text in several passes."""

    def cuts_long_texts(self) -> bool:
        """Return whether it does, with its model."""


@runtime_checkable
class DistributedLearner(Protocol):
    """A learner whose state is sharded over several processes, as seen in rank 0."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def replicates_policy(self) -> bool:
        """Every process has the full policy too, to sample with."""

    @property
    def state_values(self) -> dict[str, Any]:
        """The state's JSON values without its tensors."""

    @property
    def store(self) -> ControlStore:
        """A key-value store between the processes."""

    @property
    def failure_reason(self) -> str:
        """Why the processes can no longer work together; empty while they can."""

    def run_on_all(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of each process's learner and of `args` in every process; return this one's result."""

    def collective(self, operation: str) -> AbstractContextManager[WorkerGroup]:
        """Enclose an operation that all processes take part in."""
