"""What a learner publishes and a sampler takes over: a policy's weights, with their version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from policygrad.errors import EngineError


class PassedError(EngineError):
    """Weights that were published and nobody has kept: the learner has gone on. They are there again with the next publication."""


@dataclass(frozen=True, eq=False)
class Published:
    """A policy's parameters by name, and how many updates made them."""

    version: int
    tensors: Mapping[str, Tensor]
    """In memory, or gathered one by one (`Gathered`)."""
    logits: Callable[[Tensor], Tensor] | None = None
    """From ids [b, L] to the policy's logits [b, L, V], where no process has it as a whole; None = any model with these tensors
    gives them. Raises PassedError."""
