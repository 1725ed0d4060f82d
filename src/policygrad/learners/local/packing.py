"""From completions to what a model reads: a tree of tokens, in which whatever texts have in common at their beginning (a
prompt, its group's equal answers, an answer's first tokens) is computed once.

Every saving leaves the gradient exactly as it was: a completion sees its prompt and itself, never another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from policygrad.core.batch import Batch
from policygrad.errors import DataError
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.tree import Ints, Tree


@dataclass(frozen=True, eq=False)
class Pack:
    """One micro-batch: a tree of N nodes, each a token, with b completions of T positions on S distinct texts."""

    rows: Tensor
    """[b] which completions of the batch."""
    ids: Tensor
    """[N] the nodes' tokens."""
    positions: Tensor
    """[N] how deep in their text."""
    paths: Tensor
    """[S, L] the node of every token of the distinct texts; the last one is repeated behind it."""
    reading: Tensor
    """[u] the nodes whose states predict a sampled token."""
    standing: Tensor
    """[u] where these stand first among the S·L places of `paths`."""
    predictor: Tensor
    """[b, T] which of the `reading` predicts the token; 0 off the mask."""
    tokens: Tensor
    """[b, T] the tokens predicted; 0 off the mask."""
    mask: Tensor
    """[b, T]."""
    tree: Tree
    routes: Tensor | None = None
    """[N, layers, k] the experts that each node is sent to, -1 = the model's own choice; None = so everywhere."""

    def to(self, device: torch.device | str) -> Pack:
        there: dict[str, Any] = {f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None}
        return Pack(**{name: x.to(device) for name, x in there.items()})


