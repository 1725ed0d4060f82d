"""What a model reads beside token ids: pictures, as its processor prepared them. Only the model's adapter looks inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Media:
    """One picture of a text. In the text's ids, placeholder tokens stand for its parts."""

    slots: Tensor
    """[n] int64, n ≥ 1: the positions of its placeholder tokens, ascending, in the ids that it belongs to."""
    tensors: Mapping[str, Tensor]
    """Inputs of the model by name. Those of several pictures are joined along the first dimension."""
    digest: str
    """Equal for equal pictures under the same processor."""
    file: bytes = field(default=b"", repr=False)
    """The picture's file, for an engine that processes it itself; b"" once it is restored from a checkpoint."""

    def shift(self, offset: int) -> Media:
        """Return the same picture in a text that begins `offset` tokens earlier."""
        return replace(self, slots=self.slots + offset) if offset else self


TextMedia = tuple[Media, ...]
"""The pictures of one text, in their order."""


def select_media(media: TextMedia, start: int, end: int) -> TextMedia:
    """Return the pictures of the tokens from `start` to `end` of a text, with positions counted from `start`."""
    return tuple(m.shift(-start) for m in media if start <= int(m.slots[0]) and int(m.slots[-1]) < end)


def shift_media(media: TextMedia, offset: int) -> TextMedia:
    """Return the pictures of a text that is preceded by `offset` more tokens."""
    return tuple(m.shift(offset) for m in media)


def mark_slots(media: Iterable[Media], length: int) -> Tensor:
    """Return [length] bool, True at placeholder tokens that stand for a part of a picture."""
    marked = torch.zeros(length, dtype=torch.bool)
    for m in media:
        marked[m.slots] = True
    return marked


def join_media(media: Sequence[Media]) -> dict[str, Tensor]:
    """Return the model's inputs for pictures in this order.

    Inputs of different widths (pictures of other sizes) are padded with 0 behind, which processors mask.
    """
    joined = dict[str, Tensor]()
    for name in dict.fromkeys(name for m in media for name in m.tensors):
        parts = [m.tensors[name] for m in media]
        shapes = [part.shape[1:] for part in parts]
        if any(shape != shapes[0] for shape in shapes):
            largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
            parts = [_pad(part, largest) for part in parts]
        joined[name] = torch.cat(parts)
    return joined


def _pad(x: Tensor, sizes: Sequence[int]) -> Tensor:
    padded = x.new_zeros(len(x), *sizes)
    padded[(slice(None), *(slice(n) for n in x.shape[1:]))] = x
    return padded


def distinguish_media(ids: Tensor, media: TextMedia) -> Tensor:
    """Return ids [P] int64 in which each placeholder token has a negative number of its picture's own.

    Two texts have equal numbers exactly where they have equal tokens and equal pictures, so that prefixes can be compared.
    """
    if not media:
        return ids
    ids = ids.clone()
    for m in media:
        first = int(m.digest[:15], 16)  # 60 bits
        ids[m.slots] = -first - 1 - torch.arange(len(m.slots))
    return ids
