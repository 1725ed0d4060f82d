"""When the reference is taken anew."""

from __future__ import annotations

import pytest

from doubles.random_batches import Shape, make
from policygrad.core.auxiliary import Reference
from policygrad.core.metrics import Mean, Metrics, Sum

BATCH, _ = make(Shape((2,), 2, seed=0, binary=False))


def follow(reference: Reference, scores: list[float | None]) -> list[int]:
    """The rollouts after which it is taken anew, where `scores` are measured after each."""
    refreshed, state = [], reference.init()
    for rollout, score in enumerate(scores, 1):
        metrics: Metrics = {}
        now = reference if state is None else reference.at(state)
        if now.due(rollout):
            refreshed.append(rollout)
            metrics["reference/refreshed"] = Sum(1.0)
        if score is not None:
            metrics["held_out"] = Mean(score)
        state = None if state is None else reference.update(state, BATCH, metrics)
    return refreshed


@pytest.mark.parametrize(
    ("reference", "scores", "expected"),
    [
        (Reference(), [0.1] * 6, []),
        (Reference(every=2), [0.1] * 6, [2, 4, 6]),
        (Reference(stall=2), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], []),
        (Reference(stall=2), [0.5, 0.4, 0.5, 0.4], [4]),  # equal is no improvement
        (Reference(stall=2), [0.5, 0.4, 0.6, 0.4, 0.4, 0.4], [6]),  # 0.6 began the count anew
        (
            Reference(stall=2),
            [0.5, 0.4, 0.4, 0.9, 0.1, 0.1, 0.1],
            [4, 7],
        ),  # 0.9 is of the refreshed policy, and the best
        (
            Reference(stall=2),
            [0.5, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4],
            [4, 7],
        ),  # that of the refreshed policy does not count
        (Reference(stall=2), [0.5, None, 0.4, None, 0.4, None, None], [6]),  # not measured at every rollout
        (Reference(every=3, stall=2), [0.5, 0.4, 0.4, 0.4, 0.4, 0.4], [3, 6]),  # a refresh begins the count anew
        (Reference(stall=1, reset=True), [-1.0, -2.0, -2.0], [3]),
    ],
    ids=str,
)
def test_refreshed(reference: Reference, scores: list[float | None], expected: list[int]) -> None:
    assert follow(reference, scores) == expected


def test_it_says_when() -> None:
    assert Reference().formula == "the initial policy, frozen"
    assert Reference(every=5, stall=3, reset=True).formula == (
        "the policy, taken anew every 5 rollouts and when 3 held-out evaluations in a row bring nothing better, the "
        "optimiser's state reset"
    )


@pytest.mark.parametrize("name", ["every", "stall"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_period_of_none_at_all_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"Reference.{name} must be at least 1 .*, not {value}"):
        Reference(**{name: value})
