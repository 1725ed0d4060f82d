"""Packs completions into micro-batches, each a tree of tokens in which common prefixes are computed once.

Texts share a prompt, equal completions of a group, or the first tokens of a completion. Sharing never changes the gradient: a
completion attends to its prompt and itself alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from policygrad.core.batch import Batch, SamplingMask, TopTokens
from policygrad.core.media import Media, TextMedia, select_media
from policygrad.core.metrics import Metrics
from policygrad.errors import DataError
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.segments import (
    LEAST_SEGMENT,
    PassPlan,
    PathSegment,
    StateSource,
    find_saving,
    find_sources,
    plan_passes,
)
from policygrad.learners.local.tree_attention import AttentionTree, Ints
from policygrad.utils.out_of_memory import MemoryBudget, is_out_of_memory

if TYPE_CHECKING:
    from policygrad.learners.local.path_reader import PathReaders

T = TypeVar("T")
CanFollow = Callable[[float], bool]
FIRST_SLOT = 2**31  # above any token id
MICRO_TOKENS_FLAG = "--learner.micro-tokens"


@dataclass(frozen=True, eq=False)
class TokenSequences:
    """The texts that a model reads: each is a prompt and a completion up to its last sampled token but one, which predicts the
    last.

    A completion whose earlier tokens were rewritten on the way (`Batch.positions`) is several texts.
    """

    rows: Ints  # [n] completion of the batch
    ids: NDArray[np.uint32]
    """[n, W] token ids plus 1, padded with 0; big-endian, so that the bytes sort like the tokens. A placeholder token has a number
    of its picture's own, from `FIRST_SLOT` on, so that texts share no prefix with another picture."""
    offsets: Ints  # [n] token t of the row is at offset + t in the text: the prompt's length if the row is one text
    spans: Ints  # [n, 2] first and end of the row's tokens that this text alone predicts
    lengths: Ints  # [n] number of tokens
    positions: Ints | None = None
    """[n, W] the row's token at each position of the text, the prompt's from −P on; None = consecutive."""
    media: NDArray[np.object_] | None = None
    """[n] `TextMedia` of each text; None = no pictures."""
    read_ids: NDArray[np.uint32] | None = None
    """[n, W] `ids` with the placeholder tokens that the model reads in place of pictures' numbers, with `media`."""

    @classmethod
    def of(cls, batch: Batch, rows: Tensor) -> TokenSequences:
        """Make the texts of those completions of `rows` that have a sampled token. Raises DataError if the batch has no tokens."""
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
        completions = batch.tokens[rows].numpy()
        for i, group in enumerate(groups):
            ids[i, : sizes[i]] = batch.prompts[group].numpy() + 1
            ids[i, sizes[i] : lengths[i]] = completions[i, : extent[i] - 1] + 1
        media = [batch.media_of(int(row)) for row in rows] if batch.has_media else []
        read = [select_media(m, 0, int(length)) for m, length in zip(media, lengths, strict=False)]
        return cls(rows.numpy(), ids, sizes, np.stack([0 * extent, extent], 1), lengths)._with_media(read)

    @classmethod
    def of_texts(cls, texts: Sequence[Tensor], media: Sequence[TextMedia] = ()) -> TokenSequences:
        """Make texts [P] whose every position predicts something: position t of row i predicts `Batch.tokens[i, t]`, which need
        not be the text's next token.

        Args:
            media: The pictures of each text; () = none has any.
        """
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        ids = np.zeros((len(texts), int(lengths.max(initial=0))), dtype=">u4")
        for i, text in enumerate(texts):
            ids[i, : len(text)] = text.numpy() + 1
        sequences = cls(np.arange(len(texts)), ids, 0 * lengths + 1, np.stack([0 * lengths, lengths], 1), lengths)
        return sequences._with_media(media)

    @classmethod
    def _of_branches(cls, batch: Batch, rows: Tensor) -> TokenSequences:
        """Make the texts of completions whose positions may step back: one per step back that predicts something."""
        assert batch.tokens is not None
        assert batch.prompts is not None
        assert batch.positions is not None
        branches, positions, texts = list[tuple[int, int, int, int]](), list[Ints](), list[Ints]()
        for row in rows.tolist():
            prompt = batch.prompts[int(batch.group[row])].numpy()
            tokens = np.concatenate([prompt, batch.tokens[row].numpy()])
            depth = batch.positions[row].numpy()
            # A text keeps of the one before it as many tokens as its first token's depth. `places` are the indices of its
            # tokens in the row, the prompt's from −P on.
            mask = batch.mask[row].numpy()
            extent = len(mask) - int(mask[::-1].argmax())
            starts = [0, *(np.flatnonzero(np.diff(depth[:extent]) != 1) + 1).tolist()]
            places = np.arange(-len(prompt), 0)
            for first, end in zip(starts, [*starts[1:], extent], strict=True):
                places = np.concatenate([places[: depth[first]], np.arange(first, end)])
                if mask[first:end].any():  # up to the last token sampled in it
                    unsampled = int(mask[first:end][::-1].argmax())
                    used = places[: len(places) - unsampled]
                    branches.append((row, len(used) - (end - unsampled), first, end - unsampled))
                    positions.append(used[:-1])
                    texts.append(tokens[used[:-1] + len(prompt)])
        row_of, offsets, firsts, ends = np.array(branches, dtype=np.int64).reshape(-1, 4).T
        lengths = np.array(list(map(len, positions)), dtype=np.int64)
        padded = np.zeros((len(positions), int(lengths.max(initial=0))), dtype=np.int64)
        ids = np.zeros(padded.shape, dtype=">u4")
        for i, (text, row_positions) in enumerate(zip(texts, positions, strict=True)):
            ids[i, : len(text)], padded[i, : len(text)] = text + 1, row_positions
        media = list[TextMedia]()
        if batch.has_media:
            for row, row_positions in zip(row_of.tolist(), positions, strict=True):
                first = len(batch.prompts[int(batch.group[row])])
                media.append(_media_at(batch.media_of(row), row_positions + first))
        sequences = cls(row_of, ids, offsets, np.stack([firsts, ends], 1), lengths, padded)
        return sequences._with_media(media)

    def _with_media(self, media: Sequence[TextMedia]) -> TokenSequences:
        """Return the texts with their pictures; () = none has any."""
        if not media:
            return self
        ids, numbers = self.ids.copy(), dict[str, int]()
        count = FIRST_SLOT
        for i, pictures in enumerate(media):
            for m in pictures:
                if m.digest not in numbers:
                    numbers[m.digest], count = count, count + len(m.slots)
                ids[i, m.slots.numpy()] = numbers[m.digest] + np.arange(len(m.slots))
        objects = np.empty(len(media), dtype=object)
        objects[:] = media
        return replace(self, ids=ids, media=objects, read_ids=self.ids)

    def __getitem__(self, chosen: Ints | slice) -> TokenSequences:
        arrays: list[Any] = [getattr(self, f.name) for f in fields(self)]
        parts: list[Any] = [None if x is None else x[chosen] for x in arrays]
        return TokenSequences(*parts)

    @property
    def has_branches(self) -> bool:
        """Some completion is more than one text."""
        return self.positions is not None and len(np.unique(self.rows)) < len(self.rows)

    @property
    def first_occurrence(self) -> Ints:
        """[n] index of the first text of each one's completion."""
        if not self.has_branches:
            return np.arange(len(self.rows))
        _, first, number = np.unique(self.rows, return_index=True, return_inverse=True)
        return first[number.reshape(-1)].astype(np.int64)

    def sort(self) -> TokenSequences:
        """Sort lexicographically, so that texts with a common prefix are neighbours."""
        keys = np.ascontiguousarray(self.ids).view(f"S{4 * self.ids.shape[1]}").ravel()
        return self[np.argsort(keys, kind="stable")]

    def shared_prefix_lengths(self) -> Ints:
        """Return [n] how many tokens each text shares with the one before it."""
        shared = np.zeros(len(self.rows), dtype=np.int64)
        if len(self.rows) > 1:
            equal = self.ids[1:] == self.ids[:-1]
            first_difference = np.where(equal.all(1), equal.shape[1], equal.argmin(1))
            shared[1:] = np.minimum(first_difference, np.minimum(self.lengths[1:], self.lengths[:-1]))
        return shared


