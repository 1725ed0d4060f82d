"""The figures of a comparison: by hand, by enumeration, and what must hold for any scores."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policygrad.compare.statistics import (
    bootstrap_band,
    estimate_iqm,
    first_crossing,
    interquartile_mean,
    mean_height,
    median_crossing,
    percentile_interval,
    probability_of_improvement,
    resample_indices,
    separation_by_chance,
)

QUICK = settings(max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SCORES = st.lists(st.floats(-10, 10, allow_subnormal=False).map(lambda x: round(x, 3)), min_size=1, max_size=7)


def test_interquartile_mean_by_hand() -> None:
    assert interquartile_mean([1.0, 2.0, 3.0]) == 2.0  # ⌊3/4⌋ = 0: the mean
    assert interquartile_mean([0.0, 10.0, 2.0, 4.0]) == 3.0
    assert interquartile_mean([100.0, 1.0, 2.0, 3.0, -50.0]) == 2.0
    assert interquartile_mean(list(range(8))) == 3.5
    assert interquartile_mean([0, 0, 3, 4, 5, 100, 100, 100]) == pytest.approx((3 + 4 + 5 + 100) / 4)
    np.testing.assert_array_equal(interquartile_mean([[1, 2, 3, 10], [0, 0, 0, 8]]), [2.5, 0.0])  # over the last axis


@QUICK
@given(SCORES, st.floats(-3, 3), st.floats(0.1, 3))
def test_interquartile_mean_follows_the_scores(scores: list[float], shift: float, scale: float) -> None:
    x = np.array(scores)
    assert x.min() - 1e-9 <= interquartile_mean(x) <= x.max() + 1e-9
    assert interquartile_mean(scale * x + shift) == pytest.approx(scale * interquartile_mean(x) + shift, abs=1e-9)
    assert interquartile_mean(x[::-1]) == interquartile_mean(x)


def test_statistics_equal_rliable() -> None:
    """What rliable 1.2.0 gives for these scores of five runs on two tasks; its intervals were of 50,000 and 20,000 draws."""
    x = [[0.62, 0.31], [0.70, 0.28], [0.55, 0.40], [0.81, 0.35], [0.66, 0.22]]
    y = [[0.58, 0.33], [0.66, 0.25], [0.60, 0.35], [0.49, 0.41]]
    result, above = estimate_iqm(x, reps=10_000), probability_of_improvement(x, y, reps=10_000)
    assert result.value == pytest.approx(0.4816666666666667, abs=1e-12)
    assert (result.low, result.high) == pytest.approx((0.43666667, 0.53166667), abs=0.004)
    assert estimate_iqm(y).value == pytest.approx(0.4575, abs=1e-12)
    assert above.value == pytest.approx(0.575, abs=1e-12)
    assert (above.low, above.high) == pytest.approx((0.325, 0.825), abs=0.02)


def test_strata_are_resampled_within_their_task() -> None:
    """Two tasks whose scores cannot be mistaken for one another: every replication has as many of each."""
    scores = np.array([[0.0, 100.0], [1.0, 101.0], [2.0, 102.0]])
    drawn = scores[resample_indices(3, 2, 500), np.arange(2)]
    assert drawn.shape == (500, 3, 2)
    assert (drawn[..., 0] <= 2).all()
    assert (drawn[..., 1] >= 100).all()
    first, second = resample_indices(3, 2, 500)[..., 0], resample_indices(3, 2, 500)[..., 1]
    assert (first != second).any()  # each task has runs of its own


def test_the_interval_is_that_of_all_resamples() -> None:
    """Of three runs all 27 resamples can be listed: their percentiles are what many drawn ones come to."""
    scores = [0.1, 0.5, 0.9]
    means = [np.mean(draw) for draw in itertools.product(scores, repeat=3)]
    low, high = np.percentile(means, [2.5, 97.5], method="inverted_cdf")
    result = estimate_iqm(scores, reps=20_000)
    assert result.value == pytest.approx(0.5)
    assert (result.low, result.high) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))


def test_intervals_have_their_coverage() -> None:
    draw = np.random.default_rng(0)
    inside = 0
    for seed in range(150):
        result = estimate_iqm(draw.normal(size=20), reps=300, seed=seed)
        inside += result.low <= 0.0 <= result.high
    assert 0.85 <= inside / 150 <= 1.0  # the percentile interval of an IQM of 20 is near its 95 %


def test_percentiles_of_replications() -> None:
    low, high = percentile_interval(np.arange(101.0), level=0.9)
    assert (low, high) == pytest.approx((5.0, 95.0))


def test_a_band_contains_its_line_and_vanishes_for_equal_runs() -> None:
    curves = [[0.0, 1.0, 2.0], [0.0, 2.0, 2.0], [0.0, 3.0, 2.0], [0.0, 9.0, 2.0], [0.0, -5.0, 2.0]]
    value, low, high = bootstrap_band(curves)
    np.testing.assert_allclose(value, [0.0, 2.0, 2.0])
    assert low[0] == high[0] == 0.0
    assert low[2] == high[2] == 2.0
    assert low[1] < 2.0 < high[1]


def test_probability_of_improvement_by_hand() -> None:
    assert probability_of_improvement([1, 2, 3], [0, 0, 0]).value == 1.0
    assert probability_of_improvement([1, 3], [2, 2]).value == 0.5
    assert probability_of_improvement([1, 2], [1, 2]).value == 0.5  # (½ + 0 + 1 + ½)/4
    assert probability_of_improvement([2, 5, 5], [1, 5]).value == pytest.approx((1 + 0 + 1 + 0.5 + 1 + 0.5) / 6)
    two = probability_of_improvement([[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]])
    assert two.value == pytest.approx((1 + 0.25) / 2)  # the mean over tasks
    assert (two.low, two.high) != (two.value, two.value)
    with pytest.raises(ValueError, match="1 tasks cannot be compared with scores on 2"):
        probability_of_improvement([1.0], [[1.0, 2.0]])


@QUICK
@given(SCORES, SCORES)
def test_one_of_two_rows_is_above_the_other(x: list[float], y: list[float]) -> None:
    above, below = probability_of_improvement(x, y, reps=50), probability_of_improvement(y, x, reps=50)
    assert above.value + below.value == pytest.approx(1.0)
    assert 0.0 <= above.low <= above.high <= 1.0
    assert probability_of_improvement(x, x, reps=10).value == 0.5
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in x for b in y]
    assert above.value == pytest.approx(sum(pairs) / len(pairs))


def test_equal_rows_are_rarely_separated() -> None:
    assert separation_by_chance(1, 1) == 1.0
    assert separation_by_chance(2, 2) == pytest.approx(1 / 3)  # 2 of the 6 orders of who is whose
    assert separation_by_chance(5, 5) == pytest.approx(2 / 252)
    draw = np.random.default_rng(0).normal(size=(4000, 6))
    apart = (draw[:, :3].min(1) > draw[:, 3:].max(1)) | (draw[:, 3:].min(1) > draw[:, :3].max(1))
    assert apart.mean() == pytest.approx(separation_by_chance(3, 3), abs=0.02)


def test_curves_are_interpolated_linearly() -> None:
    assert mean_height([0, 10], [0.0, 1.0], 10) == pytest.approx(0.5)
    assert mean_height([0, 10, 20], [0.0, 1.0, 1.0], 20) == pytest.approx(0.75)
    assert mean_height([0, 10, 20], [0.0, 1.0, 1.0], 15) == pytest.approx((5 + 5) / 15)  # cut between points
    assert mean_height([0, 10], [0.3, 0.5], 0) == 0.3


@QUICK
@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.floats(0.1, 3))
def test_the_area_of_a_constant_curve_is_its_value(heights: list[float], end: float) -> None:
    xs = np.linspace(0, 3, len(heights))
    assert mean_height(xs, np.full(len(heights), 0.7), end) == pytest.approx(0.7)
    assert min(heights) - 1e-9 <= mean_height(xs, heights, end) <= max(heights) + 1e-9


def test_where_a_curve_first_crosses() -> None:
    xs, ys = [0, 10, 20, 30], [0.2, 0.4, 0.3, 0.9]
    assert first_crossing(xs, ys, 0.3) == pytest.approx(5)
    assert first_crossing(xs, ys, 0.6) == pytest.approx(25)
    assert first_crossing(xs, ys, 0.1) == 0.0
    assert first_crossing(xs, ys, 0.4) == 10.0
    assert first_crossing(xs, ys, 0.95) is None


def test_a_run_that_never_reaches_the_threshold_is_not_ignored() -> None:
    assert median_crossing([1.0, 2.0, None]) == 2.0
    assert median_crossing([1.0, None, None]) is None
    assert median_crossing([1.0, 3.0]) == 2.0
    assert median_crossing([1.0, None]) is None  # halfway to never is never
    assert median_crossing([None]) is None
