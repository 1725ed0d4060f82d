"""The calculator is exact, reads arithmetic and nothing else, and cannot be kept busy."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.environments.calculator import calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("123456789 * 987654321", "121932631112635269"),
        (" (12345 - 678) * 90 / 7 ", "1050030/7"),
        ("0.1 + 0.2", "3/10"),
        ("-2 ** 2", "-4"),
        ("2 ** -3", "1/8"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** 100", "1267650600228229401496703205376"),
    ],
)
def test_arithmetic_is_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@given(st.integers(), st.integers(), st.integers(1))
def test_arithmetic_equals_python_s(a: int, b: int, c: int) -> None:
    assert calculate(f"({a} + {b}) * {a} - {b} / {c}") == str((a + b) * a - Fraction(b, c))


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("9**9**9**9", "too large"),
        ("(9**2000)*(9**2000)*(9**2000)", "too large"),
        ("2 ** 0.5", "no whole number"),
        ("__import__('os')", "is no arithmetic"),
        ("[1][0]", "is no arithmetic"),
        ("'a' * 9", "is no arithmetic"),
        ("True + 1", "is no arithmetic"),
        ("1 if 1 else 2", "is no arithmetic"),
        ("1 +", "is no arithmetic"),
        ("", "is no arithmetic"),
        ("(" * 300, "is no arithmetic"),
        ("1" + "+1" * 150, "longer than 300"),
        ("1e400000", "too large"),
        ("-" * 290 + "x", "is no arithmetic"),
    ],
)
def test_unsupported_expressions_are_refused(expression: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        calculate(expression)


def test_division_by_zero_is_reported() -> None:
    with pytest.raises(ZeroDivisionError):
        calculate("1 / (2 - 2)")
    with pytest.raises(ZeroDivisionError):
        calculate("0 ** -1")
