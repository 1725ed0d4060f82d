"""The clock of a run: by hand, against itself, and what can never be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.planning.pipeline import LearnerSpeed, SamplerSpeed, Timeline, simulate
from staleness_model import find_best_staleness, resample_lengths, smallest_sufficient

ONE = SamplerSpeed(fixed=0.0, per_completion=1.0, max_concurrency=1)  # a token a second
lengths = st.lists(st.integers(0, 20), min_size=1, max_size=12)


def test_slots_are_refilled_as_completions_end() -> None:
    speed = SamplerSpeed(fixed=1.0, per_completion=0.5, max_concurrency=2, startup=3.0)
    # 4 and 1 together for one token (2 s), then 4's other three beside 3 (3 · 2 s)
    assert speed([4, 1, 3]) == 3.0 + 2.0 + 6.0
    assert speed([4, 3, 1]) == 3.0 + 3 * 2.0 + 2.0
    assert speed([0, 0]) == 3.0
    assert SamplerSpeed(1.0, 0.5, 1, 3.0)([4, 1, 3]) == 3.0 + 8 * 1.5


def test_lock_step_is_the_sum() -> None:
    result = simulate([[2, 2], [5]], ONE, LearnerSpeed(1.0, 0.5, 0.25), 0)
    assert result.rollout_ready == (4.0, 4.0 + 3.0 + 0.25 + 5.0)
    assert result.step_ends == (7.25, 7.25 + 5.0 + 3.5 + 0.25)
    assert result.learner_waits == (4.0, 5.0)
    assert result.step_ends[-1] == 16.0
    assert result.idle_fractions(slice(0, 2)) == (9 / 16, 7 / 16)
    assert (result.steady_state, result.step_seconds) == (slice(1, 2), 8.75)
    assert (result.learner_idle, result.sampler_idle) == result.idle_fractions() == (5 / 8.75, 1 - 5 / 8.75)


def test_beside_an_update_a_step_takes_the_longer_of_both() -> None:
    rollouts, learner = [[4]] * 4, LearnerSpeed(3.0, 0.0, 1.0)
    result = simulate(rollouts, ONE, learner, 1)
    assert result.step_ends == (4.0 + 4.0 + 1.0, 14.0, 19.0, 19.0 + 3.0 + 1.0)  # nothing is drawn beside the last one
    assert result.learner_waits == (4.0 + 1.0, 1.0, 1.0, 0.0)
    deeper = simulate(rollouts, ONE, learner, 2)
    assert deeper.rollout_ready[0] == 8.0  # two are drawn first, by the same weights
    assert deeper.step_ends[-1] == 8.0 + 5.0 + 5.0 + 4.0 + 4.0


def test_a_sampler_that_takes_weights_in_flight_draws_on() -> None:
    rollouts, learner = [[4], [1], [7], [4]], LearnerSpeed(3.0, 0.0, 1.0)
    result = simulate(rollouts, ONE, learner, 1, in_flight=True)
    # 1: 0–4. 2: 4–5, taken at 8. 3: 8–16, resting 11–12. 4: 16–21, resting 19–20
    assert result.rollout_ready == (4.0, 8.0, 16.0, 21.0)
    assert result.step_ends == (8.0, 12.0, 20.0, 25.0)
    assert result.learner_waits == (4.0, 0.0, 4.0, 1.0)
    deeper = simulate(rollouts, ONE, learner, 2, in_flight=True)
    # 2: 4–5. 3: 5–14, resting 7–8 and 11–12. 4: 14–19, resting 17–18
    assert deeper.rollout_ready == (4.0, 8.0, 14.0, 19.0)


@given(st.lists(lengths, min_size=1, max_size=8), st.floats(0.1, 5), st.floats(0, 2), st.integers(0, 5), st.booleans())
def test_no_run_is_faster_than_the_slower_of_both_nor_slower_than_lock_step(
    rollouts: list[list[int]], update: float, publish: float, staleness: int, in_flight: bool
) -> None:
    learner = LearnerSpeed(update, 0.0, publish)
    result = simulate(rollouts, ONE, learner, staleness, in_flight=in_flight)
    together = simulate(rollouts, ONE, learner, 0)
    learning, drawing = len(rollouts) * (update + publish), sum(map(sum, rollouts))
    assert result.step_ends[-1] >= max(learning, drawing) - 1e-9
    assert result.step_ends[-1] <= together.step_ends[-1] + 1e-9
    assert result.step_ends[-1] == pytest.approx(learning + sum(result.learner_waits))
    assert all(a <= b for a, b in zip(result.rollout_ready, result.step_ends, strict=True))
    assert 0 <= result.sampler_idle <= 1


@given(st.lists(lengths, min_size=2, max_size=8), st.floats(0, 5), st.integers(1, 4))
def test_more_room_is_never_slower_for_a_sampler_that_draws_on(
    rollouts: list[list[int]], update: float, staleness: int
) -> None:
    learner = LearnerSpeed(update, 0.0, 0.5)
    some, more = (simulate(rollouts, ONE, learner, k, in_flight=True).step_ends[-1] for k in (staleness, staleness + 1))
    assert more <= some + 1e-9


# --- closed forms

SERVICE = st.floats(0.25, 8, width=16)


def steady(line: Timeline, at: int) -> float:
    """Seconds from one step's end to the next."""
    return line.step_ends[at] - line.step_ends[at - 1]


