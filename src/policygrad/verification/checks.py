"""The result of a check, and descriptions of how two tensors that should be equal differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Status = Literal["holds", "fails", "not checked"]


@dataclass(frozen=True)
class Check:
    """One property of a run, and whether it holds."""

    subject: str
    """What is checked, in a few words, such as `rewards`."""
    status: Status
    message: str
    """A sentence: what was compared with what, the difference, or why nothing was compared."""
    step: int | None = None
    """None = the run's files as a whole."""


def holds(subject: str, message: str, step: int | None = None) -> Check:
    """Return a check that holds."""
    return Check(subject, "holds", message, step)


def fails(subject: str, message: str, step: int | None = None) -> Check:
    """Return a check that fails."""
    return Check(subject, "fails", message, step)


def not_checked(subject: str, message: str, step: int | None = None) -> Check:
    """Return a check that could not be made, for the reason `message`."""
    return Check(subject, "not checked", message, step)


@dataclass(frozen=True)
class Tolerance:
    """How far two numbers may be apart: atol + rtol·|expected|. Bit for bit where both are 0."""

    rtol: float = 0.0
    atol: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.rtol == 0 and self.atol == 0

    def allows(self, expected: Tensor, actual: Tensor) -> Tensor:
        """Return, element by element, whether the two are close enough; NaN equals NaN."""
        x, y = expected.double(), actual.double()
        same = (x == y) | (x.isnan() & y.isnan())
        return same if self.is_exact else same | ((x - y).abs() <= self.atol + self.rtol * x.abs())

    def __str__(self) -> str:
        return "bit for bit" if self.is_exact else f"within {self.rtol:g} of the value plus {self.atol:g}"


EXACT = Tolerance()


def describe_difference(
    expected: Tensor, actual: Tensor, mask: Tensor | None = None, tolerance: Tolerance = EXACT
) -> str:
    """Return how `actual` differs from `expected`, or "" if it does not, in the words of the simplest cause that explains it all:
    a factor, a shift by one token, exchanged rows; otherwise the number of differences and the first of them.

    Args:
        expected, actual: [B, T] or [B].
        mask: [B, T] bool; the tokens to compare. None = all.
    """
    if expected.shape != actual.shape:
        return f"has shape {list(actual.shape)} instead of {list(expected.shape)}"
    if mask is not None:
        expected, actual = expected.masked_fill(~mask, 0), actual.masked_fill(~mask, 0)
    differs = ~tolerance.allows(expected, actual)
    if not bool(differs.any()):
        return ""
    for explain in (_as_factor, _as_shift, _as_exchange, _as_order):
        if text := explain(expected, actual, tolerance):
            return text
    return _as_list(expected, actual, differs)


def _equal(x: Tensor, y: Tensor, tolerance: Tolerance) -> bool:
    return bool(tolerance.allows(x, y).all())


def _as_factor(expected: Tensor, actual: Tensor, tolerance: Tolerance) -> str:
    if not expected.is_floating_point():
        return ""
    x, y = expected.double().flatten(), actual.double().flatten()
    counts = x != 0
    if int(counts.sum()) < 2 or bool((y[~counts] != 0).any()):
        return ""
    factors = y[counts] / x[counts]
    factor = float(factors.median())
    rounding = 1e-6 + tolerance.rtol
    if factor != 0 and bool(((factors - factor).abs() <= rounding * abs(factor)).all()):
        return f"every value is {factor:.4g} times what it should be"
    return ""


def _as_shift(expected: Tensor, actual: Tensor, tolerance: Tolerance) -> str:
    if expected.ndim != 2 or expected.shape[1] < 2:
        return ""
    if _equal(expected[:, :-1], actual[:, 1:], tolerance):
        return "is shifted by one token to the right"
    if _equal(expected[:, 1:], actual[:, :-1], tolerance):
        return "is shifted by one token to the left"
    return ""


def _as_exchange(expected: Tensor, actual: Tensor, tolerance: Tolerance) -> str:
    rows = _differing_rows(expected, actual, tolerance)
    if len(rows) != 2:
        return ""
    i, j = rows
    exchanged = _equal(expected[i], actual[j], tolerance) and _equal(expected[j], actual[i], tolerance)
    return f"rows {i} and {j} are exchanged" if exchanged else ""


def _as_order(expected: Tensor, actual: Tensor, tolerance: Tolerance) -> str:
    rows = _differing_rows(expected, actual, tolerance)
    if not 2 < len(rows) <= 4096:
        return ""

    def keys(x: Tensor) -> list[bytes]:
        return sorted(x[row].contiguous().flatten().view(torch.uint8).numpy().tobytes() for row in rows)

    return f"{len(rows)} rows are in another order" if keys(expected) == keys(actual) else ""


def _differing_rows(expected: Tensor, actual: Tensor, tolerance: Tolerance) -> list[int]:
    differs = ~tolerance.allows(expected, actual)
    rows: list[int] = (differs.any(1) if differs.ndim == 2 else differs).nonzero().flatten().tolist()
    return rows


def _as_list(expected: Tensor, actual: Tensor, differs: Tensor) -> str:
    places = differs.nonzero().tolist()
    first = tuple(places[0])
    x, y = expected[first].item(), actual[first].item()
    where = f"row {first[0]}" + (f", token {first[1]}" if len(first) > 1 else "")
    text = (
        f"{len(places)} of {differs.numel()} values differ; the first, {where}, is {_number(y)} instead of {_number(x)}"
    )
    if expected.is_floating_point() and len(places) > 1:
        gap = (expected.double() - actual.double())[differs].abs()
        text += f"; the largest difference is {float(gap.max()):.3g}"
    return text


def _number(x: float) -> str:
    return f"{x:.7g}" if isinstance(x, float) else str(x)
