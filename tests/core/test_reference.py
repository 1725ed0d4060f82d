"""When the reference is taken anew."""

from __future__ import annotations

import pytest

from doubles.random_batches import Shape, make
from policygrad.core.auxiliary import Reference
from policygrad.core.metrics import Mean, Metrics, Sum

BATCH, _ = make(Shape((2,), 2, seed=0, binary=False))


def follow(reference: Reference, scores: list[float | None]) -> list[int]:
    """The rollouts after which it is taken anew, where `scores` are measured after each."""
    refreshed, state = [], reference.init_state()
    for rollout, score in enumerate(scores, 1):
        metrics: Metrics = {}
        now = reference if state is None else reference.with_state(state)
        if now.should_refresh(rollout):
            refreshed.append(rollout)
            metrics["reference/refreshed"] = Sum(1.0)
        if score is not None:
            metrics["eval/reward"] = Mean(score)
        state = None if state is None else reference.update_state(state, BATCH, metrics)
    return refreshed


@pytest.mark.parametrize(
    ("reference", "scores", "expected"),
    [
        (Reference(), [0.1] * 6, []),
        (Reference(refresh_every=2), [0.1] * 6, [2, 4, 6]),
        (Reference(refresh_after_stall=2), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], []),
        (Reference(refresh_after_stall=2), [0.5, 0.4, 0.5, 0.4], [4]),  # equal is no improvement
        (Reference(refresh_after_stall=2), [0.5, 0.4, 0.6, 0.4, 0.4, 0.4], [6]),  # 0.6 began the count anew
        (
            Reference(refresh_after_stall=2),
            [0.5, 0.4, 0.4, 0.9, 0.1, 0.1, 0.1],
            [4, 7],
        ),  # 0.9 is of the refreshed policy, and the best
        (
            Reference(refresh_after_stall=2),
            [0.5, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4],
            [4, 7],
        ),  # that of the refreshed policy does not count
        (
            Reference(refresh_after_stall=2),
            [0.5, None, 0.4, None, 0.4, None, None],
            [6],
        ),  # not measured at every rollout
        (
            Reference(refresh_every=3, refresh_after_stall=2),
            [0.5, 0.4, 0.4, 0.4, 0.4, 0.4],
            [3, 6],
        ),  # a refresh begins the count anew
        (Reference(refresh_after_stall=1, reset_optimizer=True), [-1.0, -2.0, -2.0], [3]),
    ],
    ids=str,
)
def test_refreshed(reference: Reference, scores: list[float | None], expected: list[int]) -> None:
    assert follow(reference, scores) == expected


def test_reference_formula() -> None:
    assert Reference().formula == "the initial policy, frozen"
    assert Reference(refresh_every=5, refresh_after_stall=3, reset_optimizer=True).formula == (
        "the policy, refreshed every 5 rollouts and after 3 evaluations without improvement, with an optimizer reset"
    )


@pytest.mark.parametrize("name", ["refresh_every", "refresh_after_stall"])
@pytest.mark.parametrize("value", [0, -1])
def test_zero_refresh_period_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"Reference.{name} must be at least 1 .*, not {value}"):
        Reference(**{name: value})