@dataclass(frozen=True, eq=False)
class PackPart:
    """Texts of a pack that are read in one call, behind a path, and what the states belong to that they need."""

    path: tuple[PathSegment, ...]
    sources: tuple[StateSource, ...]  # of states that segments have computed
    which: Ints  # [k] the pack's predicting nodes, by number, whose states the call computes
    pack: Pack | None = None
    """The texts laid out alone, with those predicting nodes; None = all of the pack's."""

    @property
    def depth(self) -> int:
        """Tokens of the path."""
        return self.path[-1].end if self.path else 0


@dataclass(frozen=True, eq=False)
class Pack:
    """A micro-batch: a tree of N nodes, each a token, with b completions of T positions on S distinct texts."""

    rows: Tensor  # [b] completions of the batch
    ids: Tensor  # [N] token of each node
    positions: Tensor  # [N] position of each node in its text
    paths: Tensor  # [S, L] node of every token of the distinct texts, padded with the last one
    predicting_nodes: Tensor  # [u] nodes whose states predict a sampled token
    predicting_positions: Tensor  # [u] their first occurrence among the S·L entries of `paths`
    predictor: Tensor  # [b, T] index into `predicting_nodes` of the node that predicts the token; 0 off the mask
    tokens: Tensor  # [b, T] predicted tokens; 0 off the mask
    mask: Tensor  # [b, T]
    reads: Tensor  # [N] float32, number of texts that read each node, equal texts each
    tree: AttentionTree
    routes: Tensor | None = None
    """[N, layers, k] experts that each node is sent to, -1 = the model's own choice; None = that everywhere."""
    counted: Tensor | None = None
    """[N] bool, True for the nodes whose experts are counted; None = all."""
    sampling_mask: SamplingMask | None = None
    """For the tokens on `mask`, row by row; None = every token was possible."""
    reference_top: TopTokens | None = None
    """π_ref's likeliest tokens before the tokens on `mask`, row by row, where a server tells them."""
    slots: Tensor | None = None
    """[N] bool, the nodes that stand for a part of a picture; None = no pictures."""
    media: tuple[TextMedia, ...] = ()
    """The pictures of each distinct text, with `slots`."""
    reference: Pack | None = None
    """The same completions in the same order after the prompts that π_ref reads; None = the same texts."""
    parts: tuple[PackPart, ...] = ()
    """How it is read where what texts begin with may be read once for several packs; a pack can also be read as a whole."""
    path_readers: PathReaders | None = None
    """Reads the parts."""
    num_first_read: int | None = None
    """Tokens that this pack reads and none before it, with those of its paths; None = all its nodes."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes that are read at a time, or of those that π_ref reads if they are more."""
        nodes = max((len((x.pack or self).ids) - x.depth for x in self.parts), default=len(self.ids))
        return nodes if self.reference is None else max(nodes, len(self.reference.ids))

    @property
    def num_computed(self) -> int:
        """Number of tokens read for this pack; a segment's second reading, with a graph, is not counted."""
        return len(self.ids) if self.num_first_read is None else self.num_first_read

    @property
    def node_media(self) -> TextMedia:
        """The pictures of the tree, each once, in the order of their nodes."""
        first_nodes = dict[int, Media]()
        for path, pictures in zip(self.tree.paths, self.media, strict=True):
            first_nodes |= {int(path[m.slots[0]]): m for m in pictures}
        return tuple(first_nodes[node] for node in sorted(first_nodes))

    @property
    def completions(self) -> int:
        """Number of completions computed, equal ones once; an upper bound if some are on several texts."""
        return min(len(self.rows), len(self.paths))

    def map(self, function: Callable[[Tensor], Tensor]) -> Pack:
        """Return the pack with every tensor replaced."""
        tensors = {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        changed: dict[str, Any] = {name: function(x) for name, x in tensors.items()}
        if (left := self.sampling_mask) is not None:
            changed["sampling_mask"] = SamplingMask(function(left.ids), function(left.counts))
        if (top := self.reference_top) is not None:
            changed["reference_top"] = TopTokens(function(top.ids), function(top.logp))
        if self.reference is not None:
            changed["reference"] = self.reference.map(function)
        parts = (x if x.pack is None else replace(x, pack=x.pack.map(function)) for x in self.parts)
        changed["parts"] = tuple(parts)
        return replace(self, **changed, tree=self.tree.map(function))

    def to(self, device: torch.device | str) -> Pack:
        return self.map(lambda x: x.to(device))


def find_contributing(batch: Batch, psi: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
    """Return [B] bool: completions with a token that has a gradient, c·Ψ ≠ 0 or a term's coefficient ≠ 0."""
    policy, *terms = coefficients
    contributes = policy * psi != 0
    for c in terms:
        contributes = contributes | (c != 0)
    return (contributes & (batch.mask | batch.observed_tokens)).any(1)


def micro_batch_tokens(config: LearnerConfig, model: nn.Module) -> int:
    """Return the token limit of a micro-batch of this model."""
    parameters = list(model.parameters())
    return config.resolve_micro_tokens(parameters[0].device, sum(p.numel() for p in parameters))


def pack_micro_batches(
    batch: Batch,
    rows: Tensor,
    budget: int,
    *,
    keep_groups: bool = False,
    can_follow: CanFollow = lambda saving: False,
) -> Iterator[Pack]:
    """Pack those completions `rows` that have a sampled token into micro-batches of at most `budget` nodes, or one completion;
    a budget of 0: one completion each.

    No completion is split, even one of several texts, and with `keep_groups` no group, whatever the budget. Where one completion
    takes most of the budget or more, others that share two thirds of their tokens with it may add half as much again, as they
    would read them anew otherwise.

    Args:
        can_follow: Asked, where it saves something (`find_saving`), whether what packs begin with, or is too long for one, may be a
            `PackPart.path`. After the last pack's backward pass, the next call of the iterator adds what is left of the gradients.

    Raises:
        DataError: The batch has no tokens or prompts.
    """
    texts = TokenSequences.of(batch, rows)
    if not keep_groups and not batch.has_media and len(texts.rows):
        ordered, units = _sort_by_unit(texts)
        saving = find_saving(ordered.lengths, ordered.shared_prefix_lengths(), units, budget)
        if saving and can_follow(saving):
            return PathPacks(batch, ordered, units, budget)
    return pack_texts(batch, texts, budget, groups=batch.group if keep_groups else None)


@dataclass(eq=False)
class PathPacks(Iterator[Pack]):
    """Packs that may follow a path. All are laid out before the first is read: a segment must know which of its tokens predict
    something."""

    batch: Batch
    texts: TokenSequences
    """Neighbours have the longest common beginnings."""
    units: Ints  # [n] texts of equal numbers, neighbours, are read in one pass
    budget: int
    _packs: Iterator[Pack] | None = None

    def __next__(self) -> Pack:
        if self._packs is None:
            self._packs = self.lay_out(self.plan(1)[0])
        return next(self._packs)

    def read_whole(self) -> Iterator[Pack]:
        """Return packs of the same texts that follow nothing, whatever their length."""
        return pack_texts(self.batch, self.texts, self.budget)

    def plan(self, size: int) -> list[list[PassPlan]]:
        """Return the passes of each of `size` processes, which have neighbouring texts, about equally many new tokens each."""
        lengths, shared = self.texts.lengths, self.texts.shared_prefix_lengths()
        starts = np.flatnonzero(np.diff(self.units, prepend=self.units[0] - 1))
        read = np.cumsum(np.add.reduceat(lengths - shared, starts))  # up to the end of each unit
        goals = read[-1] * np.arange(1, size) / size
        chosen = np.abs(read[:, None] - goals).argmin(0) + 1  # the unit that begins nearest to each goal
        bounds = [0, *np.append(starts, len(lengths))[chosen].tolist(), len(lengths)]
        plans = list[list[PassPlan]]()
        for first, end in pairwise(bounds):
            common = np.where(np.arange(first, end) == first, 0, shared[first:end])
            passes = plan_passes(lengths[first:end], common, self.units[first:end], self.budget) if end > first else []
            plans.append([plan.move(first) for plan in passes])
        return plans

    def lay_out(
        self, plans: Sequence[PassPlan], all_reduce: Callable[[Tensor], Tensor] | None = None, num_passes: int = 0
    ) -> Iterator[Pack]:
        """Iterate over planned passes. After the last, the next call of the iterator adds what is left of the gradients.

        Args:
            all_reduce: Adds up over the processes that read at the same time (see `PathReaders`).
            num_passes: Of the process with most; others end with the smallest pack, which is to add nothing.
        """
        from policygrad.learners.local.path_reader import PathReaders

        packs, entered = list[Pack](), set[PathSegment]()
        for plan in plans:
            pack = _layout_parts(self.batch, self.texts, plan)
            path = {segment for part in pack.parts for segment in part.path} - entered
            behind = sum(len((part.pack or pack).ids) - part.depth for part in pack.parts)
            packs.append(replace(pack, num_first_read=behind + sum(x.end - x.begin for x in path)))
            entered |= path
        path_readers = PathReaders(max((part.depth for pack in packs for part in pack.parts), default=0), all_reduce)
        packs += [make_smallest_pack()] * (num_passes - len(packs))
        for pack in packs:
            yield replace(pack, path_readers=path_readers)
        path_readers.finish()


def make_smallest_pack() -> Pack:
    """Return a micro-batch of a single predicted token, for a pass that adds nothing."""
    one, token = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    batch = Batch(mask=token == 0, group=one, reward=torch.zeros(1), tokens=token, prompts=(one,))
    return next(pack_micro_batches(batch, one, 1))


def _layout_parts(batch: Batch, texts: TokenSequences, plan: PassPlan) -> Pack:
    """Lay out a planned pass with the parts in which it is read."""
    pack = _layout_tree(batch, texts[plan.texts])
    predicting, lengths, shared = pack.predicting_nodes.numpy(), texts.lengths, texts.shared_prefix_lengths()
    is_found, parts = np.zeros(len(predicting), dtype=bool), list[PackPart]()
    if not plan.parts:
        return replace(
            pack, parts=(PackPart(plan.path, *find_sources(predicting, np.arange(len(pack.ids)), plan.path, is_found)),)
        )
    whole = _number_nodes(lengths[plan.texts], shared[plan.texts])
    for part in plan.parts:
        own = _number_nodes(lengths[part.texts], shared[part.texts])
        nodes = np.zeros(own.max() + 1, dtype=np.int64)
        nodes[own] = whole[part.texts - plan.texts[0], : own.shape[1]]
        sources, which = find_sources(predicting, nodes, part.path, is_found)
        alone = _layout_tree(batch, texts[part.texts])
        ours = torch.from_numpy(np.searchsorted(nodes, predicting[which]))
        parts.append(PackPart(part.path, sources, which, replace(alone, predicting_nodes=ours)))
    return replace(pack, parts=tuple(parts))


def _number_nodes(lengths: Ints, shared: Ints) -> Ints:
    """Return [n, L] the node of every token of texts, padded with the last one, the first of which shares nothing."""
    paths, nodes = np.zeros((len(lengths), int(lengths.max())), dtype=np.int64), 0
    for i, (length, same) in enumerate(zip(lengths.tolist(), [0, *shared[1:].tolist()], strict=True)):
        if same:
            paths[i, :same] = paths[i - 1, :same]
        paths[i, same:length] = np.arange(nodes, nodes + length - same)
        paths[i, length:] = paths[i, length - 1]
        nodes += length - same
    return paths


def pack_with_reference(
    batch: Batch,
    rows: Tensor,
    budget: int,
    *,
    keep_groups: bool = False,
    can_follow: CanFollow = lambda saving: False,
) -> Iterator[Pack]:
    """Pack completions so that also what π_ref reads, each completion after its own prompt, has at most `budget` nodes."""
    if not batch.reference_prompts:
        return pack_micro_batches(batch, rows, budget, keep_groups=keep_groups, can_follow=can_follow)
    return _pack_aligned(batch, rows, budget, keep_groups)


def _pack_aligned(batch: Batch, rows: Tensor, budget: int, keep_groups: bool) -> Iterator[Pack]:
    """Pack by what π_ref reads, and put the policy's pack of the same completions beside each."""
    read = batch.as_reference_reads()
    texts = TokenSequences.of(read, rows)
    for reference in pack_texts(read, texts, budget, groups=batch.group if keep_groups else None):
        (pack,) = pack_micro_batches(
            batch, reference.rows, int(batch.mask.numel() + sum(map(len, batch.prompts or ())))
        )
        order = torch.argsort(reference.rows)[torch.argsort(torch.argsort(pack.rows))]
        aligned = {name: getattr(reference, name)[order] for name in ("rows", "predictor", "tokens", "mask")}
        yield replace(pack, reference=replace(reference, **aligned, sampling_mask=None))


def pack_texts(batch: Batch, texts: TokenSequences, budget: int, *, groups: Tensor | None = None) -> Iterator[Pack]:
    """Pack the texts of a batch's completions in the same way; `groups` [B], which are not split, if there are such."""
    if not len(texts.rows):
        return
    texts, unit = _sort_by_unit(texts, groups)
    shared = texts.shared_prefix_lengths()
    new_tokens = texts.lengths - shared
    begins = np.flatnonzero(np.diff(unit, prepend=-1))
    ends = np.append(begins[1:], len(unit))
    start, used, limit = 0, 0, 0
    for first, end in zip(begins.tolist(), ends.tolist(), strict=True):
        more = int(new_tokens[first:end].sum())
        if first > start and used + more > (limit if shared[first] >= 2 * more else budget):
            yield _layout_tree(batch, texts[start:first])
            start, used = first, 0
        if start == first:
            more += int(shared[first])
            limit = max(budget, more * 3 // 2) if budget else 0
        used += more
    yield _layout_tree(batch, texts[start:])


def _sort_by_unit(texts: TokenSequences, groups: Tensor | None = None) -> tuple[TokenSequences, Ints]:
    """Sort texts; bring together what must not be split, and return its number [n] for each text."""
    texts = texts.sort()
    unit = texts.first_occurrence if groups is None else groups.numpy()[texts.rows]
    order = np.argsort(unit, kind="stable")
    return texts[order], unit[order]


def _layout_tree(batch: Batch, texts: TokenSequences) -> Pack:
    """Lay texts out as a tree, in the order that shares most."""
    assert batch.tokens is not None
    texts = texts.sort()
    shared = texts.shared_prefix_lengths()
    paths = _number_nodes(texts.lengths, shared)
    reads = np.bincount(paths[np.arange(paths.shape[1]) < texts.lengths[:, None]])
    # texts that add a node are distinct
    distinct = np.flatnonzero(texts.lengths > shared)
    distinct_paths = paths[distinct]
    lengths, skip = texts.lengths[distinct], shared[distinct]
    depth = np.arange(paths.shape[1])
    is_new_node = (depth >= skip[:, None]) & (depth < lengths[:, None])
    read_ids = texts.ids if texts.read_ids is None else texts.read_ids
    width = is_new_node.shape[1]
    ids = torch.from_numpy(read_ids[distinct][:, :width][is_new_node].astype(np.int64) - 1)
    positions = np.nonzero(is_new_node)[1]  # nodes are numbered in this order
    # [b, T] the node that predicts each token; completions are in the order of their first texts
    t, chosen = np.arange(batch.mask.shape[1]), texts.rows
    before = np.clip(texts.offsets[:, None] - 1 + t, 0, texts.lengths[:, None] - 1)
    predictors = np.take_along_axis(paths, before, 1)
    if texts.has_branches:
        first, number = np.unique(texts.first_occurrence, return_inverse=True)
        text, token = np.nonzero((t >= texts.spans[:, :1]) & (t < texts.spans[:, 1:]))
        joined = np.zeros((len(first), len(t)), dtype=np.int64)
        joined[number.reshape(-1)[text], token] = predictors[text, token]
        chosen, predictors = texts.rows[first], joined
    rows = torch.from_numpy(chosen)
    mask, tokens = batch.mask[rows], batch.tokens[rows]
    predicting_nodes, index = np.unique(predictors[mask.numpy()], return_inverse=True)
    predictor = torch.zeros(mask.shape, dtype=torch.int64)
    predictor[mask] = torch.from_numpy(index.reshape(-1))
    slots, media = None, tuple[TextMedia, ...]()
    if texts.media is not None:
        slots = torch.from_numpy(texts.ids[distinct][:, :width][is_new_node] >= FIRST_SLOT)
        media = tuple(texts.media[distinct])
    routes = None
    if batch.routed_experts is not None:  # a shared node takes the experts of its first text
        routes = batch.routed_experts.new_full((len(ids), *batch.routed_experts.shape[2:]), -1)
        for i in reversed(range(len(texts.rows))):
            row, length = int(texts.rows[i]), int(texts.lengths[i])
            prompt = batch.prompt_routed_experts[int(batch.group[row])]
            places = torch.arange(length)
            if texts.positions is not None:
                places = torch.from_numpy(texts.positions[i, :length]) + len(prompt)
            routes[torch.from_numpy(paths[i, :length])] = torch.cat([prompt, batch.routed_experts[row]])[places]
    return Pack(
        rows=rows,
        ids=ids,
        positions=torch.from_numpy(positions),
        paths=torch.from_numpy(distinct_paths),
        predicting_nodes=torch.from_numpy(predicting_nodes),
        predicting_positions=torch.from_numpy(np.flatnonzero(is_new_node)[predicting_nodes]),
        predictor=predictor,
        tokens=torch.where(mask, tokens, 0),
        mask=mask,
        reads=torch.from_numpy(reads).float(),
        tree=AttentionTree(distinct_paths, lengths, skip),
        routes=routes,
        sampling_mask=batch.sampling_mask(rows),
        reference_top=batch.top_tokens(rows),
        slots=slots,
        media=media,
    )


def _media_at(media: TextMedia, places: Ints) -> TextMedia:
    """Return the pictures of those tokens `places` of a text that are left in another text, at their positions there."""
    at = {int(place): position for position, place in enumerate(places)}
    left = [m for m in media if int(m.slots[0]) in at and int(m.slots[-1]) in at]
    return tuple(replace(m, slots=torch.tensor([at[int(slot)] for slot in m.slots])) for m in left)


class WorkDivision:
    """Divides an update's micro-batches between the processes that learn together: here, a single one; and makes them smaller when
    memory runs out."""

    memory: MemoryBudget
    follows_paths = True
    """Micro-batches may be `PathPacks`."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.memory = MemoryBudget(MICRO_TOKENS_FLAG, "tokens", device)

    def micro_batches(
        self,
        batch: Batch,
        config: LearnerConfig,
        model: nn.Module,
        dummy_pass: Callable[[Pack], object],
        *,
        rows: Tensor | None = None,
        keep_groups: bool = False,
        with_reference: bool = False,
        can_follow: CanFollow = lambda saving: False,
    ) -> Iterator[Pack]:
        """Iterate over this process's micro-batches of the completions `rows` (None = all) for a model.

        `dummy_pass` is a pass like those the micro-batches are for, which adds nothing. `with_reference`: π_ref is evaluated in the
        same passes. `can_follow`: see `pack_micro_batches`.
        """
        rows = torch.arange(len(batch.mask)) if rows is None else rows
        pack = pack_with_reference if with_reference else pack_micro_batches
        make_packs = partial(pack, batch, rows, keep_groups=keep_groups, can_follow=can_follow)
        device, budget = next(model.parameters()).device, micro_batch_tokens(config, model)

        def is_cut() -> bool:
            """Whether a text can be: asked where memory has run out, so that trying it may fail as well. Several processes would
            have to try it together, and one may be short of memory alone."""
            try:
                return self.memory.retries and can_follow(1.0)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return False

        def count_parts(part: Pack) -> int:
            if not keep_groups and part.slots is None and is_cut():
                return max(part.completions, part.num_nodes // LEAST_SEGMENT)
            return len(torch.unique(batch.group[part.rows])) if keep_groups else part.completions

        return self.divide_within_memory(
            make_packs, budget, lambda part: dummy_pass(part.to(device)), lambda part: part.num_nodes, count_parts
        )

    def divide_within_memory(
        self,
        make_packs: Callable[[int], Iterator[T]],
        budget: int,
        dummy_pass: Callable[[Pack], object],
        count_tokens: Callable[[T], int],
        count_parts: Callable[[T], int],
    ) -> Iterator[T]:
        """Iterate over this process's share of `make_packs(budget)`, of a smaller budget once memory has run out.

        `count_parts`: into how many a micro-batch could be cut. Iterate within `memory.run`, which begins anew then.
        """
        packs = self.divide(make_packs, self.memory.cap(budget), dummy_pass, count_tokens)
        return self.memory.watch(packs, count_tokens, count_parts)

    def divide(
        self,
        make_packs: Callable[[int], Iterator[T]],
        budget: int,
        dummy_pass: Callable[[Pack], object],
        count_tokens: Callable[[T], int],
    ) -> Iterator[T]:
        """Iterate over this process's share of the micro-batches, `make_packs(budget)`.

        `dummy_pass` adds nothing, for processes with fewer micro-batches than others.
        """
        return make_packs(budget)

    def distribute(self, packs: Iterator[T], dummy_pass: Callable[[Pack], object]) -> Iterator[T]:
        """Iterate over this process's share of micro-batches whose size must not change."""
        return packs

    def all_reduce(self, x: Tensor, *, by_node: bool = False) -> Tensor:
        """Return the sum over the processes of a CPU tensor, which may be overwritten; `by_node`: it counts nodes read."""
        return x

    def reduce_metrics(self, metrics: Metrics, *, by_node: bool = False) -> Metrics:
        """Merge the processes' metrics, each by its own reduction; `by_node`: they count nodes read."""
        return metrics

    def shard(self, network: nn.Module) -> Callable[[Callable[[], Tensor]], Tensor]:
        """Shard a network that trains beside the policy over the processes; return what calls it: it runs a function that does."""
        return lambda work: work()
