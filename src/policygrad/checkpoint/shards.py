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

from policygrad.checkpoint.manifest import share_name
from policygrad.errors import CheckpointError

TENSORS = "tensors.safetensors"
"""What one process has written for all: whole tensors."""
KINDS = {
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
_NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, all of it or a part."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where in it the box begins."""
    numbers: Tensor
    """On the CPU, contiguous."""


@dataclass(frozen=True)
class Share:
    """What one process has written, as plain values."""

    entry: Mapping[str, int | str]
    """The file's size and sha256, as a manifest has them."""
    pieces: Mapping[str, Sequence[Any]]
    """By tensor: its kind, its shape, the box's offset and size."""


def write(path: Path, pieces: Mapping[str, Piece]) -> Share:
    """The file, new and on the disk. Raises OSError; CheckpointError for a kind of numbers that has no name."""
    if odd := [name for name, piece in pieces.items() if piece.numbers.dtype not in _NAMES]:
        raise CheckpointError(f"tensor {odd[0]!r} is {pieces[odd[0]].numbers.dtype}: convert it first")
    order = sorted(pieces, key=lambda name: (-pieces[name].numbers.itemsize, name))  # so that each stays aligned
    header, position = dict[str, Any](), 0
    for name in order:
        numbers = pieces[name].numbers
        ends = [position, position := position + numbers.nbytes]
        header[name] = {"dtype": _NAMES[numbers.dtype], "shape": list(numbers.shape), "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sha256 = hashlib.sha256()
    with path.open("xb") as file:
        for part in chain((struct.pack("<Q", len(text)), text), (_bytes(pieces[name].numbers) for name in order)):
            file.write(part)
            sha256.update(part)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    told = {
        name: [_NAMES[piece.numbers.dtype], list(piece.shape), list(piece.offset), list(piece.numbers.shape)]
        for name, piece in pieces.items()
    }
    return Share({"bytes": size, "sha256": sha256.hexdigest()}, told)


def _bytes(x: Tensor) -> Any:
    """A tensor's own memory."""
    return x.reshape(-1).view(torch.uint8).numpy().data if x.numel() else b""


def index_of(shares: Iterable[Share]) -> dict[str, Any]:
    """For `state.json`: of every tensor its kind, its shape, and [file, offset, size] of each piece.

    Raises:
        CheckpointError: pieces that do not make the whole of a tensor.
    """
    found: dict[str, Any] = {}
    for number, share in enumerate(shares):
        for name, (kind, shape, offset, size) in share.pieces.items():
            entry = found.setdefault(name, {"kind": kind, "shape": shape, "pieces": []})
            if (entry["kind"], entry["shape"]) != (kind, shape):
                raise CheckpointError(f"the processes do not agree on what {name!r} is")
            entry["pieces"].append([number, offset, size])
    for name, entry in found.items():
        _check(name, entry)
    return found


def _check(name: str, entry: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless the boxes lie within the tensor, one to a file, apart, and are as many numbers as it."""
    shape, files = entry["shape"], [number for number, _, _ in entry["pieces"]]
    fits = all(
        len(offset) == len(size) == len(shape)
        and all(a >= 0 and n >= 0 and a + n <= whole for a, n, whole in zip(offset, size, shape, strict=True))
        for _, offset, size in entry["pieces"]
    )
    boxes = [(offset, size) for _, offset, size in entry["pieces"]]
    whole = fits and sum(prod(size) for _, size in boxes) == prod(shape)
    if not whole or len(set(files)) != len(files) or not _apart(boxes):
        raise CheckpointError(f"the pieces of {name!r} do not make the whole of it")


def _apart(boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether no two boxes (offset, size) share a number. In the order of their first axis, so that rows are each compared once."""
    ordered = sorted(boxes)
    for i, (offset, size) in enumerate(ordered):
        for other in islice(ordered, i + 1, None):
            if offset and other[0][0] >= offset[0] + size[0]:
                break
            if _overlap((offset, size), other):
                return False
    return True


class Pieces:
    """The tensors in a checkpoint's folder, as long as the context lasts: whole or in pieces, of which any box can be read."""

    def __init__(self, folder: Path, record: Mapping[str, Any], shares: int) -> None:
        """record: what `state.json` says. shares: how many processes have written one.

        Raises:
            CheckpointError: an index that cannot be; OSError, SafetensorError for a file that is none.
        """
        self._folder, self._aliases = folder, record["aliases"]
        self._stack, self._files = ExitStack(), dict[str, Any]()
        self.whole = set(self._file(TENSORS).keys())
        """The names in TENSORS."""
        self._spread: dict[str, Any] = record.get("spread", {})
        for name, entry in self._spread.items():
            _check(name, entry)
            if any(number not in range(shares) for number, _, _ in entry["pieces"]):
                raise CheckpointError(f"{folder} has fewer shares than {name!r} has pieces in")
        if both := self.whole & self._spread.keys():
            raise CheckpointError(f"{folder} has {min(both)!r} twice, whole and in pieces")

    @property
    def names(self) -> list[str]:
        """Of all tensors but those that are another by a second name."""
        return [*sorted(self.whole), *self._spread]

    def meta(self, name: str) -> Tensor:
        """Without its numbers: its shape and kind."""
        kind, shape, _ = self._entry(name)
        return torch.empty(shape, dtype=kind, device="meta")

    def read(self, name: str, box: tuple[Sequence[int], Sequence[int]] | None = None) -> Tensor:
        """A box (offset, size) of it, or all; on the CPU, in memory of its own.

        Raises:
            KeyError: no such tensor. CheckpointError: a file that holds another piece than the index says.
        """
        name = self._aliases.get(name, name)
        if box is None and name in self.whole:
            return self._piece(TENSORS, name).clone()
        kind, shape, pieces = self._entry(name)
        begin, size = ([0] * len(shape), shape) if box is None else box
        for file, _, extent in pieces:  # before there is memory for what may not be there
            held = self._file(file).get_slice(name)
            if list(held.get_shape()) != list(extent) or KINDS.get(held.get_dtype()) != kind:
                raise CheckpointError(f"{self._folder / file} holds another piece of {name!r} than state.json says")
        found = torch.zeros(tuple(size), dtype=kind)
        for file, at, extent in pieces:
            if common := _overlap((begin, size), (at, extent)):
                there, here = common
                found[here] = self._piece(file, name, there)
        return found

    def _entry(self, name: str) -> tuple[torch.dtype, list[int], list[tuple[str, Sequence[int], Sequence[int]]]]:
        """Its kind, its shape, and (file, offset, size) of each piece."""
        if name in self.whole:
            held = self._file(TENSORS).get_slice(name)
            shape = list(held.get_shape())
            return _dtype(held.get_dtype(), name), shape, [(TENSORS, [0] * len(shape), shape)]
        entry = self._spread[name]
        pieces = [(share_name(number), offset, size) for number, offset, size in entry["pieces"]]
        return _dtype(entry["kind"], name), entry["shape"], pieces

    def _piece(self, file: str, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Of what a file holds of the tensor, all or a part."""
        found: Tensor = self._file(file).get_slice(name)[part] if part else self._file(file).get_tensor(name)
        return found

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
    if name not in KINDS:
        raise CheckpointError(f"tensor {tensor!r} is of a kind, {name}, that cannot be read in pieces")
    return KINDS[name]


def _overlap(
    box: tuple[Sequence[int], Sequence[int]], piece: tuple[Sequence[int], Sequence[int]]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two boxes (offset, size) of a tensor share, as slices of the piece and of the box; None where they share nothing."""
    there, here = list[slice](), list[slice]()
    for a, n, b, m in zip(*box, *piece, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        there.append(slice(low - b, high - b))
        here.append(slice(low - a, high - a))
    return tuple(there), tuple(here)


# A state of which several processes hold a share each: how it is saved, and a checkpoint that is being written.

Saved = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by name, and values that JSON can hold."""
P = TypeVar("P")


@dataclass(frozen=True)
class Spread(Generic[P]):
    """How a state is saved of which several processes hold a share each: nobody gathers it, and training goes on meanwhile."""

    pack: Callable[[P], Saved]
    """What is not spread."""
    begin: Callable[[Path], Callable[[], Sequence[Share]]]
    """Each process copies its share, and writes the copy into the folder; what it returns waits until all have, and raises
    OSError or CheckpointError where one could not."""
    leave: Callable[[str], bool]
    """Whether a tensor of a checkpoint is for the processes to read, by its name."""


class Pending:
    """A checkpoint that a thread finishes."""

    def __init__(self, step: int, finish: Callable[[], object]) -> None:
        self.step, self._finish = step, finish
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._finish()
        except BaseException as error:  # raised where it is waited for
            self._raised = error

    @property
    def done(self) -> bool:
        """Whether nobody would have to wait."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is written. Raises what writing it raised."""
        self._thread.join()
        if self._raised is not None:
            raise self._raised
