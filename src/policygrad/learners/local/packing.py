"""From completions to rows of tokens a model reads: equal completions once, a group's shared prompt once, little padding.

Every saving leaves the gradient exactly as it was: a row stands for `count` equal completions whose coefficients are
summed, and completions that share a row see their prompt and themselves, never each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import PER_COMPLETION, PER_TOKEN, Batch
from policygrad.errors import DataError

CAP = 1024
"""Tokens in a row that several completions share: attention over it costs the square."""


@dataclass(frozen=True, eq=False)
class Pack:
    """One micro-batch: R rows of L tokens holding b completions of T positions."""

    rows: Tensor
    """[b] which completions of the batch."""
    input_ids: Tensor
    """[R, L]."""
    positions: Tensor
    """[R, L]."""
    attention: Tensor
    """[R, L] as transformers take it, or [R, 1, L, L] bool where completions share their prompt."""
    predictor: Tensor
    """[b, T] flat index into R·L of the position whose logits predict the token; 0 off the mask."""
    tokens: Tensor
    """[b, T] the tokens predicted; 0 off the mask."""
    mask: Tensor
    """[b, T]."""
    routes: Tensor | None = None
    """[R·L, layers, k] the experts that each position is sent to, -1 = the model's own choice; None = so everywhere."""

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


