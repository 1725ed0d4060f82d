"""How processes that learn together divide an update's micro-batches: alone, there is nothing to divide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import Tensor, nn

from policygrad.core.metrics import Metrics
from policygrad.learners.local.packing import Pack

T = TypeVar("T")
"""A micro-batch of whatever kind."""


def nodes(part: Pack) -> int:
    """Tokens that are computed."""
    return len(part.ids)


class Division:
    """One process, which does all."""

    def packs(
        self,
        made: Callable[[int], Iterator[T]],
        budget: int,
        idle: Callable[[Pack], object],
        tokens: Callable[[T], int] | None = None,
    ) -> Iterator[T]:
        """This process's share of the micro-batches that are `made` of at most `budget` tokens. idle: a pass that adds nothing, for
        where others have one more. tokens: of a micro-batch; None = the nodes of a `Pack`."""
        return made(budget)

    def dealt(self, packs: Iterator[T], idle: Callable[[Pack], object]) -> Iterator[T]:
        """As `packs`, of micro-batches that must stay what they are."""
        return packs

    def summed(self, x: Tensor) -> Tensor:
        """Σ over the processes of x, on the CPU; x may be written over."""
        return x

    def merged(self, metrics: Metrics) -> Metrics:
        """Of all shares, each metric by its own reduction."""
        return metrics

    def spread(self, network: nn.Module) -> nn.Module:
        """A network that trains beside the policy, of which each process holds a share."""
        return network