def active(batch: Batch, psi: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
    """[B] bool; completions with a token that can move the weights: c·Ψ ≠ 0, or a term's coefficient ≠ 0."""
    policy, *terms = coefficients
    moves = (policy * psi != 0) & batch.mask
    for c in terms:
        moves = moves | ((c != 0) & batch.mask)
    return moves.any(1)


@dataclass(frozen=True, eq=False)
class Texts:
    """What a model reads for some completions: each one's prompt, and its tokens up to the last but one that was sampled. Nothing
    is predicted after the last."""

    rows: Ints
    """[n] of the batch."""
    ids: NDArray[np.uint32]
    """[n, W] token ids plus 1, 0 behind the text: big-endian, so that the order of the bytes is that of the tokens."""
    prompts: Ints
    """[n] tokens of the prompt."""
    lengths: Ints
    """[n] tokens of the text."""

    @classmethod
    def of(cls, batch: Batch, rows: Tensor) -> Texts:
        """Of those completions of `rows` that have a sampled token.

        Raises:
            DataError: a batch without tokens or prompts.
        """
        if batch.tokens is None or batch.prompts is None:
            raise DataError("a learner needs Batch.tokens and Batch.prompts (token ids); they are None")
        rows = rows[batch.mask[rows].any(1)]
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
        return cls(rows.numpy(), ids, sizes, lengths)

    def __getitem__(self, chosen: Ints | slice) -> Texts:
        return Texts(self.rows[chosen], self.ids[chosen], self.prompts[chosen], self.lengths[chosen])

    def in_order(self, group: Ints | None = None) -> Texts:
        """Texts that begin alike next to each other; where `group` [n] is given, within groups."""
        words = np.ascontiguousarray(self.ids).view(f"S{4 * self.ids.shape[1]}").ravel()
        order = np.argsort(words, kind="stable")
        return self[order if group is None else order[np.argsort(group[order], kind="stable")]]

    def shared(self) -> Ints:
        """[n] how many tokens each has in common with the one before it."""
        same = np.zeros(len(self.rows), dtype=np.int64)
        if len(self.rows) > 1:
            equal = self.ids[1:] == self.ids[:-1]
            first = np.where(equal.all(1), equal.shape[1], equal.argmin(1))
            same[1:] = np.minimum(first, np.minimum(self.lengths[1:], self.lengths[:-1]))
        return same


def micro_tokens(config: LearnerConfig, model: nn.Module) -> int:
    """Tokens of a micro-batch of this model."""
    parameters = list(model.parameters())
    return config.tokens_at(parameters[0].device, sum(p.numel() for p in parameters))


def pack(batch: Batch, rows: Tensor, budget: int, *, whole: bool = False) -> Iterator[Pack]:
    """Micro-batches of at most `budget` nodes (or one text) covering those completions `rows` that have a sampled token. whole: no
    group is split, whatever the budget.

    Raises:
        DataError: a batch without tokens or prompts.
    """
    texts = Texts.of(batch, rows)
    if not len(texts.rows):
        return
    texts = texts.in_order(batch.group.numpy()[texts.rows] if whole else None)
    shared = texts.shared()
    group = batch.group.numpy()[texts.rows]
    fresh = texts.lengths - shared
    unit = np.flatnonzero(np.diff(group, prepend=-1)) if whole else np.arange(len(group))  # where a new unit begins
    ends = np.append(unit[1:], len(group))
    start, held = 0, 0
    for first, end in zip(unit.tolist(), ends.tolist(), strict=True):
        more = int(fresh[first:end].sum())
        if first > start and held + more > budget:
            yield _lay_out(batch, texts[start:first], shared[start:first])
            start, held, more = first, 0, more + int(shared[first])
        held += more
    yield _lay_out(batch, texts[start:], shared[start:])


def _lay_out(batch: Batch, texts: Texts, shared: Ints) -> Pack:
    """The tree of texts in order."""
    assert batch.tokens is not None
    shared = np.concatenate([np.zeros(1, dtype=np.int64), shared[1:]])
    paths, new = _paths(texts.lengths, shared)
    kept = paths[new]
    lengths, skip = texts.lengths[new], shared[new]
    depth = np.arange(paths.shape[1])
    own = (depth >= skip[:, None]) & (depth < lengths[:, None])
    ids, positions = texts.ids[new][:, : own.shape[1]][own], np.nonzero(own)[1]  # nodes are numbered in this order
    rows = torch.from_numpy(texts.rows)
    mask, tokens = batch.mask[rows], batch.tokens[rows]
    t = np.arange(mask.shape[1])
    at = np.take_along_axis(paths, np.minimum(texts.prompts[:, None] - 1 + t, texts.lengths[:, None] - 1), 1)
    reading, index = np.unique(at[mask.numpy()], return_inverse=True)
    predictor = torch.zeros(mask.shape, dtype=torch.int64)
    predictor[mask] = torch.from_numpy(index.reshape(-1))
    return Pack(
        rows=rows,
        ids=torch.from_numpy(ids.astype(np.int64) - 1),
        positions=torch.from_numpy(positions),
        paths=torch.from_numpy(kept),
        reading=torch.from_numpy(reading),
        standing=torch.from_numpy(np.flatnonzero(own)[reading]),
        predictor=predictor,
        tokens=torch.where(mask, tokens, 0),
        mask=mask,
        tree=Tree.of(kept, lengths, skip),
        routes=None if batch.experts is None else _routes(batch, texts, paths, len(ids)),
    )


def _paths(lengths: Ints, shared: Ints) -> tuple[Ints, Ints]:
    """([n, L] the node of every token, the last one repeated behind it; which of the n have a node of their own)."""
    paths = np.zeros((len(lengths), int(lengths.max())), dtype=np.int64)
    nodes = 0
    for i, (length, same) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        if same:
            paths[i, :same] = paths[i - 1, :same]
        paths[i, same:length] = np.arange(nodes, nodes + length - same)
        paths[i, length:] = paths[i, length - 1]
        nodes += length - same
    return paths, np.flatnonzero(lengths > shared)


def _routes(batch: Batch, texts: Texts, paths: Ints, nodes: int) -> Tensor:
    """[N, layers, k] where the sampler sent each node: the first text's choice stands for all that share it."""
    assert batch.experts is not None
    routes = batch.experts.new_full((nodes, *batch.experts.shape[2:]), -1)
    for i in reversed(range(len(texts.rows))):
        row, size, length = int(texts.rows[i]), int(texts.prompts[i]), int(texts.lengths[i])
        path = torch.from_numpy(paths[i, :length])
        routes[path[size:]] = batch.experts[row, : length - size]
        routes[path[:size]] = batch.prompt_experts[int(batch.group[row])]
    return routes
