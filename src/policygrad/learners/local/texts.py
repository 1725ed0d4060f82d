"""What a model reads for some completions, each as a text of its own; a completion is several where its earlier tokens were
written anew on the way (`Batch.depth`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.errors import DataError
from policygrad.learners.local.tree import Ints


@dataclass(frozen=True, eq=False)
class Texts:
    """Each completion's prompt, and its tokens up to the last but one that was sampled in this text. Nothing is predicted after
    the last."""

    rows: Ints
    """[n] of the batch."""
    ids: NDArray[np.uint32]
    """[n, W] token ids plus 1, 0 behind the text: big-endian, so that the order of the bytes is that of the tokens."""
    offsets: Ints
    """[n] token t of the row stands at offset + t in the text: the prompt's length, where the row is one text."""
    spans: Ints
    """[n, 2] the tokens of the row, from the first up to the second, that this text and none other of the row predicts."""
    lengths: Ints
    """[n] tokens of the text."""
    places: Ints | None = None
    """[n, W] where each token of the text stands in the row, the prompt's from −P on; None = all of them follow each other."""

    @classmethod
    def of(cls, batch: Batch, rows: Tensor) -> Texts:
        """Of those completions of `rows` that have a sampled token.

        Raises:
            DataError: a batch without tokens or prompts.
        """
        if batch.tokens is None or batch.prompts is None:
            raise DataError("a learner needs Batch.tokens and Batch.prompts (token ids); they are None")
        rows = rows[batch.mask[rows].any(1)]
        if batch.depth is not None:
            return cls._several(batch, rows)
        groups = batch.group[rows].tolist()
        sizes = np.array([len(batch.prompts[g]) for g in groups], dtype=np.int64)
        mask = batch.mask[rows].numpy()
        extent = mask.shape[1] - mask[:, ::-1].argmax(1)
        lengths = sizes + extent - 1
        ids = np.zeros((len(rows), int(lengths.max(initial=0))), dtype=">u4")
        answers = batch.tokens[rows].numpy()
        for i, group in enumerate(groups):
            ids[i, : sizes[i]] = batch.prompts[group].numpy() + 1
            ids[i, sizes[i] : lengths[i]] = answers[i, : extent[i] - 1] + 1
        return cls(rows.numpy(), ids, sizes, np.stack([0 * extent, extent], 1), lengths)

    @classmethod
    def _several(cls, batch: Batch, rows: Tensor) -> Texts:
        """Where a completion may be several texts: one for each time that its depth falls back, if it predicts anything."""
        assert batch.tokens is not None
        assert batch.prompts is not None
        assert batch.depth is not None
        found, whole, written = list[tuple[int, int, int, int]](), list[Ints](), list[Ints]()
        for row in rows.tolist():
            prompt = batch.prompts[int(batch.group[row])].numpy()
            tokens = np.concatenate([prompt, batch.tokens[row].numpy()])
            for first, end, places in _branches(batch.mask[row].numpy(), batch.depth[row].numpy(), len(prompt)):
                found.append((row, len(places) - end, first, end))
                whole.append(places[:-1])
                written.append(tokens[places[:-1] + len(prompt)])
        of, offsets, firsts, ends = np.array(found, dtype=np.int64).reshape(-1, 4).T
        lengths = np.array([len(text) for text in whole], dtype=np.int64)
        places = np.zeros((len(whole), int(lengths.max(initial=0))), dtype=np.int64)
        ids = np.zeros(places.shape, dtype=">u4")
        for i, (text, there) in enumerate(zip(written, whole, strict=True)):
            ids[i, : len(text)], places[i, : len(text)] = text + 1, there
        return cls(of, ids, offsets, np.stack([firsts, ends], 1), lengths, places)

    def __getitem__(self, chosen: Ints | slice) -> Texts:
        places = None if self.places is None else self.places[chosen]
        return Texts(
            self.rows[chosen], self.ids[chosen], self.offsets[chosen], self.spans[chosen], self.lengths[chosen], places
        )

    @property
    def several(self) -> bool:
        """Whether any completion is more than one of these."""
        return self.places is not None and len(np.unique(self.rows)) < len(self.rows)

    @property
    def first_met(self) -> Ints:
        """[n] the place among these of the first text of each one's completion."""
        if not self.several:
            return np.arange(len(self.rows))
        _, first, number = np.unique(self.rows, return_index=True, return_inverse=True)
        return first[number.reshape(-1)].astype(np.int64)

    def in_order(self) -> Texts:
        """Texts that begin alike next to each other."""
        words = np.ascontiguousarray(self.ids).view(f"S{4 * self.ids.shape[1]}").ravel()
        return self[np.argsort(words, kind="stable")]

    def shared(self) -> Ints:
        """[n] how many tokens each has in common with the one before it."""
        same = np.zeros(len(self.rows), dtype=np.int64)
        if len(self.rows) > 1:
            equal = self.ids[1:] == self.ids[:-1]
            first = np.where(equal.all(1), equal.shape[1], equal.argmin(1))
            same[1:] = np.minimum(first, np.minimum(self.lengths[1:], self.lengths[:-1]))
        return same


def _branches(mask: NDArray[np.bool_], depth: Ints, prompt: int) -> Iterator[tuple[int, int, Ints]]:
    """(first, end, places) of each text of a row that predicts something: up to the last token that was sampled in it, the places
    of its tokens in the row, the prompt's from −P on. A text keeps of the one before it what its first token's depth says."""
    extent = len(mask) - int(mask[::-1].argmax())
    starts = [0, *(np.flatnonzero(np.diff(depth[:extent]) != 1) + 1).tolist()]
    places = np.arange(-prompt, 0)
    for first, end in zip(starts, [*starts[1:], extent], strict=True):
        places = np.concatenate([places[: depth[first]], np.arange(first, end)])
        if mask[first:end].any():
            spare = int(mask[first:end][::-1].argmax())
            yield first, end - spare, places[: len(places) - spare]
