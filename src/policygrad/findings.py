"""Findings: what was compared and how it came out; and the cause that explains how a tensor differs from the expected one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

Status = Literal["holds", "differs", "not checked"]

MAX_MATCHED_ROWS = 4096
"""More rows that differ are not searched for another order."""
MAX_LISTED_ROWS = 64


@dataclass(frozen=True)
class Finding:
    """One property of a run or of a recording, and whether it is as expected."""

    subject: str
    """What was compared, in a few words, such as `rewards`."""
    status: Status
    message: str
    """A sentence: what was compared with what, the difference, or why nothing was compared."""
    step: int | None = None
    """The step of a run; None for its files as a whole, and for a recording."""
    error: float | None = None
    """Largest difference, relative to the largest number; None where no numbers were compared."""
    factor: float | None = None
    """The value over the expected one, where they differ by a factor."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, which has no NaN and no infinity."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


class FindingOutput(TypedDict):
    """What was compared, and how it came out."""

    subject: str
    status: Literal["holds", "differs", "not checked"]
    message: str
    step: int | None
    error: float | None
    """Largest difference, relative to the largest number."""
    factor: float | None
    """The value over the expected one, where they differ by a factor."""


def holds(
    subject: str, message: str, step: int | None = None, error: float | None = None, factor: float | None = None
) -> Finding:
    """Return a finding that all is as expected."""
    return Finding(subject, "holds", message, step, error, factor)


def differs(
    subject: str, message: str, step: int | None = None, error: float | None = None, factor: float | None = None
) -> Finding:
    """Return a finding of a difference."""
    return Finding(subject, "differs", message, step, error, factor)


def not_checked(subject: str, message: str, step: int | None = None) -> Finding:
    """Return a finding that nothing was compared, for the reason `message`."""
    return Finding(subject, "not checked", message, step)


@dataclass(frozen=True)
class Tolerance:
    """How far two numbers may be apart: atol + rtol·|expected| + of_largest·max|expected|. Bit for bit where all are 0."""

    rtol: float = 0.0
    atol: float = 0.0
    of_largest: float = 0.0
    """Absolute where every expected number is 0."""

    @property
    def is_exact(self) -> bool:
        return not (self.rtol or self.atol or self.of_largest)

    def allows(self, expected: Tensor, actual: Tensor) -> Tensor:
        """Return, element by element, whether the two are close enough; NaN equals NaN, and integers must be equal."""
        if not (expected.is_floating_point() or actual.is_floating_point()):
            return expected == actual
        x, y = expected.double(), actual.double()
        same = (x == y) | (x.isnan() & y.isnan())
        if self.is_exact:
            return same
        sizes = x.abs().nan_to_num(0.0, posinf=0.0)
        largest = (float(sizes.max()) if sizes.numel() else 0.0) or 1.0
        return same | ((x - y).abs() <= self.atol + self.rtol * sizes + self.of_largest * largest)

    def __str__(self) -> str:
        if self.is_exact:
            return "bit for bit"
        parts = [(self.rtol, " of the value"), (self.atol, ""), (self.of_largest, " of the largest value")]
        return "within " + " plus ".join(f"{bound:g}{text}" for bound, text in parts if bound)


EXACT = Tolerance()
ROUNDING = Tolerance(rtol=1e-6, of_largest=2e-7)
"""In float32, of numbers that were multiplied, or added to."""


@dataclass(frozen=True)
class Difference:
    """How a tensor differs from the expected one."""

    message: str
    error: float | None = None
    """Largest difference over the largest expected number; None for integers, and for tensors of different shapes."""
    factor: float | None = None
    """The tensor over the expected one, if that explains the difference."""


@dataclass(frozen=True, eq=False)
class Cause:
    """A possible cause of a difference."""

    message: str
    expected: Tensor
    """The numbers that the cause would give."""
    where: Tensor | None = None
    """Positions that it says something about, bool; None = all."""
    factor: float | None = None


def relative_error(x: Tensor, y: Tensor) -> float:
    """Return max|x − y|/max|x|; max|y| where x is 0."""
    if not x.numel():
        return 0.0
    scale, largest = float(x.abs().max()), float((x - y).abs().max())
    return largest / scale if scale else largest


def least_squares(actual: Tensor, basis: Tensor) -> float:
    """Return the factor f that minimises |actual − f·basis|²; 0 if the basis is 0."""
    norm = float((basis * basis).sum())
    return float((actual * basis).sum()) / norm if norm else 0.0


