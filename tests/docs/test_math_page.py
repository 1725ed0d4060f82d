"""The table of `math` against math-verify: how answers are rewritten, and what the page shows."""

import pytest
from measure_math import RIGHT, WRONG, cases, other

from pages.blocks import math_block
from pages.markdown import load


def written(answer, rewrites):
    return {name: text for name, _, text in cases([answer], rewrites)}


def test_right_answers_are_written_in_other_ways():
    result = written("1234", RIGHT)
    assert [result[name] for name in ("1,234", "18.00", "36/2", "9 + 9", "18 = x")] == [
        "1,234",
        "1234.00",
        "2468/2",
        "1227 + 7",
        "1234 = x",
    ]
    assert written("y = 2x", RIGHT)["equation turned around"] == "2x = y"
    assert written(r"\frac{1}{2}", RIGHT)[r"\dfrac"] == r"\dfrac{1}{2}"
    assert written("a + b", RIGHT)["b + a"] == "b + a"
    assert "b + a" not in written(r"\frac{a + b}{2}", RIGHT)


def test_wrong_answers_differ_from_their_reference():
    for answer in ("18", "0", "-5", "121", r"\frac{3}{4}", "(3,3)", "(1,2)", r"(3,\infty)", "2x^2"):
        assert answer not in written(answer, WRONG).values()
    assert written("2x^2", WRONG)["the first figure"] == "3x^2"  # not the exponent
    assert written("(1,2)", WRONG)["a point's coordinates"] == "(2,1)"
    assert other(["18", "18", "9"], 0) == "9"


def test_the_page_shows_sums_and_the_ways_of_writing_that_fail():
    row = {
        "name": "1,234",
        "answers": 1000,
        "errors": {"policygrad": 0, "math_verify": 2},
        "examples": {"math_verify": [["1", "|2|"]]},
    }
    result = {
        "measured_by": "python it.py",
        "versions": {"sympy": "1"},
        "right": {"MATH": [row]},
        "wrong": {"MATH": []},
    }
    block = math_block(result)
    assert "| MATH | 1,000 | 0 | 2 |" in block
    assert "| MATH, right | 1,234 | 1,000 | 0 | 2 | `1` and `\\|2\\|` |" in block
    assert "Not run yet" in math_block({})


@pytest.mark.parametrize(("kind", "most"), [("right", 1e-3), ("wrong", 1e-3)])
def test_what_was_measured_is_as_good_as_the_issue_asks(kind, most):
    """Errors of `math` are a thousandth of the answers at most, and no more than math-verify's."""
    rows = [row for ways in load("math_rewards")[kind].values() for row in ways]
    mine, theirs = (sum(row["errors"][judge] for row in rows) for judge in ("policygrad", "math_verify"))
    assert mine <= theirs
    assert mine <= most * sum(row["answers"] for row in rows)
