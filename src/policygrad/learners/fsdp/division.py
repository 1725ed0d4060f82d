"""An update's micro-batches dealt out to processes, which take equally many: what one gathers and sums, all must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, merge
from policygrad.learners.fsdp.ranks import Ranks
from policygrad.learners.fsdp.sharding import shard
from policygrad.learners.local.division import Division, nodes
from policygrad.learners.local.packing import Pack, pack

T = TypeVar("T")
SLACK = 1.1
"""Tokens of a smaller micro-batch over the mean: none is ever quite full, and what two share is computed in both."""


@dataclass(frozen=True, eq=False)
class Dealt(Division):
    """All processes have the same batch, and each knows what the others do."""

    ranks: Ranks
    mesh: DeviceMesh
    narrow: torch.dtype | None
    """What a backbone computes in, where that is not what its weights are kept in."""
    tensor: int = 1
    """Neighbouring processes that compute the same."""

    def packs(
        self,
        made: Callable[[int], Iterator[T]],
        budget: int,
        idle: Callable[[Pack], object],
        tokens: Callable[[T], int] | None = None,
    ) -> Iterator[T]:
        """Smaller ones where that gives each process equally many."""
        count: Callable[[Any], int] = nodes if tokens is None else tokens
        return self.dealt(iter(_evened(made, budget, self.ranks.size // self.tensor, count)), idle)

    def dealt(self, packs: Iterator[T], idle: Callable[[Pack], object]) -> Iterator[T]:
        """As cards are dealt; then the passes for the sake of those that have one more."""
        rank, size, dealt = self.ranks.rank // self.tensor, self.ranks.size // self.tensor, list(packs)
        mine = dealt[rank::size]
        yield from mine
        for _ in range(-(-len(dealt) // size) - len(mine)):
            idle(_nothing())

    def summed(self, x: Tensor) -> Tensor:
        if self.ranks.rank % self.tensor:  # of those that compute the same one counts
            x.zero_()
        return self.ranks.summed(x)

    def merged(self, metrics: Metrics) -> Metrics:
        """In the order of the processes."""
        plain = {n: type(m)(*(float(getattr(m, f.name)) for f in fields(m))) for n, m in metrics.items()}
        return merge(*self.ranks.gathered(plain)[:: self.tensor])

    def spread(self, network: nn.Module) -> nn.Module:
        """A network that every process has built, with the numbers that rank 0 has drawn. A head alone stays in float32."""
        for p in network.parameters():
            p.data.copy_(self.ranks.given(p if self.ranks.rank == 0 else None, p, p.device))
        shard(network, self.mesh, self.narrow if hasattr(network, "backbone") else None)
        return network


def _evened(made: Callable[[int], Iterator[T]], budget: int, size: int, tokens: Callable[[T], int]) -> list[T]:
    """In as many turns as micro-batches of the budget take, but smaller ones where some would have none in the last turn."""
    packs = list(made(budget))
    places = -(-len(packs) // size) * size
    if len(packs) == places:
        return packs
    smaller = list(made(ceil(SLACK * sum(map(tokens, packs)) / places)))
    return smaller if len(smaller) <= places else packs


def _nothing() -> Pack:
    """The smallest micro-batch: one token after another."""
    one, token = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    batch = Batch(mask=token == 0, group=one, reward=torch.zeros(1), tokens=token, prompts=(one,))
    return next(pack(batch, one, 1))
