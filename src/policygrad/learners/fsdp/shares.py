"""Which box of a tensor a process holds: what it writes of a checkpoint, and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from policygrad.errors import ConfigError

Read = Callable[[tuple[Sequence[int], Sequence[int]] | None], Tensor]
"""A box (offset, size) of a tensor, or all of it."""


def part_of(x: Tensor, first: bool) -> tuple[tuple[int, ...], Tensor] | None:
    """(where it begins, its numbers) of the part that this process is to write; None where it has none, or another writes the same.
    first: whether this is rank 0, which writes what is not spread.

    Raises:
        ConfigError: a tensor that is spread in strides, of which no process has a box.
    """
    if not isinstance(x, DTensor):
        return ((0,) * x.ndim, x) if first else None
    if odd := [p for p in x.placements if type(p) not in (Shard, Replicate)]:
        raise ConfigError(f"a tensor that is spread as {odd[0]} cannot be saved: let the processes shard its rows")
    where: Sequence[int] = x.device_mesh.get_coordinate() or ()
    if any(isinstance(p, Replicate) and at for p, at in zip(x.placements, where, strict=True)):
        return None
    local = x.to_local()
    if not local.numel() and any(where):
        return None
    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(int(i) for i in offset), local


def share_of(like: Tensor, read: Read, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """A tensor of this shape, spread by its rows, of which this process reads no more than its own."""
    placements = [Shard(0)]
    size, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    local = read((offset, size)).to(device)
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=stride)
