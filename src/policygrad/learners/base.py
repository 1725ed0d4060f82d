"""What owns the weights, in this process or in many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics
from policygrad.weight_sync.base import PublishedWeights


@runtime_checkable
class CloseableLearner(Protocol):
    """A learner that has something to end with the run: other processes."""

    def close(self) -> None:
        """Ends it."""
        ...


@runtime_checkable
class Learner(Protocol):
    """Owns the weights; `loop.py` is given one and never asks which."""

    @property
    def version(self) -> int:
        """How many updates made the weights."""
        ...

    def evaluate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Fills only the Batch fields that `needs` names: log-probabilities, values, score norms."""
        ...

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """Hands `algorithm.update_rule` a problem: one rollout's updates, with Ψ [B, T]."""
        ...

    def publish(self) -> PublishedWeights:
        """The weights a sampler should use next."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON values): all that a resumed run needs."""
        ...

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The state of a checkpoint."""
        ...