def explain_difference(
    expected: Tensor,
    actual: Tensor,
    mask: Tensor | None = None,
    tolerance: Tolerance = EXACT,
    causes: Iterable[Cause] = (),
    describe_factor: Callable[[float], str] = lambda factor: "",
) -> Difference | None:
    """Return how `actual` differs from `expected`, by the simplest cause that explains it all; None if it does not differ.

    The causes are a factor, an added constant, a shift by one token, exchanged, shifted or reordered rows, and then `causes`.
    Where none explains the difference, the message has the number of differences and the first of them.

    Args:
        expected, actual: [B, T], [B], or of any other shape; a shift by one token is looked for in [B, T].
        mask: Positions to compare, bool of the same shape. None = all.
        causes: What the caller knows may have happened.
        describe_factor: Returns text to append to a factor, such as which number it is.
    """
    if expected.shape != actual.shape:
        return Difference(f"shape {list(actual.shape)} instead of {list(expected.shape)}")
    mask = torch.ones(expected.shape, dtype=torch.bool, device=expected.device) if mask is None else mask
    is_float = expected.is_floating_point() or actual.is_floating_point()
    if is_float:
        expected, actual = expected.double(), actual.double()
    expected, actual = expected.masked_fill(~mask, 0), actual.masked_fill(~mask, 0)
    wrong = ~tolerance.allows(expected, actual)
    if not bool(wrong.any()):
        return None
    error = relative_error(expected[mask], actual[mask]) if is_float else None
    limit = ROUNDING if tolerance.is_exact else tolerance
    for cause in chain(
        _iter_scales(expected, actual, mask, describe_factor) if is_float else (),
        _iter_shifts(expected, mask),
        _iter_row_orders(expected, actual, mask, wrong),
        causes,
    ):
        where = mask if cause.where is None else mask & cause.where
        if bool((wrong & where).any()) and bool(limit.allows(cause.expected[where], actual[where]).all()):
            return Difference(cause.message, error, cause.factor)
    return Difference(_list_differences(expected, actual, mask, wrong), error)


def _iter_scales(
    expected: Tensor, actual: Tensor, mask: Tensor, describe_factor: Callable[[float], str]
) -> Iterator[Cause]:
    finite = mask & expected.isfinite() & actual.isfinite()
    x, y = expected[finite], actual[finite]
    every = "every value is " if expected.ndim else ""
    factor = least_squares(y, x)
    if factor and (int((x != 0).sum()) > 1 or not expected.ndim):  # one number is always a multiple of another
        text = f"{every}{factor:.6g} times as large{describe_factor(factor)}"
        yield Cause(text, factor * expected, factor=factor)
    if len(x) > 1:
        offset = float((y - x).mean())
        yield Cause(f"{every}{'larger' if offset > 0 else 'smaller'} by {abs(offset):.6g}", expected + offset)


def _iter_shifts(expected: Tensor, mask: Tensor) -> Iterator[Cause]:
    if expected.ndim != 2 or expected.shape[1] < 2:
        return
    for steps, side in ((1, "right"), (-1, "left")):
        where = mask.roll(steps, 1)
        where[:, 0 if steps > 0 else -1] = False
        yield Cause(f"shifted by one token to the {side}", expected.roll(steps, 1), where)


def _iter_row_orders(expected: Tensor, actual: Tensor, mask: Tensor, wrong: Tensor) -> Iterator[Cause]:
    rows = wrong.reshape(len(wrong), -1).any(1).nonzero().flatten() if wrong.ndim else wrong.new_zeros(0)
    if len(rows) < 2:
        return
    order = torch.arange(len(expected), device=expected.device)
    if len(rows) == 2:
        order[rows] = rows.flip(0)
        i, j = rows.tolist()
        yield Cause(f"rows {i} and {j} are exchanged", expected[order], mask[order])
        return
    for steps, word in ((1, "previous"), (-1, "next")):
        text = f"rows are shifted: each has the {word} row's numbers"
        yield Cause(text, expected.roll(steps, 0), mask.roll(steps, 0))
    if len(rows) > MAX_MATCHED_ROWS:
        return
    # Each row of `actual` is assigned to the nearest expected one; of expected rows that are equal, each is used once.
    x, y = (values[rows].reshape(len(rows), -1).double().nan_to_num() for values in (expected, actual))
    kinds = torch.unique(x, dim=0, return_inverse=True)[1]
    nearest = kinds[torch.cdist(y, x).argmin(1)]
    if torch.equal(nearest.sort().values, kinds.sort().values):
        order[rows[nearest.argsort(stable=True)]] = rows[kinds.argsort(stable=True)]
        listed = f": {order.tolist()}" if len(order) <= MAX_LISTED_ROWS else ""
        yield Cause(f"{len(rows)} rows are in another order{listed}", expected[order], mask[order])


def _list_differences(expected: Tensor, actual: Tensor, mask: Tensor, wrong: Tensor) -> str:
    places = wrong.nonzero()
    first = tuple(places[0].tolist())
    x, y = (
        f"{value:.7g}" if isinstance(value, float) else str(value)
        for value in (expected[first].item(), actual[first].item())
    )
    if not first:
        return f"{y} instead of {x}"
    place = ", ".join(f"{axis} {index}" for axis, index in zip(("row", "column", "entry"), first, strict=False))
    text = f"{len(places)} of {int(mask.sum())} values differ; the first, {place}, is {y} instead of {x}"
    if expected.dtype == torch.bool:
        added = int((actual & ~expected).sum())
        text += f"; {added} are True instead of False, {len(places) - added} False instead of True"
    elif expected.is_floating_point() and len(places) > 1:
        text += f"; the largest difference is {float((expected - actual)[wrong].abs().max()):.3g}"
    return text
