"""A policy's weights in portions that servers take one by one, and files hold, so that nobody holds the policy twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from policygrad.weight_sync.gathered import likes

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


def portions(tensors: Mapping[str, Tensor], most: int = BUCKET) -> list[list[str]]:
    """Names, in the mapping's order, of tensors of at most `most` bytes together; a larger one is alone. Nothing is gathered."""
    found, size = [list[str]()], 0
    for name, tensor in likes(tensors).items():
        if found[-1] and size + tensor.nbytes > most:
            found.append([])
            size = 0
        found[-1].append(name)
        size += tensor.nbytes
    return found


def buckets(tensors: Mapping[str, Tensor], most: int = BUCKET) -> Iterator[Bucket]:
    """The portions, each gathered when its turn comes: whoever lets go of one before the next holds no more than one."""
    parts = portions(tensors, most)
    for i, names in enumerate(parts, 1):
        yield Bucket(names, [tensors[name] for name in names], last=i == len(parts))
