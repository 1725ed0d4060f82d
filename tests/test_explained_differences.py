"""The cause of a difference between two tensors is named; equal ones have none, within the tolerance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from policygrad.findings import EXACT, Cause, Tolerance, differs, explain_difference

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
MASK = torch.arange(5) < torch.tensor([5, 3, 4, 2, 5, 3])[:, None]
TIES = torch.tensor([0.0, 1, 1, 0, 0, 1])


def altered(x: Tensor, row: int, column: int) -> Tensor:
    x = x.clone()
    x[row, column] += 1
    return x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: 0.3 * x, "every value is 0.3 times as large"),
        (lambda x: x - 0.5, "every value is smaller by 0.5"),
        (lambda x: x.roll(1, 1), "shifted by one token to the right"),
        (lambda x: x.roll(-1, 1), "shifted by one token to the left"),
        (lambda x: x[[0, 4, 2, 3, 1, 5]], "rows 1 and 4 are exchanged"),
        (lambda x: x.roll(-1, 0), "rows are shifted: each has the next row's numbers"),
        (lambda x: x[[2, 0, 1, 3, 4, 5]], "3 rows are in another order: [2, 0, 1, 3, 4, 5]"),
        (lambda x: altered(x, 3, 1), "the first, row 3, column 1, is"),
    ],
)
@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("tolerance", [EXACT, Tolerance(of_largest=1e-6), Tolerance(1e-6, 1e-6)])
def test_each_cause_is_named(
    change: Callable[[Tensor], Tensor], message: str, mask: Tensor | None, tolerance: Tolerance
) -> None:
    noise = X if mask is None else X.masked_fill(~mask, torch.nan)  # off the mask nothing is read
    difference = explain_difference(noise, change(X), mask, tolerance)
    assert difference is not None
    assert message in difference.message
    assert difference.factor == (pytest.approx(0.3) if "0.3" in message else None)
    assert explain_difference(X, X.clone(), mask, tolerance) is None


def test_of_equal_rows_each_is_used_once() -> None:
    difference = explain_difference(TIES, TIES[[1, 0, 4, 3, 2, 5]])
    assert difference is not None
    assert "4 rows are in another order" in difference.message
    changed = explain_difference(TIES, torch.tensor([1.0, 1, 1, 1, 0, 0]))  # one 1 more
    assert changed is not None
    assert "3 of 6 values differ" in changed.message


def test_an_altered_first_token_is_no_shift() -> None:
    constant = torch.ones(2, 4)
    difference = explain_difference(constant, altered(constant, 0, 0))
    assert difference is not None
    assert difference.message == "1 of 8 values differ; the first, row 0, column 0, is 2 instead of 1"


def test_a_given_cause_comes_before_the_list() -> None:
    difference = explain_difference(X, X.exp(), causes=[Cause("e to the number", X.double().exp(), factor=2.0)])
    assert difference is not None
    assert (difference.message, difference.factor) == ("e to the number", 2.0)


def test_integers_shapes_and_single_numbers() -> None:
    large = torch.tensor([2**60, 2**60 + 1])  # equal in float64
    assert explain_difference(large, large + 1, tolerance=Tolerance(0.1)) is not None
    shapes = explain_difference(torch.zeros(2), torch.zeros(3))
    assert shapes is not None
    assert shapes.message == "shape [3] instead of [2]"
    single = explain_difference(torch.tensor(2.0), torch.tensor(0.5), describe_factor=lambda factor: ": a quarter")
    assert single is not None
    assert single.message == "0.25 times as large: a quarter"


def test_tolerances_and_json() -> None:
    x = torch.tensor([1.0, 100.0, torch.nan])
    assert Tolerance(of_largest=1e-2).allows(x, x + 0.5).all()
    assert Tolerance(rtol=1e-2).allows(x, x + 0.5).tolist() == [False, True, True]
    assert str(EXACT) == "bit for bit"
    assert str(Tolerance(1e-3, 1e-4)) == "within 0.001 of the value plus 0.0001"
    assert differs("loss", "no number", error=float("inf")).as_dict()["error"] is None
