"""Sharded tensors on disk: each process writes its part of a state to its own file, and reads no more than it needs.

A file has the safetensors format, https://github.com/huggingface/safetensors#format: the header's length in 8 bytes, the header in
JSON, the numbers. It is written here in one pass that also computes its sha256 and releases the interpreter lock for other threads;
safetensors reads it. The checkpoint's `state.json` records under `shards` which box of which tensor is in which file.

torch.distributed.checkpoint is not used: its metadata is a pickle, which a crafted checkpoint could abuse, and it has no checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from policygrad.checkpoint.manifest import TENSORS_FILE, shard_name
from policygrad.errors import CheckpointError

# By their names in safetensors.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Box = tuple[Sequence[int], Sequence[int]]  # (offset, size) of a part of a tensor


@dataclass(frozen=True)
class TensorShard:
    """A box of a tensor, possibly all of it."""

    shape: tuple[int, ...]  # shape of the full tensor
    offset: tuple[int, ...]  # first index of the box
    data: Tensor  # on the CPU, contiguous


@dataclass(frozen=True)
class ShardFile:
    """A file that one process has written, described by plain values."""

    entry: Mapping[str, int | str]  # size and sha256, as in a manifest
    tensors: Mapping[str, Sequence[Any]]  # by tensor: dtype, full shape, the box's offset and size


def write_shard_file(path: Path, shards: Mapping[str, TensorShard]) -> ShardFile:
    """Write a new file and sync it to disk. Raises OSError; CheckpointError for an unsupported dtype."""
    if unsupported := [name for name, shard in shards.items() if shard.data.dtype not in _DTYPE_NAMES]:
        raise CheckpointError(f"tensor {unsupported[0]!r} is {shards[unsupported[0]].data.dtype}: convert it first")
    order = sorted(shards, key=lambda name: (-shards[name].data.itemsize, name))  # keeps every tensor aligned
    header, position = dict[str, Any](), 0
    for name in order:
        data = shards[name].data
        ends = [position, position := position + data.nbytes]
        header[name] = {"dtype": _DTYPE_NAMES[data.dtype], "shape": list(data.shape), "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sha256 = hashlib.sha256()
    with path.open("xb") as file:

        def write(part: Any) -> None:
            file.write(part)
            sha256.update(part)

        write(struct.pack("<Q", len(text)))
        write(text)
        for name in order:
            data = shards[name].data
            write(data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else b"")
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    tensors = {
        name: [_DTYPE_NAMES[shard.data.dtype], list(shard.shape), list(shard.offset), list(shard.data.shape)]
        for name, shard in shards.items()
    }
    return ShardFile({"bytes": size, "sha256": sha256.hexdigest()}, tensors)


def build_shard_index(files: Iterable[ShardFile]) -> dict[str, Any]:
    """Return for `state.json` every tensor's dtype, shape, and [file, offset, size] of each shard. Raises
    CheckpointError if the shards do not make up a complete tensor."""
    index: dict[str, Any] = {}
    for number, file in enumerate(files):
        for name, (dtype, shape, offset, size) in file.tensors.items():
            entry = index.setdefault(name, {"dtype": dtype, "shape": shape, "shards": []})
            if (entry["dtype"], entry["shape"]) != (dtype, shape):
                raise CheckpointError(f"the processes disagree on the shape or dtype of {name!r}")
            entry["shards"].append([number, offset, size])
    for name, entry in index.items():
        _check_entry(name, entry)
    return index


def _check_entry(name: str, entry: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the boxes are inside the tensor, disjoint, one per file, and as large as the tensor."""
    shape, files = entry["shape"], [number for number, _, _ in entry["shards"]]
    boxes = sorted((offset, size) for _, offset, size in entry["shards"])
    complete = all(
        len(offset) == len(size) == len(shape)
        and all(a >= 0 and n >= 0 and a + n <= limit for a, n, limit in zip(offset, size, shape, strict=True))
        for offset, size in boxes
    )
    complete = complete and sum(prod(size) for _, size in boxes) == prod(shape) and len(set(files)) == len(files)
    for i, (offset, size) in enumerate(boxes if complete else ()):
        for other in islice(boxes, i + 1, None):
            if offset and other[0][0] >= offset[0] + size[0]:
                break  # the boxes are sorted by their first axis, so this is linear for shards of rows
            complete = complete and not _intersect((offset, size), other)
    if not complete:
        raise CheckpointError(f"the shards of {name!r} do not make up the complete tensor")


