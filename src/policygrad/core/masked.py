"""Masked and per-group reductions. Padded positions may hold anything, NaN included; they are never read."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` where the mask is True and 0 elsewhere. Unlike `x * mask`, this drops NaN and inf."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def reverse_cumsum(x: Tensor) -> Tensor:
    """Sum over each position and all later ones, [B, T] -> [B, T]."""
    return x.flip(1).cumsum(1).flip(1)


def discounted_reverse_cumsum(x: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Compute Σ_{s ≥ t} rate^{s − t} x_s, [B, T]. Only True positions count as steps; 0 elsewhere."""
    x = apply_mask(x, mask)
    if rate in (0, 1):
        return apply_mask(reverse_cumsum(x), mask) if rate else x
    return reverse_recursion(x, mask, rate)


def reverse_recursion(x: Tensor, mask: Tensor, rate: Tensor | float) -> Tensor:
    """Compute the sum of `discounted_reverse_cumsum` step by step, for a rate that is a number, [B] or [B, T].

    In float32 its rounding differs from `reverse_cumsum` at rate 1.
    """
    x = apply_mask(x, mask)
    total, columns = torch.zeros_like(x[:, :1]).sum(1), list[Tensor]()
    for t in reversed(range(x.shape[1])):
        now = rate[:, t] if isinstance(rate, Tensor) and rate.ndim == 2 else rate
        total = torch.where(mask[:, t], x[:, t] + now * total, total)
        columns.append(total)
    return apply_mask(torch.stack(columns[::-1], 1), mask) if columns else x


def sum_spans(x: Tensor, ends: Tensor) -> Tensor:
    """Sum x over each span, [B, T]: the sum stands at the span's last token, and 0 elsewhere.

    ends: [B, T] int64; where the span of each token ends, its last token included; -1 for a token in no span.
    """
    return torch.zeros_like(x).scatter_add(1, ends.clamp(min=0), apply_mask(x, ends >= 0))


def discounted_over_spans(x: Tensor, mask: Tensor, ends: Tensor, rate: float) -> Tensor:
    """Compute `discounted_reverse_cumsum` with spans as steps, the same number at every token of a span.

    x stands at the spans' last tokens (`sum_spans`); a token in no span is a step of its own.
    """
    places = torch.arange(x.shape[1], device=x.device)
    ends = torch.where(ends < 0, places, ends)
    return apply_mask(discounted_reverse_cumsum(x, mask & (ends == places), rate).gather(1, ends), mask)


def first_valid(x: Tensor, mask: Tensor) -> Tensor:
    """Return each row's value at its first True position, [B, T] -> [B]; 0 for a row without one."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0])
    index = mask.int().argmax(1, keepdim=True)
    return apply_mask(x.gather(1, index).squeeze(1), mask.any(1))


def mean(x: Tensor, keep: Tensor) -> Tensor:
    """Mean over the True positions; 0 when there are none."""
    return apply_mask(x, keep).sum() / keep.sum().clamp(min=1)


def std(x: Tensor, keep: Tensor, ddof: int) -> Tensor:
    """Standard deviation over the True positions; 0 when there are at most `ddof`."""
    squares = apply_mask((x - mean(x, keep)) ** 2, keep).sum()
    return (squares / (keep.sum() - ddof).clamp(min=1)).sqrt()


def is_constant(x: Tensor, keep: Tensor) -> Tensor:
    """Check that max = min over the True positions, [] bool: a computed standard deviation of equal numbers need not be 0."""
    low, high = (x.masked_fill(~keep, end) for end in (torch.inf, -torch.inf))
    return low.amin() >= high.amax() if x.numel() else torch.ones((), dtype=torch.bool, device=x.device)


def split_by_group(rows: Tensor, group: Tensor) -> tuple[Tensor, ...]:
    """Split the indices of some completions [n] by their groups [B], each in the given order."""
    if not len(rows):
        return ()
    rows = rows[group[rows].argsort(stable=True)]
    sizes: list[int] = torch.unique_consecutive(group[rows], return_counts=True)[1].tolist()
    return torch.split(rows, sizes)


class Groups:
    """Reductions over each prompt's completions where `keep` [B] is True; results are per completion, [B]."""

    def __init__(self, group: Tensor, keep: Tensor) -> None:
        ids, self.index = torch.unique(group, return_inverse=True)
        self.n, self.keep = len(ids), keep

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the group; integers and bools are summed in int64."""
        x = x if x.is_floating_point() else x.long()
        total = x.new_zeros(self.n).index_add_(0, self.index, apply_mask(x, self.keep))
        return total[self.index]

    def sum_excluding_self(self, x: Tensor) -> Tensor:
        """Sum over the group's other completions. The total minus x_i would lose small terms beside a large x_i."""
        size = torch.bincount(self.index, minlength=self.n)
        order = self.index.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - (size.cumsum(0) - size)[self.index[order]]
        table = x.new_zeros(self.n, int(size.max()) if self.n else 0)
        table[self.index, place] = apply_mask(x, self.keep)
        before, after = (torch.nn.functional.pad(t, (1, 0))[:, :-1].cumsum(1) for t in (table, table.flip(1)))
        return (before + after.flip(1))[self.index, place]

    @property
    def size(self) -> Tensor:
        """Counted completions of the group, [B] int64."""
        return self.sum(self.keep)

    def mean(self, x: Tensor) -> Tensor:
        """Mean over the group; 0 for a group without counted completions."""
        return self.sum(x) / self.size.clamp(min=1)

    def std(self, x: Tensor, ddof: int) -> Tensor:
        """Standard deviation over the group; 0 when it has at most `ddof` members."""
        return (self.sum((apply_mask(x, self.keep) - self.mean(x)) ** 2) / (self.size - ddof).clamp(min=1)).sqrt()

    def max(self, x: Tensor) -> Tensor:
        """Maximum over the group; −inf for a group without counted completions."""
        high = x.new_full((self.n,), -torch.inf).scatter_reduce_(0, self.index[self.keep], x[self.keep], "amax")
        return high[self.index]

    def is_constant(self, x: Tensor) -> Tensor:
        """Check that max = min over the group's counted completions, [B] bool."""
        return -self.max(-x) >= self.max(x)