def _sampler_idle(line: Timeline, draw: float, period: float) -> float:
    """1 − D / period, and less by the pauses that fall into a rollout in the making."""
    inside = sum(line.sampling_seconds[line.steady_state]) / len(line.sampling_seconds[line.steady_state]) - draw
    assert -1e-9 <= inside <= period - draw + 1e-9
    return 1 - (draw + inside) / period


@given(SERVICE, SERVICE, SERVICE)
def test_equal_rollouts_take_the_sum_in_lock_step_and_the_longer_of_both_apart(
    draw: float, update: float, publish: float
) -> None:
    """D + U + P, and max(D, U) + P however large K is and whether or not weights are taken in flight: a sampler that rests while
    they are published is no further than one that is whole before."""
    rollouts, learner = [[1]] * 12, LearnerSpeed(update, 0.0, publish)
    sampler = SamplerSpeed(0.0, draw, 1)
    assert simulate(rollouts, sampler, learner, 0).step_seconds == pytest.approx(draw + update + publish)
    assert simulate(rollouts, sampler, learner, 0).idle_fractions() == pytest.approx(
        (draw / (draw + update + publish), (update + publish) / (draw + update + publish))
    )
    period = max(draw, update) + publish
    for staleness in (1, 2, 5):
        for in_flight in (False, True):
            line = simulate(rollouts, sampler, learner, staleness, in_flight=in_flight)
            assert line.step_seconds == pytest.approx(period)
            assert line.idle_fractions() == pytest.approx(
                (1 - (update + publish) / period, _sampler_idle(line, draw, period))
            )


@given(st.lists(st.integers(1, 9), min_size=2, max_size=10), st.floats(0.25, 8, width=16))
def test_without_an_end_to_staleness_nobody_waits_twice(draws: list[int], update: float) -> None:
    """K → ∞, weights taken in no time: the sampler draws on without a pause; step i's rollout is there after d_1 + … + d_i, and its
    update ends at max over j ≤ i of (d_1 + … + d_j) + (i − j + 1) U, Lindley's recursion written out."""
    line = simulate([[d] for d in draws], ONE, LearnerSpeed(update, 0.0, 0.0), len(draws), in_flight=True)
    uninterrupted = [float(sum(draws[: i + 1])) for i in range(len(draws))]
    assert line.step_ends == pytest.approx(
        [max(uninterrupted[j] + (i - j + 1) * update for j in range(i + 1)) for i in range(len(draws))]
    )
    assert line.idle_fractions(slice(0, len(draws)))[1] == pytest.approx(1 - uninterrupted[-1] / line.step_ends[-1])


def test_lengths_that_change_are_what_staleness_is_for() -> None:
    """Rollouts of 1 and 7 seconds in turns, updates of 4: lock step 8, one ahead (max(4, 7) + max(4, 1)) / 2, far ahead 4."""
    rollouts, learner = [[1], [7]] * 20, LearnerSpeed(4.0, 0.0, 0.0)
    steps = [simulate(rollouts, ONE, learner, k, in_flight=True) for k in (0, 1, 2, 3)]
    assert [steady(line, 21) + steady(line, 20) for line in steps] == [16.0, 11.0, 8.0, 8.0]
    assert find_best_staleness(rollouts, ONE, learner, in_flight=True) == 2
    assert find_best_staleness([[4]] * 20, ONE, learner, in_flight=True) == 1
    assert find_best_staleness([[4]] * 20, ONE, LearnerSpeed(0.0, 0.0, 0.0)) == 0  # nothing to draw beside
    far = simulate([[4]] * 20, ONE, LearnerSpeed(3.0, 0.0, 0.0), 16)
    assert far.rollout_ready[0] == 64.0  # what is drawn before the first step is no gain in the others
    assert (far.step_seconds, simulate([[4]] * 3, ONE, LearnerSpeed(3.0, 0.0, 0.0), 5).step_seconds) == (
        4.0,
        (12.0 + 9.0) / 3,
    )


