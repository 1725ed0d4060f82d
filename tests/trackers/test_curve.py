"""The reward's curve: its axes, its smoothed line, and the terminal's drawing of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.trackers.live_view import choose_axis_limits, choose_x_end, smooth_values
from policygrad.trackers.rich_display import plot_points


def test_smoothing_by_hand():
    assert smooth_values([2.0] * 9, 3.0) == pytest.approx([2.0] * 9)
    assert smooth_values([0.0, 1.0, 0.0], 1e-6) == pytest.approx([0.0, 1.0, 0.0])
    line = smooth_values([0.0] * 10 + [1.0] * 10, 2.0)
    assert line == sorted(line)
    assert line[9] + line[10] == pytest.approx(1.0)  # no delay: the step stays in the middle


def test_the_step_axis_is_at_least_half_used_and_ends_with_the_run():
    ends = [choose_x_end(step, 200) for step in range(1, 201)]
    assert ends[0] == 13
    assert ends[-1] == 200
    assert ends == sorted(ends)
    assert all(end >= step for step, end in enumerate(ends, 1))
    assert all(end <= 2 * step for step, end in enumerate(ends, 1) if step > 10)
    assert len(set(ends)) == 5  # it rarely changes
    assert choose_x_end(1, 1) == 2


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=40), st.integers(4, 70), st.integers(2, 10))
def test_any_curve_can_be_plotted(values, columns, rows):
    low, high = choose_axis_limits(values)
    slack = 1e-6 * (high - low)
    assert low - slack <= min(values) <= max(values) <= high + slack
    assert low < high
    picture, _, _ = plot_points(list(enumerate(values, 1)), max(len(values), 2), columns, rows)
    for row in range(rows):
        cells = picture.row(row)
        assert len(cells) == columns
        assert all(char == " " or 0x2800 < ord(char) < 0x2900 for char, _ in cells)


def test_a_rising_curve_is_plotted_rising():
    picture, low, high = plot_points([(step, step / 100) for step in range(1, 101)], 100, 20, 5)
    assert (low, high) == pytest.approx((0.0, 1.0))
    heights = [[row for row in range(5) if picture.row(row)[column][1]] for column in range(20)]
    assert all(heights)  # no gaps
    assert heights[0] == [4]
    assert heights[-1] == [0]
    assert [min(h) for h in heights] == sorted((min(h) for h in heights), reverse=True)
