"""A policy's weights in portions that servers take one by one, so that none holds the policy twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

BUCKET = 2**29
"""Bytes of a portion, unless one tensor has more."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some of the weights, in the order in which they are sent."""

    names: Sequence[str]
    tensors: Sequence[Tensor]
    last: bool
    """Whether the policy is whole with these."""

    @property
    def dtypes(self) -> list[str]:
        """As torch names them, without its own name."""
        return [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(tensor.shape) for tensor in self.tensors]


def buckets(tensors: Mapping[str, Tensor], most: int = BUCKET) -> Iterator[Bucket]:
    """Portions of at most `most` bytes, in the mapping's order; a larger tensor is one of its own."""
    names, size = list[str](), 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > most:
            yield Bucket(names, [tensors[n] for n in names], last=False)
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield Bucket(names, [tensors[n] for n in names], last=True)
