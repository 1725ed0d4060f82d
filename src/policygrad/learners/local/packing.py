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
from torch import Tensor, nn

from policygrad.core.batch import Batch
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.texts import Texts
from policygrad.learners.local.tree import Ints, Tree


@dataclass(frozen=True, eq=False)
class Pack:
    """One micro-batch: a tree of N nodes, each a token, with b completions of T positions on S distinct texts. A completion whose
    earlier tokens were written anew on the way is on several."""

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

    @property
    def completions(self) -> int:
        """That are computed, equal ones once; of those on several texts an upper bound."""
        return min(len(self.rows), len(self.paths))

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


def micro_tokens(config: LearnerConfig, model: nn.Module) -> int:
    """Tokens of a micro-batch of this model."""
    parameters = list(model.parameters())
    return config.tokens_at(parameters[0].device, sum(p.numel() for p in parameters))


def pack(batch: Batch, rows: Tensor, budget: int, *, whole: bool = False) -> Iterator[Pack]:
    """Micro-batches of at most `budget` nodes (or one completion) covering those completions `rows` that have a sampled token. No
    completion is split, also where it is several texts. whole: no group is either, whatever the budget.

    Raises:
        DataError: a batch without tokens or prompts.
    """
    texts = Texts.of(batch, rows)
    if not len(texts.rows):
        return
    texts = texts.in_order()
    several, unit = texts.several, batch.group.numpy()[texts.rows] if whole else texts.first_met
    if whole or several:
        order = np.argsort(unit, kind="stable")
        texts, unit = texts[order], unit[order]
    shared = texts.shared()
    fresh = texts.lengths - shared

    def laid_out(start: int, end: int) -> Pack:
        if not several:
            return _lay_out(batch, texts[start:end], shared[start:end])
        some = texts[start:end].in_order()  # one completion's texts stood together, which is not where they share most
        return _lay_out(batch, some, some.shared())

    begins = np.flatnonzero(np.diff(unit, prepend=-1))
    ends = np.append(begins[1:], len(unit))
    start, held = 0, 0
    for first, end in zip(begins.tolist(), ends.tolist(), strict=True):
        more = int(fresh[first:end].sum())
        if first > start and held + more > budget:
            yield laid_out(start, first)
            start, held, more = first, 0, more + int(shared[first])
        held += more
    yield laid_out(start, len(unit))


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
    chosen, at = _predictors(texts, paths, batch.mask.shape[1])
    rows = torch.from_numpy(chosen)
    mask, tokens = batch.mask[rows], batch.tokens[rows]
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


def _predictors(texts: Texts, paths: Ints, width: int) -> tuple[Ints, Ints]:
    """([b] the completions, in the order in which their texts come first; [b, T] the node that predicts each of their tokens)."""
    t = np.arange(width)
    depth = np.clip(texts.offsets[:, None] - 1 + t, 0, texts.lengths[:, None] - 1)
    at = np.take_along_axis(paths, depth, 1)
    if not texts.several:
        return texts.rows, at
    first, number = np.unique(texts.first_met, return_inverse=True)
    text, token = np.nonzero((t >= texts.spans[:, :1]) & (t < texts.spans[:, 1:]))
    joined = np.zeros((len(first), width), dtype=np.int64)
    joined[number.reshape(-1)[text], token] = at[text, token]
    return texts.rows[first], joined


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
        row, length = int(texts.rows[i]), int(texts.lengths[i])
        prompt = batch.prompt_experts[int(batch.group[row])]
        where = (
            torch.arange(length) if texts.places is None else torch.from_numpy(texts.places[i, :length]) + len(prompt)
        )
        routes[torch.from_numpy(paths[i, :length])] = torch.cat([prompt, batch.experts[row]])[where]
    return routes
