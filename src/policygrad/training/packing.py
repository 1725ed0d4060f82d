"""From completions to rows of tokens a model reads: equal completions once, a group's shared prompt once, little padding.

Every saving leaves the gradient exactly as it was: a row stands for `count` equal completions whose coefficients are
summed, and completions that share a row see their prompt and themselves, never each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from policygrad.core.types import Batch

_COMPARED = ("mask", "tokens", "logp_old", "logp_ref", "values", "weight")


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

    def to(self, device: torch.device | str) -> Pack:
        return Pack(*(getattr(self, f.name).to(device) for f in fields(self)))


def active(batch: Batch, psi: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
    """[B] bool; completions with a token that can move the weights: c·Ψ ≠ 0, or a term's coefficient ≠ 0."""
    policy, *terms = coefficients
    moves = (policy * psi != 0) & batch.mask
    for c in terms:
        moves = moves | ((c != 0) & batch.mask)
    return moves.any(1)


def merge_equal(batch: Batch, psi: Tensor, rows: Tensor, needs: frozenset[str] = frozenset()) -> tuple[Tensor, Tensor]:
    """(representative rows [u], index [len(rows)] of each row's representative): equal completions of one prompt with equal
    Ψ and equal log-probabilities have one gradient, times the sum of their coefficients.

    `needs`: the fields an algorithm reads; what the sampler said (the same up to rounding) tells two apart only if it is read.
    """
    if not len(rows):
        return rows, rows
    names = (*_COMPARED, *({"logp_sampler"} & needs))
    columns = [psi, *(getattr(batch, name) for name in names if getattr(batch, name) is not None)]
    mask = batch.mask[rows]
    data = [
        torch.where(mask, c[rows], 0).contiguous() if c.dtype != torch.bool else c[rows].contiguous() for c in columns
    ]
    raw = [d.view(torch.uint8).reshape(len(rows), -1).numpy() for d in data if d.shape[1]]
    groups = batch.group[rows].tolist()
    seen: dict[tuple[int, bytes], int] = {}
    index, first = [], []
    for i in range(len(rows)):
        key = (groups[i], b"".join(r[i].tobytes() for r in raw))
        if key not in seen:
            seen[key] = len(first)
            first.append(i)
        index.append(seen[key])
    return rows[torch.tensor(first, dtype=torch.int64)], torch.tensor(index, dtype=torch.int64)


def _extents(mask: Tensor) -> list[int]:
    """Positions up to the last sampled token, per completion; tool tokens between count, padding does not."""
    width = mask.shape[1]
    last = width - mask.flip(1).int().argmax(1)
    return torch.where(mask.any(1), last, 0).tolist()


def _plan(batch: Batch, rows: Tensor, budget: int, share: bool, cap: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Micro-batches as lists of (group, completions): a row's completions share their prompt as long as it stays under `cap`
    tokens, and a micro-batch takes rows of like length up to `budget` padded tokens (at least one row)."""
    assert batch.prompts is not None
    extent = _extents(batch.mask)
    bins: list[tuple[int, int, list[int]]] = []  # (length, group, completions)
    by_group: dict[int, list[int]] = {}
    for row in rows.tolist():
        if extent[row]:
            by_group.setdefault(int(batch.group[row]), []).append(row)
    for group, members in by_group.items():
        prompt = len(batch.prompts[group])
        length, current = prompt, list[int]()
        for row in members:
            size = extent[row] - 1  # nothing is predicted after the last token, so it is not read
            if current and (not share or length + size > cap):
                bins.append((length, group, current))
                length, current = prompt, []
            length += size
            current.append(row)
        bins.append((length, group, current))
    bins.sort(key=lambda b: -b[0])
    micro: list[tuple[int, list[int]]] = []
    longest = 0
    for length, group, members in bins:
        if micro and (len(micro) + 1) * longest > budget:
            yield micro
            micro = []
        longest = length if not micro else longest
        micro.append((group, members))
    if micro:
        yield micro


def pack(batch: Batch, rows: Tensor, budget: int, *, share: bool = True, cap: int = 1024) -> Iterator[Pack]:
    """Micro-batches of at most `budget` padded tokens (or one row) covering the completions `rows`.

    Raises:
        ValueError: a batch without tokens or prompts.
    """
    if batch.tokens is None or batch.prompts is None:
        raise ValueError("a learner needs Batch.tokens and Batch.prompts (token ids); they are None")
    extent = _extents(batch.mask)
    for plan in _plan(batch, rows, budget, share, cap):
        yield _lay_out(batch, plan, extent)


def _lay_out(batch: Batch, plan: list[tuple[int, list[int]]], extent: list[int]) -> Pack:
    assert batch.tokens is not None
    assert batch.prompts is not None
    lengths = [len(batch.prompts[g]) + sum(extent[m] - 1 for m in members) for g, members in plan]
    height, width, steps = len(plan), max(lengths), batch.mask.shape[1]
    members = [m for _, row in plan for m in row]
    ids = torch.zeros(height, width, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    segment = torch.full_like(ids, -1)  # 0 = prompt, j = the row's j-th completion, -1 = padding
    predictor = torch.zeros(len(members), steps, dtype=torch.int64)
    b = 0
    for r, (group, row) in enumerate(plan):
        prompt = batch.prompts[group]
        size = len(prompt)
        ids[r, :size], positions[r, :size], segment[r, :size] = prompt, torch.arange(size), 0
        at = size
        for j, member in enumerate(row, 1):
            n = extent[member] - 1
            ids[r, at : at + n] = batch.tokens[member, :n]
            positions[r, at : at + n] = torch.arange(size, size + n)
            segment[r, at : at + n] = j
            predictor[b, 0] = r * width + size - 1
            predictor[b, 1 : n + 1] = torch.arange(at, at + n) + r * width
            at, b = at + n, b + 1
    chosen = torch.tensor(members)
    mask = batch.mask[chosen]
    return Pack(
        chosen,
        ids,
        positions,
        _attention(segment, shared=any(len(row) > 1 for _, row in plan)),
        torch.where(mask, predictor, 0),
        torch.where(mask, batch.tokens[chosen], 0),
        mask,
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
