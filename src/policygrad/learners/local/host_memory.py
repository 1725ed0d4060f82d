"""Keep an optimizer's tensors in the host's memory: while completions are sampled, or always but during their own step.

A tensor that is away stays the same object, of which the optimizer's state and the learner hold references: only its storage, of a
sharded one that of this process's shard, is empty. Its values are in a copy on the host, in pinned memory, so that moving them runs
at the link's speed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from policygrad.models.replica import local_tensor, redistribute_like


class HostMemory:
    """The copies of tensors that are away, and their buffers, which are used again."""

    def __init__(self) -> None:
        self._copies: dict[Tensor, Tensor] = {}  # of tensors that are away or have been
        self._away: set[Tensor] = set()

    @torch.no_grad()
    def move_out(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors, of sharded ones this process's part, to the host and free their own memory. Each must own its storage
        whole."""
        moved = [x for x in tensors if x not in self._away]
        for x in moved:
            own = local_tensor(x)
            if own.untyped_storage().nbytes() != own.nbytes:
                raise ValueError(f"a tensor of shape {list(own.shape)} shares its memory with others")
            if x not in self._copies:
                self._copies[x] = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
            self._copies[x].copy_(own, non_blocking=True)
        _wait_for_copies(moved)
        for x in moved:
            local_tensor(x).untyped_storage().resize_(0)
        self._away.update(moved)

    @torch.no_grad()
    def move_back(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Give those of the tensors that are away, or all that are (None), their memory and their values back."""
        returning = self._away & set(self._away if tensors is None else tensors)
        for x in returning:
            own = local_tensor(x)
            own.untyped_storage().resize_(self._copies[x].nbytes)
            own.copy_(self._copies[x], non_blocking=True)
        _wait_for_copies(returning)
        self._away -= returning

    def find(self, x: Tensor) -> Tensor:
        """Return where a tensor's values are: itself, or its copy if it is away. What is written there comes back with it. Of a
        sharded tensor on a GPU it is another copy there, as the processes' shards are on one kind of device."""
        return redistribute_like(self._copies[x], x) if x in self._away else x

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Drop the copies of tensors that nothing uses any more."""
        for x in tensors:
            self._copies.pop(x, None)
            self._away.discard(x)


def _wait_for_copies(tensors: Iterable[Tensor]) -> None:
    for device in {x.device for x in tensors if x.is_cuda}:
        torch.cuda.synchronize(device)
