"""Which box of a tensor a process holds: what it writes of a checkpoint, and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from policygrad.errors import ConfigError

_SHARDS = (Shard, _StridedShard)  # the second is one of the first before torch 2.12, and no longer

Read = Callable[[tuple[Sequence[int], Sequence[int]] | None], Tensor]
"""A box (offset, size) of a tensor, or all of it."""


def part_of(x: Tensor, first: bool, counts: bool = True) -> tuple[tuple[int, ...], Tensor] | None:
    """(where it begins, its numbers) of what this process is to write; None: it has none, or another writes it.
    first: whether this is rank 0, which writes what is not spread. counts: whether this is the first of those that share matrices
    and all have the rest.

    Raises:
        ConfigError: a tensor that is spread in ways of which no process has a box.
    """
    if not isinstance(x, DTensor):
        return ((0,) * x.ndim, x) if first else None
    if odd := [p for p in x.placements if not isinstance(p, (*_SHARDS, Replicate))]:
        raise ConfigError(f"a tensor that is spread as {odd[0]} cannot be saved: let the processes shard its rows")
    where: Sequence[int] = x.device_mesh.get_coordinate() or ()
    if any(isinstance(p, Replicate) and at for p, at in zip(x.placements, where, strict=True)):
        return None
    local = x.to_local()
    if (not local.numel() and any(where)) or (x.device_mesh.ndim == 1 and not counts):
        return None
    return box_of(x)[0], local


def box_of(x: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, size) of this process's part. What `_StridedShard` cuts is cut after the rest: rows that tensor parallelism has
    dealt out already, which FSDP then deals out among those that have the same."""
    offset, size = [0] * x.ndim, list(x.shape)
    where: Sequence[int] = x.device_mesh.get_coordinate() or ()
    cuts = zip(x.placements, where, x.device_mesh.shape, strict=True)
    for p, at, count in sorted(cuts, key=lambda found: isinstance(found[0], _StridedShard)):
        if isinstance(p, _SHARDS):
            each = -(-size[p.dim] // count)
            begin = min(at * each, size[p.dim])
            offset[p.dim] += begin
            size[p.dim] = min(each, size[p.dim] - begin)
    return tuple(offset), tuple(size)


def part(whole: Tensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
    """A box of a tensor."""
    return whole[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))]


def share_as(kept: DTensor, like: Tensor, read: Read) -> Tensor:
    """A tensor of this shape, spread as a parameter is, of which this process reads no more than its own; by its rows where the
    shapes differ, which whoever takes it over then says."""
    if kept.shape != like.shape:
        return share_of(like, read, kept.device_mesh, kept.to_local().device)
    local = read(box_of(kept)).to(kept.to_local().device).contiguous()
    return DTensor.from_local(
        local, kept.device_mesh, kept.placements, run_check=False, shape=like.shape, stride=kept.stride()
    )


def share_of(like: Tensor, read: Read, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """A tensor of this shape, spread by its rows, of which this process reads no more than its own."""
    placements = [Shard(0)]
    size, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    local = read((offset, size)).to(device)
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=stride)
