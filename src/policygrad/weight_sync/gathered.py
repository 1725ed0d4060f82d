"""Weights of which no process has the whole: each tensor is gathered when it is asked for, and is then only the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Gathered(Mapping[str, Tensor]):
    """Tensors by name. Names, types and shapes are known without gathering; the tensors are gathered anew whenever asked for."""

    likes: Mapping[str, Tensor]
    """On the meta device."""
    gather: Callable[[str], Tensor] = field(repr=False)
    """May raise PassedError."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.likes:
            raise KeyError(name)
        return self.gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.likes)

    def __len__(self) -> int:
        return len(self.likes)


def likes(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Of the same shapes and types, in the same order; nothing is gathered."""
    return tensors.likes if isinstance(tensors, Gathered) else tensors


def with_another(tensors: Mapping[str, Tensor], name: str, other: str) -> Mapping[str, Tensor]:
    """One more name, at the end, for the tensor of another; as they are where they have it."""
    if name in tensors:
        return tensors
    if not isinstance(tensors, Gathered):
        return {**tensors, name: tensors[other]}
    gather = tensors.gather
    return Gathered({**tensors.likes, name: tensors.likes[other]}, lambda n: gather(other if n == name else n))
