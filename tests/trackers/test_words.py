"""Numbers, times and completions as short text that is safe to print."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.trackers import format_change
from policygrad.trackers.console import format_count, format_duration, format_number, strip_control_chars, to_one_line


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.414, "0.41"), (0, "0.00"), (0.0031, "0.003"), (0.000021, "2e-05"), (14.23, "14.2"), (1234.5, "1,234"), (-0.5, "-0.50"),
     (math.nan, "nan"), (-math.inf, "-inf"), (1e30, "1.0e+30"), (0.0999, "0.10"), (0.00096, "0.001")],
)  # fmt: skip
def test_numbers_are_shortened(value, text):
    assert format_number(value) == text


def test_formats_of_counts_durations_and_changes():
    assert [format_count(x) for x in (812, 2100, 9990, 21_000, 999_900, 3.4e6, math.nan)] == [
        "812", "2.1k", "10k", "21k", "1.0M", "3.4M", "nan",
    ]  # fmt: skip
    assert [format_duration(x) for x in (0.4, 59.7, 100, 3600, 7500, 90_000)] == [
        "0s",
        "1m00s",
        "1m40s",
        "1h00m",
        "2h05m",
        "1d01h",
    ]
    assert format_change(0.31, 0.74) == "0.31 -> 0.74  (+0.43)"
    assert format_change(0.31, 0.74, half_width=0.05) == "0.31 -> 0.74  (+0.43 ± 0.05 at 95 %)"
    assert format_change(0.15, 0.09, half_width=0.08) == "0.15 -> 0.09  (-0.06 ± 0.08 at 95 %, within noise)"


@given(st.text())
def test_cleaned_text_has_no_terminal_control(text):
    assert all(
        char == "\n" or char.isprintable() or char == " " or char.isspace() for char in strip_control_chars(text)
    )
    assert not set(strip_control_chars(text)) & {
        *map(chr, range(10)),
        *map(chr, range(11, 32)),
        *map(chr, range(127, 160)),
        "\u202e",
    }
    strip_control_chars(text).encode()


def test_shortening_to_one_line_keeps_both_ends():
    assert to_one_line(" a\nb ") == "a\\nb"
    text = to_one_line("start" + "x" * 1000 + "end")
    assert text.startswith("start")
    assert text.endswith("end")
    assert len(text) < 130