def merge_equal(batch: Batch, psi: Tensor, rows: Tensor, needs: frozenset[str] = frozenset()) -> tuple[Tensor, Tensor]:
    """(representative rows [u], index [len(rows)] of each row's representative): equal completions of one prompt with equal
    Ψ have one gradient, times the sum of their coefficients.

    Equal in everything the batch holds, since a part of anyone's may read it. `needs`: the fields an algorithm declares; what
    Ψ was made of and what the sampler said (the same up to rounding) tell two completions apart only if they are among them,
    and where a mixture sent equal tokens (`experts`) never: the first one's stand for all.
    The batch is on the CPU.
    """
    if not len(rows):
        return rows, rows
    present = {n: x for n in (*PER_TOKEN, *PER_COMPLETION) if (x := getattr(batch, n)) is not None}
    for name in {"logp_sampler", "version", "entropy", "anchor", "example", "baseline"} - needs:
        present.pop(name, None)
    mask = batch.mask[rows]
    reached = (
        mask.int().flip(1).cummax(1).values.flip(1).bool()
    )  # what a tool said between sampled tokens is read as well

    def column(name: str, x: Tensor) -> Tensor:
        return x[rows, None] if x.ndim == 1 else ragged.masked(x[rows], reached if name == "tokens" else mask)

    columns = [column(name, x) for name, x in (("psi", psi), *present.items())]
    raw = [c.contiguous().view(torch.uint8).reshape(len(rows), -1).numpy() for c in columns if c.shape[1]]
    seen: dict[bytes, int] = {}
    index, first = list[int](), list[int]()
    for i in range(len(rows)):
        key = b"".join(r[i].tobytes() for r in raw)
        if key not in seen:
            seen[key] = len(first)
            first.append(i)
        index.append(seen[key])
    return rows[torch.tensor(first, dtype=torch.int64)], torch.tensor(index, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Merged:
    """The completions `rows` [n] of a batch, equal ones standing for each other."""

    rows: Tensor
    """[n] of the batch, those that take part."""
    unique: Tensor
    """[u] of the batch, the ones to compute."""
    index: Tensor
    """[n] which of `unique` stands for each of `rows`."""
    place: Tensor
    """[B] where in `unique` a completion that is computed stands."""

    @classmethod
    def of(cls, batch: Batch, psi: Tensor, rows: Tensor, needs: frozenset[str] = frozenset()) -> Merged:
        """Equal in all that a gradient may depend on: see `merge_equal`."""
        return cls._at(batch, rows, *merge_equal(batch, psi, rows, needs))

    @classmethod
    def apart(cls, batch: Batch, rows: Tensor) -> Merged:
        """Every completion for itself, equal or not."""
        return cls._at(batch, rows, rows, torch.arange(len(rows)))

    @classmethod
    def _at(cls, batch: Batch, rows: Tensor, unique: Tensor, index: Tensor) -> Merged:
        place = torch.zeros(len(batch.mask), dtype=torch.int64)
        place[unique] = torch.arange(len(unique))
        return cls(rows, unique, index, place)

    @classmethod
    def of_texts(cls, batch: Batch) -> Merged:
        """All completions with a sampled token; equal prompt and tokens are enough for what a model says of a text."""
        nothing = torch.zeros(batch.mask.shape)
        text = Batch(mask=batch.mask, group=batch.group, reward=nothing.sum(1), tokens=batch.tokens)
        return cls.of(text, nothing, batch.mask.any(1).nonzero().squeeze(1))

    @property
    def count(self) -> Tensor:
        """[u] int64; completions that each stands for."""
        return torch.bincount(self.index, minlength=len(self.unique))

    def summed(self, x: Tensor) -> Tensor:
        """[u, T] the sum of x [B, T] over the completions that each stands for."""
        return x.new_zeros(len(self.unique), x.shape[1]).index_add_(0, self.index, x[self.rows])

    def spread(self, x: Tensor) -> Tensor:
        """x [B, …], computed at `unique`, with every completion's value that of the one that stands for it. In place."""
        x[self.rows] = x[self.unique[self.index]]
        return x


def _extents(mask: Tensor) -> list[int]:
    """Positions up to the last sampled token, per completion; tool tokens between count, padding does not."""
    width = mask.shape[1]
    last = width - mask.flip(1).int().argmax(1)
    return torch.where(mask.any(1), last, 0).tolist()


def _bins(
    batch: Batch, rows: Tensor, extent: Sequence[int], cap: int, whole: bool = False
) -> list[tuple[int, int, list[int]]]:
    """(length, group, completions) of each row, longest first: completions share their prompt while the row stays within `cap`.

    whole: a group's rows follow each other, and none is shared where one is over `cap`; a completion of one token, which reads
    its prompt alone, needs no row of its own."""
    assert batch.prompts is not None
    bins: list[tuple[int, int, list[int]]] = []  # (length, group, completions)
    by_group: dict[int, list[int]] = {}
    for row, group in zip(rows.tolist(), batch.group[rows].tolist(), strict=True):
        if extent[row]:
            by_group.setdefault(group, []).append(row)
    for group, members in by_group.items():
        prompt = len(batch.prompts[group])
        length, current = prompt, list[int]()
        alone = whole and any(prompt + extent[row] - 1 > cap for row in members)
        for row in members:
            size = extent[row] - 1
            free = whole and size == 0
            if current and not free and (alone or length + size > cap):
                bins.append((length, group, current))
                length, current = prompt, []
            length += size
            current.append(row)
        bins.append((length, group, current))
    if whole:
        longest = {group: max(length for length, other, _ in bins if other == group) for group in by_group}
        return sorted(bins, key=lambda b: (-longest[b[1]], b[1], -b[0]))
    return sorted(bins, key=lambda b: -b[0])


def _plan(
    bins: Sequence[tuple[int, int, list[int]]], budget: int, cap: int, whole: bool = False
) -> Iterator[list[tuple[int, list[int]]]]:
    """Micro-batches as lists of (group, completions), up to `budget` padded tokens (at least one row; whole: one group).

    One ends early where it is an eighth full and the next row is shorter by a fifth, since padding costs as much as tokens
    do; and where rows over `cap` end: those hold one completion, and take a mask that a model may narrow to its window.
    """
    micro: list[tuple[int, list[int]]] = []
    longest = 0
    height = Counter(group for _, group, _ in bins)
    for length, group, members in bins:
        full = (len(micro) + (height[group] if whole else 1)) * longest > budget
        uneven = 8 * len(micro) * longest >= budget and 5 * length < 4 * longest
        if micro and not (whole and group == micro[-1][0]) and (full or uneven or length <= cap < longest):
            yield micro
            micro = []
        longest = length if not micro else longest
        micro.append((group, members))
    if micro:
        yield micro


def pack(
    batch: Batch, rows: Tensor, budget: int, *, share: bool = True, cap: int = CAP, whole: bool = False
) -> Iterator[Pack]:
    """Micro-batches of at most `budget` padded tokens (or one row) covering the completions `rows`.

    share: a group's completions may stand in one row, of at most `cap` tokens. whole: no group is split, whatever the budget.

    Raises:
        ConfigError: a batch without tokens or prompts.
    """
    if batch.tokens is None or batch.prompts is None:
        raise DataError("a learner needs Batch.tokens and Batch.prompts (token ids); they are None")
    extent = _extents(batch.mask)
    cap = cap if share else 0
    for plan in _plan(_bins(batch, rows, extent, cap, whole), budget, cap, whole):
        reading = [[m for m in row if extent[m] > 1] if whole else row for _, row in plan]
        yield _lay_out(batch, plan, extent, shared=any(len(row) > 1 for row in reading))


def _lay_out(batch: Batch, plan: list[tuple[int, list[int]]], extent: list[int], shared: bool) -> Pack:
    """shared: several completions that read more than their prompt stand in a row."""
    assert batch.tokens is not None
    assert batch.prompts is not None
    lengths = [len(batch.prompts[g]) + sum(extent[m] - 1 for m in members) for g, members in plan]
    height, width, steps = len(plan), max(lengths), batch.mask.shape[1]
    ids = torch.zeros(height, width, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    segment = torch.full_like(ids, -1)  # 0 = prompt, j = the row's j-th completion, -1 = padding
    placed: list[tuple[int, int, int, int, int]] = []  # completion, its prompt's size and last index, first index, j
    for r, (group, row) in enumerate(plan):
        prompt = batch.prompts[group]
        size = len(prompt)
        ids[r, :size], positions[r, :size], segment[r, :size] = prompt, torch.arange(size), 0
        at = r * width + size
        for j, member in enumerate(row, 1):
            placed.append((member, size, r * width + size - 1, at, j))
            at += extent[member] - 1
    chosen, size, last, first, j = (column[:, None] for column in torch.tensor(placed).T)
    chosen = chosen.squeeze(1)
    t = torch.arange(steps - 1)
    read = t < torch.tensor(extent)[chosen, None] - 1  # nothing is predicted after the last token, so it is not read
    where = (first + t)[read]
    ids.view(-1)[where] = batch.tokens[chosen, :-1][read]
    positions.view(-1)[where] = (size + t)[read]
    segment.view(-1)[where] = j.expand(read.shape)[read]
    routes = None
    if batch.experts is not None:
        routes = batch.experts.new_full((height * width, *batch.experts.shape[2:]), -1)
        routes[where] = batch.experts[chosen, :-1][read]
        for r, (group, _) in enumerate(plan):
            routes[r * width : r * width + len(batch.prompts[group])] = batch.prompt_experts[group]
    mask = batch.mask[chosen]
    return Pack(
        chosen,
        ids,
        positions,
        _attention(segment, shared),
        torch.where(mask, torch.cat([last, first + t], 1), 0),
        torch.where(mask, batch.tokens[chosen], 0),
        mask,
        routes,
    )


def _attention(segment: Tensor, shared: bool) -> Tensor:
    if not shared:
        return (segment >= 0).long()
    query, key = segment[:, :, None], segment[:, None, :]
    width = segment.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    allowed = causal & ((key == 0) | (key == query))
    return allowed[
        :, None
    ]  # a padding position sees the prompt or other padding, so that no row of the softmax is empty
