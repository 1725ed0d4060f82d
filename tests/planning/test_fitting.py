"""Speeds from seconds: what is known is found again, and what hangs on each other is no riddle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.planning.pipeline import LearnerSpeed, SamplerSpeed
from staleness_model import fit_learner_speed, fit_nonnegative, fit_sampler_speed

ROLLOUTS = [[3, 9, 4, 4], [1, 1, 20, 2], [7, 7, 7, 7], [12, 2, 2, 30], [5]]
SPEED = st.floats(0.01, 3)


@given(SPEED, SPEED, SPEED, SPEED)
def test_speeds_are_found_again(fixed: float, each: float, start: float, publish: float) -> None:
    sampler, learner = SamplerSpeed(fixed, each, 2, start), LearnerSpeed(fixed, each, publish)
    result = fit_sampler_speed(ROLLOUTS, [sampler(r) for r in ROLLOUTS], 2)
    assert result.max_concurrency == 2
    assert (result.fixed, result.per_completion, result.startup) == pytest.approx(
        (fixed, each, start), rel=1e-3, abs=1e-3
    )
    other = fit_learner_speed(ROLLOUTS, [learner(r) for r in ROLLOUTS], publish)
    assert (other.fixed, other.per_token, other.publish) == pytest.approx((fixed, each, publish), rel=1e-3, abs=1e-3)


@given(st.lists(st.floats(0, 10), min_size=5, max_size=5))
def test_nothing_is_less_than_0_and_no_constant_is_better(seconds: list[float]) -> None:
    result = fit_sampler_speed(ROLLOUTS, seconds, 2)
    assert min(result.fixed, result.per_completion, result.startup) >= 0
    mean = sum(seconds) / len(seconds)
    error = sum((result(r) - y) ** 2 for r, y in zip(ROLLOUTS, seconds, strict=True))
    assert error <= sum((mean - y) ** 2 for y in seconds) + 1e-6 * sum(y * y for y in seconds) + 1e-12


def test_a_slope_by_hand() -> None:
    """y = 1, 2, 4 at x = 0, 1, 2: slope 3/2, 5/6 at 0. Downhill, the mean stands for all."""
    assert fit_nonnegative([[0, 1, 2], [1, 1, 1]], [1, 2, 4]) == pytest.approx([1.5, 5 / 6])
    assert fit_nonnegative([[0, 1, 2], [1, 1, 1]], [4, 2, 1]) == pytest.approx([0, 7 / 3])
    assert fit_nonnegative([[1, 1], [0, 0]], [0, 0]) == [0, 0]


def test_columns_that_hang_on_each_other_are_the_first_of_them() -> None:
    alike = [[4, 4]] * 3
    result = fit_sampler_speed(alike, [16.0, 15.0, 17.0], 2)
    assert (result.fixed, result.per_completion, result.startup) == (0, pytest.approx(2), 0)
    assert result([4, 4]) == pytest.approx(16)
    with pytest.raises(ValueError, match="at least one measurement"):
        fit_sampler_speed([], [], 2)
