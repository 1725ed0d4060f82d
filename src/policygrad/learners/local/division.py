"""How processes that learn together divide an update's micro-batches: alone, there is nothing to divide."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from policygrad.core.metrics import Metrics
from policygrad.learners.local.packing import Pack


class Division:
    """One process, which does all."""

    def packs(
        self, made: Callable[[int], Iterator[Pack]], budget: int, idle: Callable[[Pack], object]
    ) -> Iterator[Pack]:
        """This process's share of the micro-batches that are `made` of at most `budget` tokens. idle: a pass that adds nothing, for
        where others have one more."""
        return made(budget)

    def dealt(self, packs: Iterator[Pack], idle: Callable[[Pack], object]) -> Iterator[Pack]:
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