@given(st.lists(lengths, min_size=1, max_size=8), st.floats(0.1, 5), st.floats(0, 2), st.integers(0, 5), st.booleans())
def test_all_that_is_drawn_is_drawn_once_and_no_second_is_counted_twice(
    rollouts: list[list[int]], update: float, publish: float, staleness: int, in_flight: bool
) -> None:
    """Σ of what steps draw is Σ of the rollouts, and the pauses in their midst; no step draws longer than it takes."""
    line = simulate(rollouts, ONE, LearnerSpeed(update, 0.0, publish), staleness, in_flight=in_flight)
    needed, pauses = float(sum(map(sum, rollouts))), len(rollouts) * publish if in_flight and staleness else 0.0
    assert needed - 1e-9 <= sum(line.sampling_seconds) <= needed + pauses + 1e-9
    begins = (0.0, *line.step_ends)
    for i, (drawn, waited) in enumerate(zip(line.sampling_seconds, line.learner_waits, strict=True)):
        seconds = begins[i + 1] - begins[i]
        assert -1e-9 <= drawn <= seconds + 1e-9
        assert waited + update + publish == pytest.approx(seconds)
    learner, sampler = line.idle_fractions()
    assert 0 <= learner <= 1
    assert 0 <= sampler <= 1


def test_a_rollout_that_rests_while_weights_are_taken_over_is_in_the_making() -> None:
    result = simulate([[4], [1], [7], [4]], ONE, LearnerSpeed(3.0, 0.0, 1.0), 1, in_flight=True)
    # 0–4 and 4–5 in the first step, 0–8; 8–16 in the second, 8–12, and the third, 12–20, with 16–21 after it
    assert result.sampling_seconds == (5.0, 4.0, 8.0, 1.0)
    assert result.idle_fractions(slice(0, 4)) == (9 / 25, 1 - 18 / 25)
    assert result.steady_state == slice(1, 3)  # nothing is drawn beside the last
    assert result.idle_fractions() == (4 / 12, 0.0)


# --- a server's places


@given(lengths, st.integers(1, 8), SERVICE, SERVICE)
def test_places_save_rounds_and_no_tokens(tokens: list[int], slots: int, fixed: float, each: float) -> None:
    """Work is conserved: what each token costs is paid whatever the places; of rounds there are at least as many as the longest
    completion has tokens and as a full server takes, and at most as many as both together (Graham 1969)."""
    assert SamplerSpeed(0.0, each, slots)(tokens) == pytest.approx(each * sum(tokens))
    rounds = SamplerSpeed(1.0, 0.0, slots)(tokens)
    assert max(max(tokens), sum(tokens) / slots) <= rounds + 1e-9
    assert rounds <= max(tokens) + sum(tokens) / slots + 1e-9
    both = SamplerSpeed(fixed, each, slots, 2.0)(tokens)
    assert both == pytest.approx(2.0 + fixed * rounds + each * sum(tokens))


def test_equal_completions_are_drawn_in_waves() -> None:
    """ceil(n / slots) of them."""
    for count, waves in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        assert SamplerSpeed(1.0, 0.0, 4)([6] * count) == 6.0 * waves


def test_lengths_are_drawn_from_those_that_were_measured() -> None:
    result = resample_lengths([1, 2, 2, 9], 500, 16, seed=3)
    assert [len(rollout) for rollout in result] == [16] * 500
    every = [n for rollout in result for n in rollout]
    assert {n: round(every.count(n) / len(every), 2) for n in (1, 2, 9)} == {
        n: pytest.approx(share, abs=0.02) for n, share in ((1, 0.25), (2, 0.5), (9, 0.25))
    }
    assert result == resample_lengths([1, 2, 2, 9], 500, 16, seed=3) != resample_lengths([1, 2, 2, 9], 500, 16, seed=4)


def test_the_first_that_is_fast_enough() -> None:
    assert smallest_sufficient([4.0, 2.01, 2.0, 2.0]) == 1
    assert smallest_sufficient([4.0, 2.1, 2.0]) == 2
    assert smallest_sufficient([1.0]) == 0


def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a rollout"):
        simulate([], ONE, LearnerSpeed(1, 1, 1), 0)
    with pytest.raises(ValueError, match="not 1 and -1"):
        simulate([[1]], ONE, LearnerSpeed(1, 1, 1), -1)
