"""What is published where no process has the policy: its parameters, gathered one by one, and its logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from policygrad.learners.fsdp.learner import FsdpLearner
from policygrad.weight_sync.base import Published
from policygrad.weight_sync.gathered import Gathered


class At(Protocol):
    """Does something in every process, with weights of one version alone."""

    def __call__(self, version: int, method: Any, *args: Any) -> Any:
        """What it comes to here. Raises PassedError where the weights are others."""
        ...


def one_by_one(at: At, version: int, likes: Mapping[str, Tensor]) -> Published:
    """likes: the parameters on the meta device, as they are to be published."""

    def gather(name: str) -> Tensor:
        found: Tensor = at(version, FsdpLearner.gathered, name, likes[name].dtype)
        return found

    def logits(ids: Tensor) -> Tensor:
        found: Tensor = at(version, FsdpLearner.logits, ids)
        return found

    return Published(version, Gathered(likes, gather), logits)