class ShardedTensors:
    """The tensors in a checkpoint's folder, complete or in shards, of which any box can be read; a context manager."""

    def __init__(self, folder: Path, record: Mapping[str, Any], num_files: int) -> None:
        """Open `num_files` shard files, with the contents of `state.json` as `record`. Raises CheckpointError for an
        invalid index; OSError, SafetensorError for an invalid file."""
        self._folder, self._aliases = folder, record["aliases"]
        self._stack, self._files = ExitStack(), dict[str, Any]()
        self.unsharded = set(self._file(TENSORS_FILE).keys())  # names of the tensors in TENSORS_FILE
        self._index: dict[str, Any] = record.get("shards", {})
        for name, entry in self._index.items():
            _check_entry(name, entry)
            if any(number not in range(num_files) for number, _, _ in entry["shards"]):
                raise CheckpointError(f"{folder} has fewer shard files than {name!r} refers to")
        if both := self.unsharded & self._index.keys():
            raise CheckpointError(f"{folder} has {min(both)!r} twice, complete and in shards")

    @property
    def names(self) -> list[str]:
        """Names of all tensors, without aliases."""
        return [*sorted(self.unsharded), *self._index]

    def spec(self, name: str) -> Tensor:
        """Return a tensor's shape and dtype, on the meta device."""
        dtype, shape, _ = self._entry(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Read a box of a tensor, or all of it, into new CPU memory. Raises KeyError for an unknown tensor;
        CheckpointError if a file contains another shard than the index says."""
        name = self._aliases.get(name, name)
        if box is None and name in self.unsharded:
            return self._file(TENSORS_FILE).get_tensor(name).clone()  # type: ignore[no-any-return]
        dtype, shape, shards = self._entry(name)
        begin, size = ([0] * len(shape), shape) if box is None else box
        for file, _, extent in shards:  # before allocating memory for what may not exist
            stored = self._file(file).get_slice(name)
            if list(stored.get_shape()) != list(extent) or DTYPES.get(stored.get_dtype()) != dtype:
                raise CheckpointError(f"{self._folder / file} contains another shard of {name!r} than state.json says")
        result = torch.zeros(tuple(size), dtype=dtype)
        for file, at, extent in shards:
            if common := _intersect((begin, size), (at, extent)):
                source, target = common
                tensors = self._file(file)
                result[target] = tensors.get_slice(name)[source] if source else tensors.get_tensor(name)
        return result

    def _entry(self, name: str) -> tuple[torch.dtype, list[int], list[tuple[str, Sequence[int], Sequence[int]]]]:
        """Return a tensor's dtype, its shape, and (file, offset, size) of each shard."""
        if name in self.unsharded:
            stored = self._file(TENSORS_FILE).get_slice(name)
            dtype_name, shape = stored.get_dtype(), list(stored.get_shape())
            shards: list[tuple[str, Sequence[int], Sequence[int]]] = [(TENSORS_FILE, [0] * len(shape), shape)]
        else:
            entry = self._index[name]
            dtype_name, shape = entry["dtype"], entry["shape"]
            shards = [(shard_name(number), offset, size) for number, offset, size in entry["shards"]]
        if dtype_name not in DTYPES:
            raise CheckpointError(f"tensor {name!r} has the dtype {dtype_name}, which cannot be read in shards")
        return DTYPES[dtype_name], shape, shards

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._stack.enter_context(safe_open(self._folder / name, framework="pt"))
        return self._files[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.clear()
        self._stack.close()


def _intersect(box: Box, shard: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the intersection of two boxes, as slices of the shard and of the box; None if it is empty."""
    in_shard, in_box = list[slice](), list[slice]()
    for a, n, b, m in zip(*box, *shard, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        in_shard.append(slice(low - b, high - b))
        in_box.append(slice(low - a, high - a))
    return tuple(in_shard), tuple(in_box)
