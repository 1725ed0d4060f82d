"""From completions to what a model reads: a tree of tokens, in which whatever texts have in common at their beginning (a
prompt, its group's equal answers, an answer's first tokens) is computed once.

Every saving leaves the gradient exactly as it was: a completion sees its prompt and itself, never another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics
from policygrad.errors import DataError
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.tree_attention import AttentionTree, Ints

# What a model reads for some completions, each as a text of its own; a completion is several where its earlier tokens were
# written anew on the way (`Batch.positions`).


@dataclass(frozen=True, eq=False)
class TokenSequences:
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
    positions: Ints | None = None
    """[n, W] where each token of the text stands in the row, the prompt's from −P on; None = all of them follow each other."""

    @classmethod
    def of(cls, batch: Batch, rows: Tensor) -> TokenSequences:
        """Of those completions of `rows` that have a sampled token.

        Raises:
            DataError: a batch without tokens or prompts.
        """
        if batch.tokens is None or batch.prompts is None:
            raise DataError("a learner needs Batch.tokens and Batch.prompts (token ids); they are None")
        rows = rows[batch.mask[rows].any(1)]
        if batch.positions is not None:
            return cls._of_branches(batch, rows)
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
    def _of_branches(cls, batch: Batch, rows: Tensor) -> TokenSequences:
        """Where a completion may be several texts: one for each time that its depth falls back, if it predicts anything."""
        assert batch.tokens is not None
        assert batch.prompts is not None
        assert batch.positions is not None
        branches, positions, written = list[tuple[int, int, int, int]](), list[Ints](), list[Ints]()
        for row in rows.tolist():
            prompt = batch.prompts[int(batch.group[row])].numpy()
            tokens = np.concatenate([prompt, batch.tokens[row].numpy()])
            for first, end, places in _split_branches(
                batch.mask[row].numpy(), batch.positions[row].numpy(), len(prompt)
            ):
                branches.append((row, len(places) - end, first, end))
                positions.append(places[:-1])
                written.append(tokens[places[:-1] + len(prompt)])
        of, offsets, firsts, ends = np.array(branches, dtype=np.int64).reshape(-1, 4).T
        lengths = np.array([len(text) for text in positions], dtype=np.int64)
        places = np.zeros((len(positions), int(lengths.max(initial=0))), dtype=np.int64)
        ids = np.zeros(places.shape, dtype=">u4")
        for i, (text, row_positions) in enumerate(zip(written, positions, strict=True)):
            ids[i, : len(text)], places[i, : len(text)] = text + 1, row_positions
        return cls(of, ids, offsets, np.stack([firsts, ends], 1), lengths, places)

    def __getitem__(self, chosen: Ints | slice) -> TokenSequences:
        places = None if self.positions is None else self.positions[chosen]
        return TokenSequences(
            self.rows[chosen], self.ids[chosen], self.offsets[chosen], self.spans[chosen], self.lengths[chosen], places
        )

    @property
    def has_branches(self) -> bool:
        """Whether any completion is more than one of these."""
        return self.positions is not None and len(np.unique(self.rows)) < len(self.rows)

    @property
    def first_occurrence(self) -> Ints:
        """[n] the place among these of the first text of each one's completion."""
        if not self.has_branches:
            return np.arange(len(self.rows))
        _, first, number = np.unique(self.rows, return_index=True, return_inverse=True)
        return first[number.reshape(-1)].astype(np.int64)

    def sort(self) -> TokenSequences:
        """Texts that begin alike next to each other."""
        keys = np.ascontiguousarray(self.ids).view(f"S{4 * self.ids.shape[1]}").ravel()
        return self[np.argsort(keys, kind="stable")]

    def shared_prefix_lengths(self) -> Ints:
        """[n] how many tokens each has in common with the one before it."""
        same = np.zeros(len(self.rows), dtype=np.int64)
        if len(self.rows) > 1:
            equal = self.ids[1:] == self.ids[:-1]
            first = np.where(equal.all(1), equal.shape[1], equal.argmin(1))
            same[1:] = np.minimum(first, np.minimum(self.lengths[1:], self.lengths[:-1]))
        return same


