"""The clock of a run: by hand, against itself, and what can never be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.planning.pipeline import LearnerSpeed, SamplerSpeed, enough, simulate

ONE = SamplerSpeed(fixed=0.0, each=1.0, slots=1)  # a token a second
lengths = st.lists(st.integers(0, 20), min_size=1, max_size=12)


def test_slots_are_refilled_as_completions_end() -> None:
    speed = SamplerSpeed(fixed=1.0, each=0.5, slots=2, start=3.0)
    # 4 and 1 together for one token (2 s), then 4's other three beside 3 (3 · 2 s)
    assert speed([4, 1, 3]) == 3.0 + 2.0 + 6.0
    assert speed([4, 3, 1]) == 3.0 + 3 * 2.0 + 2.0
    assert speed([0, 0]) == 3.0
    assert SamplerSpeed(1.0, 0.5, 1, 3.0)([4, 1, 3]) == 3.0 + 8 * 1.5


def test_lock_step_is_the_sum() -> None:
    found = simulate([[2, 2], [5]], ONE, LearnerSpeed(1.0, 0.5, 0.25), 0)
    assert found.sampled == (4.0, 4.0 + 3.0 + 0.25 + 5.0)
    assert found.ended == (7.25, 7.25 + 5.0 + 3.5 + 0.25)
    assert found.waited == (4.0, 5.0)
    assert found.seconds == 16.0
    assert found.learner_idle == 9 / 16
    assert found.sampler_idle == 7 / 16


def test_beside_an_update_a_step_takes_the_longer_of_both() -> None:
    rollouts, learner = [[4]] * 4, LearnerSpeed(3.0, 0.0, 1.0)
    found = simulate(rollouts, ONE, learner, 1)
    assert found.ended == (4.0 + 4.0 + 1.0, 14.0, 19.0, 19.0 + 3.0 + 1.0)  # nothing is drawn beside the last one
    assert found.waited == (4.0 + 1.0, 1.0, 1.0, 0.0)
    deeper = simulate(rollouts, ONE, learner, 2)
    assert deeper.sampled[0] == 8.0  # two are drawn first, by the same weights
    assert deeper.seconds == 8.0 + 5.0 + 5.0 + 4.0 + 4.0


def test_a_sampler_that_takes_weights_in_flight_draws_on() -> None:
    rollouts, learner = [[4], [1], [7], [4]], LearnerSpeed(3.0, 0.0, 1.0)
    found = simulate(rollouts, ONE, learner, 1, in_flight=True)
    # 1: 0–4. 2: 4–5, taken at 8. 3: 8–16, resting 11–12. 4: 16–21, resting 19–20
    assert found.sampled == (4.0, 8.0, 16.0, 21.0)
    assert found.ended == (8.0, 12.0, 20.0, 25.0)
    assert found.waited == (4.0, 0.0, 4.0, 1.0)
    deeper = simulate(rollouts, ONE, learner, 2, in_flight=True)
    # 2: 4–5. 3: 5–14, resting 7–8 and 11–12. 4: 14–19, resting 17–18
    assert deeper.sampled == (4.0, 8.0, 14.0, 19.0)


@given(st.lists(lengths, min_size=1, max_size=8), st.floats(0.1, 5), st.floats(0, 2), st.integers(0, 5), st.booleans())
def test_no_run_is_faster_than_the_slower_of_both_nor_slower_than_lock_step(
    rollouts: list[list[int]], update: float, publish: float, staleness: int, in_flight: bool
) -> None:
    learner = LearnerSpeed(update, 0.0, publish)
    found = simulate(rollouts, ONE, learner, staleness, in_flight=in_flight)
    together = simulate(rollouts, ONE, learner, 0)
    learning, drawing = len(rollouts) * (update + publish), sum(map(sum, rollouts))
    assert found.seconds >= max(learning, drawing) - 1e-9
    assert found.seconds <= together.seconds + 1e-9
    assert found.seconds == pytest.approx(learning + sum(found.waited))
    assert all(a <= b for a, b in zip(found.sampled, found.ended, strict=True))
    assert 0 <= found.sampler_idle <= 1


@given(st.lists(lengths, min_size=2, max_size=8), st.floats(0, 5), st.integers(1, 4))
def test_more_room_is_never_slower_for_a_sampler_that_draws_on(
    rollouts: list[list[int]], update: float, staleness: int
) -> None:
    learner = LearnerSpeed(update, 0.0, 0.5)
    some, more = (simulate(rollouts, ONE, learner, k, in_flight=True).seconds for k in (staleness, staleness + 1))
    assert more <= some + 1e-9


def test_the_first_that_is_fast_enough() -> None:
    assert enough([4.0, 2.01, 2.0, 2.0]) == 1
    assert enough([4.0, 2.1, 2.0]) == 2
    assert enough([1.0]) == 0


def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rollout"):
        simulate([], ONE, LearnerSpeed(1, 1, 1), 0)
    with pytest.raises(ValueError, match="not 1 and -1"):
        simulate([[1]], ONE, LearnerSpeed(1, 1, 1), -1)
