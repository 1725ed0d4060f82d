"""Tensors in pieces: each process writes what it holds of them into a file of its own, and reads no more than it needs.

The files are in the format of safetensors, https://github.com/huggingface/safetensors#format: the header's length in 8 bytes, the
header in JSON, the numbers. They are written here, in one pass that also takes the sha256 and leaves other threads their turn;
safetensors reads them. The checkpoint's `state.json` says under `spread` which box of which tensor is in which file.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from policygrad.checkpoint.manifest import shard_name
from policygrad.errors import CheckpointError

TENSORS_FILE = "tensors.safetensors"
"""What one process has written for all: whole tensors."""
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
"""safetensors' names."""
_DTYPE_NAMES = {kind: name for name, kind in DTYPES.items()}


@dataclass(frozen=True)
class TensorShard:
    """A box of a tensor, all of it or a part."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where in it the box begins."""
    data: Tensor
    """On the CPU, contiguous."""


@dataclass(frozen=True)
class ShardFile:
    """What one process has written, as plain values."""

    entry: Mapping[str, int | str]
    """The file's size and sha256, as a manifest has them."""
    pieces: Mapping[str, Sequence[Any]]
    """By tensor: its kind, its shape, the box's offset and size."""


def write_shard_file(path: Path, shards: Mapping[str, TensorShard]) -> ShardFile:
    """The file, new and on the disk. Raises OSError; CheckpointError for a kind of numbers that has no name."""
    if odd := [name for name, piece in shards.items() if piece.data.dtype not in _DTYPE_NAMES]:
        raise CheckpointError(f"tensor {odd[0]!r} is {shards[odd[0]].data.dtype}: convert it first")
    order = sorted(shards, key=lambda name: (-shards[name].data.itemsize, name))  # so that each stays aligned
    header, position = dict[str, Any](), 0
    for name in order:
        numbers = shards[name].data
        ends = [position, position := position + numbers.nbytes]
        header[name] = {"dtype": _DTYPE_NAMES[numbers.dtype], "shape": list(numbers.shape), "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sha256 = hashlib.sha256()
    with path.open("xb") as file:
        for part in chain((struct.pack("<Q", len(text)), text), (_bytes(shards[name].data) for name in order)):
            file.write(part)
            sha256.update(part)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    described = {
        name: [_DTYPE_NAMES[piece.data.dtype], list(piece.shape), list(piece.offset), list(piece.data.shape)]
        for name, piece in shards.items()
    }
    return ShardFile({"bytes": size, "sha256": sha256.hexdigest()}, described)


def _bytes(x: Tensor) -> Any:
    """A tensor's own memory."""
    return x.reshape(-1).view(torch.uint8).numpy().data if x.numel() else b""


def build_shard_index(shares: Iterable[ShardFile]) -> dict[str, Any]:
    """For `state.json`: of every tensor its kind, its shape, and [file, offset, size] of each piece.

    Raises:
        CheckpointError: pieces that do not make the whole of a tensor.
    """
    index: dict[str, Any] = {}
    for number, share in enumerate(shares):
        for name, (kind, shape, offset, size) in share.pieces.items():
            entry = index.setdefault(name, {"kind": kind, "shape": shape, "pieces": []})
            if (entry["kind"], entry["shape"]) != (kind, shape):
                raise CheckpointError(f"the processes do not agree on what {name!r} is")
            entry["pieces"].append([number, offset, size])
    for name, entry in index.items():
        _check_entry(name, entry)
    return index


def _check_entry(name: str, entry: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless the boxes lie within the tensor, one to a file, apart, and are as many numbers as it."""
    shape, files = entry["shape"], [number for number, _, _ in entry["pieces"]]
    fits = all(
        len(offset) == len(size) == len(shape)
        and all(a >= 0 and n >= 0 and a + n <= complete for a, n, complete in zip(offset, size, shape, strict=True))
        for _, offset, size in entry["pieces"]
    )
    boxes = [(offset, size) for _, offset, size in entry["pieces"]]
    complete = fits and sum(prod(size) for _, size in boxes) == prod(shape)
    if not complete or len(set(files)) != len(files) or not _are_disjoint(boxes):
        raise CheckpointError(f"the pieces of {name!r} do not make the whole of it")


def _are_disjoint(boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether no two boxes (offset, size) share a number. In the order of their first axis, so that rows are each compared once."""
    ordered = sorted(boxes)
    for i, (offset, size) in enumerate(ordered):
        for other in islice(ordered, i + 1, None):
            if offset and other[0][0] >= offset[0] + size[0]:
                break
            if _intersect((offset, size), other):
                return False
    return True


class ShardedTensors:
    """The tensors in a checkpoint's folder, as long as the context lasts: whole or in pieces, of which any box can be read."""

    def __init__(self, folder: Path, record: Mapping[str, Any], shares: int) -> None:
        """record: what `state.json` says. shares: how many processes have written one.

        Raises:
            CheckpointError: an index that cannot be; OSError, SafetensorError for a file that is none.
        """
        self._folder, self._aliases = folder, record["aliases"]
        self._stack, self._files = ExitStack(), dict[str, Any]()
        self.unsharded = set(self._file(TENSORS_FILE).keys())
        """The names in TENSORS."""
        self._spread: dict[str, Any] = record.get("spread", {})
        for name, entry in self._spread.items():
            _check_entry(name, entry)
            if any(number not in range(shares) for number, _, _ in entry["pieces"]):
                raise CheckpointError(f"{folder} has fewer shares than {name!r} has pieces in")
        if both := self.unsharded & self._spread.keys():
            raise CheckpointError(f"{folder} has {min(both)!r} twice, whole and in pieces")

    @property
    def names(self) -> list[str]:
        """Of all tensors but those that are another by a second name."""
        return [*sorted(self.unsharded), *self._spread]

    def spec(self, name: str) -> Tensor:
        """Without its numbers: its shape and kind."""
        kind, shape, _ = self._entry(name)
        return torch.empty(shape, dtype=kind, device="meta")

    def read(self, name: str, box: tuple[Sequence[int], Sequence[int]] | None = None) -> Tensor:
        """A box (offset, size) of it, or all; on the CPU, in memory of its own.

        Raises:
            KeyError: no such tensor. CheckpointError: a file that holds another piece than the index says.
        """
        name = self._aliases.get(name, name)
        if box is None and name in self.unsharded:
            return self._read_shard(TENSORS_FILE, name).clone()
        kind, shape, pieces = self._entry(name)
        begin, size = ([0] * len(shape), shape) if box is None else box
        for file, _, extent in pieces:  # before there is memory for what may not be there
            stored = self._file(file).get_slice(name)
            if list(stored.get_shape()) != list(extent) or DTYPES.get(stored.get_dtype()) != kind:
                raise CheckpointError(f"{self._folder / file} holds another piece of {name!r} than state.json says")
        result = torch.zeros(tuple(size), dtype=kind)
        for file, at, extent in pieces:
            if common := _intersect((begin, size), (at, extent)):
                source, target = common
                result[target] = self._read_shard(file, name, source)
        return result

    def _entry(self, name: str) -> tuple[torch.dtype, list[int], list[tuple[str, Sequence[int], Sequence[int]]]]:
        """Its kind, its shape, and (file, offset, size) of each piece."""
        if name in self.unsharded:
            stored = self._file(TENSORS_FILE).get_slice(name)
            shape = list(stored.get_shape())
            return _dtype(stored.get_dtype(), name), shape, [(TENSORS_FILE, [0] * len(shape), shape)]
        entry = self._spread[name]
        pieces = [(shard_name(number), offset, size) for number, offset, size in entry["pieces"]]
        return _dtype(entry["kind"], name), entry["shape"], pieces

    def _read_shard(self, file: str, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Of what a file holds of the tensor, all or a part."""
        data: Tensor = self._file(file).get_slice(name)[part] if part else self._file(file).get_tensor(name)
        return data

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._stack.enter_context(safe_open(self._folder / name, framework="pt"))
        return self._files[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.clear()
        self._stack.close()


def _dtype(name: str, tensor: str) -> torch.dtype:
    if name not in DTYPES:
        raise CheckpointError(f"tensor {tensor!r} is of a kind, {name}, that cannot be read in pieces")
    return DTYPES[name]


def _intersect(
    box: tuple[Sequence[int], Sequence[int]], piece: tuple[Sequence[int], Sequence[int]]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two boxes (offset, size) of a tensor share, as slices of the piece and of the box; None where they share nothing."""
    in_shard, in_box = list[slice](), list[slice]()
    for a, n, b, m in zip(*box, *piece, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        in_shard.append(slice(low - b, high - b))
        in_box.append(slice(low - a, high - a))
    return tuple(in_shard), tuple(in_box)


# A state of which several processes hold a share each: how it is saved, and a checkpoint that is being written.

SavedState = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by name, and values that JSON can hold."""
P = TypeVar("P")


@dataclass(frozen=True)
class ShardedState(Generic[P]):
    """How a state is saved of which several processes hold a share each: nobody gathers it, and training goes on meanwhile."""

    pack: Callable[[P], SavedState]
    """What is not spread."""
    start_save: Callable[[Path], Callable[[], Sequence[ShardFile]]]
    """Each process copies its share, and writes the copy into the folder; what it returns waits until all have, and raises
    OSError or CheckpointError where one could not."""
    is_sharded: Callable[[str], bool]
    """Whether a tensor of a checkpoint is for the processes to read, by its name."""


class BackgroundSave:
    """A checkpoint that a thread finishes."""

    def __init__(self, step: int, finish: Callable[[], object]) -> None:
        self.step, self._finish = step, finish
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._finish()
        except BaseException as error:  # raised where it is waited for
            self._error = error

    @property
    def done(self) -> bool:
        """Whether nobody would have to wait."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is written. Raises what writing it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