def _split_branches(mask: NDArray[np.bool_], depth: Ints, prompt: int) -> Iterator[tuple[int, int, Ints]]:
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
    predicting_nodes: Tensor
    """[u] the nodes whose states predict a sampled token."""
    predicting_positions: Tensor
    """[u] where these stand first among the S·L places of `paths`."""
    predictor: Tensor
    """[b, T] which of the `reading` predicts the token; 0 off the mask."""
    tokens: Tensor
    """[b, T] the tokens predicted; 0 off the mask."""
    mask: Tensor
    """[b, T]."""
    tree: AttentionTree
    routes: Tensor | None = None
    """[N, layers, k] the experts that each node is sent to, -1 = the model's own choice; None = so everywhere."""

    @property
    def completions(self) -> int:
        """That are computed, equal ones once; of those on several texts an upper bound."""
        return min(len(self.rows), len(self.paths))

    def to(self, device: torch.device | str) -> Pack:
        tensors: dict[str, Any] = {f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None}
        return Pack(**{name: x.to(device) for name, x in tensors.items()})


def find_contributing(batch: Batch, psi: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
    """[B] bool; completions with a token that can move the weights: c·Ψ ≠ 0, or a term's coefficient ≠ 0."""
    policy, *terms = coefficients
    moves = (policy * psi != 0) & batch.mask
    for c in terms:
        moves = moves | ((c != 0) & batch.mask)
    return moves.any(1)


def micro_batch_tokens(config: LearnerConfig, model: nn.Module) -> int:
    """Tokens of a micro-batch of this model."""
    parameters = list(model.parameters())
    return config.resolve_micro_tokens(parameters[0].device, sum(p.numel() for p in parameters))


def pack_micro_batches(batch: Batch, rows: Tensor, budget: int, *, keep_groups: bool = False) -> Iterator[Pack]:
    """Micro-batches of at most `budget` nodes (or one completion) covering those completions `rows` that have a sampled token. No
    completion is split, also where it is several texts. whole: no group is either, whatever the budget.

    Raises:
        DataError: a batch without tokens or prompts.
    """
    texts = TokenSequences.of(batch, rows)
    if not len(texts.rows):
        return
    texts = texts.sort()
    branched, unit = texts.has_branches, batch.group.numpy()[texts.rows] if keep_groups else texts.first_occurrence
    if keep_groups or branched:
        order = np.argsort(unit, kind="stable")
        texts, unit = texts[order], unit[order]
    shared = texts.shared_prefix_lengths()
    fresh = texts.lengths - shared

    def laid_out(start: int, end: int) -> Pack:
        if not branched:
            return _layout_tree(batch, texts[start:end], shared[start:end])
        some = texts[start:end].sort()  # one completion's texts stood together, which is not where they share most
        return _layout_tree(batch, some, some.shared_prefix_lengths())

    begins = np.flatnonzero(np.diff(unit, prepend=-1))
    ends = np.append(begins[1:], len(unit))
    start, used = 0, 0
    for first, end in zip(begins.tolist(), ends.tolist(), strict=True):
        more = int(fresh[first:end].sum())
        if first > start and used + more > budget:
            yield laid_out(start, first)
            start, used, more = first, 0, more + int(shared[first])
        used += more
    yield laid_out(start, len(unit))


def _layout_tree(batch: Batch, texts: TokenSequences, shared: Ints) -> Pack:
    """The tree of texts in order."""
    assert batch.tokens is not None
    shared = np.concatenate([np.zeros(1, dtype=np.int64), shared[1:]])
    paths, new = _number_nodes(texts.lengths, shared)
    distinct_paths = paths[new]
    lengths, skip = texts.lengths[new], shared[new]
    depth = np.arange(paths.shape[1])
    is_new_node = (depth >= skip[:, None]) & (depth < lengths[:, None])
    ids, positions = (
        texts.ids[new][:, : is_new_node.shape[1]][is_new_node],
        np.nonzero(is_new_node)[1],
    )  # nodes are numbered in this order
    chosen, at = _locate_predictors(texts, paths, batch.mask.shape[1])
    rows = torch.from_numpy(chosen)
    mask, tokens = batch.mask[rows], batch.tokens[rows]
    reading, index = np.unique(at[mask.numpy()], return_inverse=True)
    predictor = torch.zeros(mask.shape, dtype=torch.int64)
    predictor[mask] = torch.from_numpy(index.reshape(-1))
    return Pack(
        rows=rows,
        ids=torch.from_numpy(ids.astype(np.int64) - 1),
        positions=torch.from_numpy(positions),
        paths=torch.from_numpy(distinct_paths),
        predicting_nodes=torch.from_numpy(reading),
        predicting_positions=torch.from_numpy(np.flatnonzero(is_new_node)[reading]),
        predictor=predictor,
        tokens=torch.where(mask, tokens, 0),
        mask=mask,
        tree=AttentionTree.of(distinct_paths, lengths, skip),
        routes=None if batch.routed_experts is None else _collect_routes(batch, texts, paths, len(ids)),
    )


def _locate_predictors(texts: TokenSequences, paths: Ints, width: int) -> tuple[Ints, Ints]:
    """([b] the completions, in the order in which their texts come first; [b, T] the node that predicts each of their tokens)."""
    t = np.arange(width)
    depth = np.clip(texts.offsets[:, None] - 1 + t, 0, texts.lengths[:, None] - 1)
    at = np.take_along_axis(paths, depth, 1)
    if not texts.has_branches:
        return texts.rows, at
    first, number = np.unique(texts.first_occurrence, return_inverse=True)
    text, token = np.nonzero((t >= texts.spans[:, :1]) & (t < texts.spans[:, 1:]))
    joined = np.zeros((len(first), width), dtype=np.int64)
    joined[number.reshape(-1)[text], token] = at[text, token]
    return texts.rows[first], joined


def _number_nodes(lengths: Ints, shared: Ints) -> tuple[Ints, Ints]:
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


def _collect_routes(batch: Batch, texts: TokenSequences, paths: Ints, nodes: int) -> Tensor:
    """[N, layers, k] where the sampler sent each node: the first text's choice stands for all that share it."""
    assert batch.routed_experts is not None
    routes = batch.routed_experts.new_full((nodes, *batch.routed_experts.shape[2:]), -1)
    for i in reversed(range(len(texts.rows))):
        row, length = int(texts.rows[i]), int(texts.lengths[i])
        prompt = batch.prompt_routed_experts[int(batch.group[row])]
        where = (
            torch.arange(length)
            if texts.positions is None
            else torch.from_numpy(texts.positions[i, :length]) + len(prompt)
        )
        routes[torch.from_numpy(paths[i, :length])] = torch.cat([prompt, batch.routed_experts[row]])[where]
    return routes


# How processes that learn together divide an update's micro-batches: alone, there is nothing to divide.

T = TypeVar("T")
"""A micro-batch of whatever kind."""


def count_nodes(part: Pack) -> int:
    """Tokens that are computed."""
    return len(part.ids)


class WorkDivision:
    """One process, which does all."""

    def divide(
        self,
        make_packs: Callable[[int], Iterator[T]],
        budget: int,
        dummy_pass: Callable[[Pack], object],
        tokens: Callable[[T], int] | None = None,
    ) -> Iterator[T]:
        """This process's share of the micro-batches that are `made` of at most `budget` tokens. idle: a pass that adds nothing, for
        where others have one more. tokens: of a micro-batch; None = the nodes of a `Pack`."""
        return make_packs(budget)

    def distribute(self, packs: Iterator[T], dummy_pass: Callable[[Pack], object]) -> Iterator[T]:
        """As `packs`, of micro-batches that must stay what they are."""
        return packs

    def all_reduce(self, x: Tensor) -> Tensor:
        """Σ over the processes of x, on the CPU; x may be written over."""
        return x

    def reduce_metrics(self, metrics: Metrics) -> Metrics:
        """Of all shares, each metric by its own reduction."""
        return metrics

    def shard(self, network: nn.Module) -> nn.Module:
        """A network that trains beside the policy, of which each process holds a share."""
        return network
