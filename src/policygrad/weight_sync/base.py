"""What a learner publishes and a sampler takes over: a policy's weights, with their version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Published:
    """A policy's parameters by name, and how many updates made them."""

    version: int
    tensors: Mapping[str, Tensor]
