"""The table of docs/scaling.md that a measurement fills."""

from __future__ import annotations

from pages.blocks import accuracy_block


def test_a_row_per_number_of_processes() -> None:
    runs = {
        "1": {"0": {"before": 0.2, "after": 0.9}, "10": {"before": 0.3, "after": 0.8}},
        "2": {"0": {"before": 0.2, "after": 0.91}},
    }
    rows = [line for line in accuracy_block({"runs": runs, "versions": {"torch": "2"}}).splitlines() if "|" in line]
    assert rows[0] == "| processes | before | seed 0 | seed 10 | mean |"
    assert rows[2:] == ["| 1 | 0.250 | 0.900 | 0.800 | 0.850 |", "| 2 | 0.200 | 0.910 | – | 0.910 |"]


def test_it_says_that_nothing_was_run() -> None:
    assert "Not run yet" in accuracy_block({})
