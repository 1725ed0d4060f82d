"""Failing rewards that stop a run, and progress reports of slow ones."""

from __future__ import annotations

import time
from typing import Any

import pytest

from policygrad.errors import ConfigError, RewardError
from policygrad.rewards.config import RewardConfig
from policygrad.rewards.workers import pool as waiting
from policygrad.rewards.workers.failures import FailedStepTracker, UnresponsiveFunctionDetector
from policygrad.rewards.workers.messages import Chunk, SampleResult, WorkerStart
from policygrad.rewards.workers.pool import RewardPool, SlowCallReporter, WorkerSlot, WorkItem

TIMEOUT = 0.2  # seconds, for what overruns it on purpose


def hangs(prompts: Any, completions: Any, **_: Any) -> list[float]:
    while completions[0] != "fine":
        time.sleep(1000)
    return [1.0]


def raises_or_hangs(prompts: Any, completions: Any, **_: Any) -> list[float]:
    if int(completions[0]) % 2:
        raise ValueError("odd")
    return hangs(prompts, completions)


# --- unresponsive functions


@pytest.mark.full
def test_an_unresponsive_function_ends_scoring_after_two_calls_per_worker() -> None:
    with RewardPool([hangs], num_workers=2, timeout=TIMEOUT) as pool:
        with pytest.raises(RewardError) as caught:
            pool.score(["p"] * 512, ["x"] * 512, {})
        assert "reward 'hangs' has not returned a single reward, and 4 calls of it were lost" in str(caught.value)
        assert "took more than its timeout of 0.2 s" in str(caught.value)
        with pytest.raises(RewardError, match="closed"):
            pool.score(["p"], ["fine"], {})


def test_calls_that_raise_do_not_count_as_rewards() -> None:
    with (
        RewardPool([raises_or_hangs], num_workers=2, timeout=TIMEOUT) as pool,
        pytest.raises(RewardError, match="4 calls"),
    ):
        pool.score(["p"] * 64, [str(i) for i in range(64)], {})


@pytest.mark.full
def test_scoring_continues_after_one_reward_or_when_tolerated() -> None:
    with RewardPool([hangs], num_workers=1, timeout=TIMEOUT) as pool:
        assert pool.score(["p"], ["fine"], {}).total == [1.0]
        assert pool.score(["p"] * 5, ["x"] * 5, {}).failures == {"timeout": 5}
    with RewardPool([hangs], num_workers=1, timeout=TIMEOUT, tolerate_unresponsive=True) as pool:
        assert pool.score(["p"] * 5, ["x"] * 5, {}).failures == {"timeout": 5}


def test_other_samples_are_tried_before_giving_up() -> None:
    """The first three samples hang, as the completions of one prompt may: others are scored before all of them are tried."""
    completions = ["x"] * 3 + ["fine"] * 9
    with RewardPool([hangs], num_workers=1, timeout=TIMEOUT) as pool:  # chunks of three
        scores = pool.score(["p"] * 12, completions, {})
    assert scores.total == [None] * 3 + [1.0] * 9


def test_lost_calls_are_counted_per_function() -> None:
    never = UnresponsiveFunctionDetector(2)
    never.record_lost("a", "hung")
    never.record_lost("b", "hung")
    never.record_results("b", [SampleResult(None, "raised"), SampleResult(0.0)])
    assert never.has_succeeded("b")
    never.record_lost("b", "hung")
    never.record_results("a", [SampleResult(None, "raised")])
    with pytest.raises(RewardError, match=r"reward 'a' .* 2 calls .* last one hung"):
        never.record_lost("a", "hung")


# --- steps


def test_failed_steps_in_a_row_stop_the_run() -> None:
    rule = FailedStepTracker(0.5, 3)
    output = ["reward 'x' raised A", "dynamic sampling: …", "reward 'x' raised B"]
    assert rule.record_step(0.0, ()) is None
    assert [rule.record_step(f, output) for f in (0.6, 1.0, 0.5, 0.9, 1.0)] == [
        None
    ] * 5  # a half is not more than a half
    assert rule.record_step(0.51, ["reward 'x' raised C", "reward 'x' raised D"]) == (
        "more than 50% of the samples have no reward in the last 3 steps, all in a row (90%, 100%, 51%): reward 'x' raised A; "
        "reward 'x' raised B; reward 'x' raised C; and 1 more"
    )


def test_a_first_step_or_evaluation_without_reward_stops_the_run() -> None:
    assert (
        FailedStepTracker(0.5, 3).record_step(1.0, ["no reward: why"])
        == "no sample of the first step has a reward: no reward: why"
    )
    assert FailedStepTracker(0.5, 3).record_step(0.99, ()) is None
    assert FailedStepTracker(0.5, 3).record_evaluation(True, ()) == "no sample of the first evaluation has a reward"
    rule = FailedStepTracker(0.5, 3)
    assert rule.record_evaluation(False, ()) is None
    assert rule.record_step(1.0, ()) == "no sample of the first step has a reward"
    rule = FailedStepTracker(0.5, 3)
    assert rule.record_step(0.5, ()) is None
    assert rule.record_evaluation(True, ()) is None  # after steps that had rewards, it is a note
    assert rule.record_step(1.0, ()) is None


def test_zero_max_failed_steps_never_stops() -> None:
    rule = FailedStepTracker(0.5, 0)
    assert rule.record_evaluation(True, ()) is None
    assert [rule.record_step(1.0, ()) for _ in range(9)] == [None] * 9
    rule = FailedStepTracker(0.0, 1)
    assert rule.record_step(0.01, ()) == "more than 0% of the samples have no reward in the last step (1%)"


@pytest.mark.parametrize(
    "options",
    [
        {"max_failed_fraction": 1.0},
        {"max_failed_fraction": -0.1},
        {"max_failed_steps": -1},
        {"memory": "x"},
        {"environment": ("=",)},
    ],
)
def test_invalid_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"rewards\.{next(iter(options))}"):
        RewardConfig(**options)


# --- progress reports


def slot(name: str, *, ready: bool, deadline: float) -> WorkerSlot:
    start = WorkerStart(((name, b"", False),))
    work = WorkItem(Chunk(b"", ((0, (0,)),)), (0,), ("x",))
    return WorkerSlot(start, timeouts=(10.0,), ready=ready, work=work, deadline=deadline)


def test_slow_calls_are_reported_after_seconds_and_then_every_second() -> None:
    now, report = [0.0], list[tuple[str, int, int]]()
    waits = SlowCallReporter(lambda *words: report.append(words), 512, clock=lambda: now[0])
    busy = [slot("x", ready=True, deadline=9.0), slot("x", ready=False, deadline=99.0)]
    for now[0] in (0.0, 3.9):
        waits.report_if_due(busy)
    assert report == []
    waits.num_results = 3
    for now[0] in (4.0, 4.5, 5.0):
        waits.report_if_due(busy)
    waiting_for_x = "waiting for reward 'x' (each call has up to 10 s)"
    assert report == [(waiting_for_x, 3, 512)] * 2
    now[0] = 6.0
    waits.report_if_due(busy[1:])
    assert report[2] == ("waiting for a reward worker to load x", 3, 512)
    waits.close()
    assert report[3:] == [("", 0, 0)]


def test_only_slow_scoring_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    report = list[tuple[str, int, int]]()
    with RewardPool([hangs], num_workers=1, progress=lambda *words: report.append(words)) as pool:
        pool.score(["p"], ["fine"], {})
    assert [words for words in report if not words[0].startswith("waiting for a reward worker to load")] in (
        [],
        [("", 0, 0)],
    )
    monkeypatch.setattr(waiting, "REPORT_AFTER_SECONDS", 0.0)
    report.clear()
    with RewardPool([hangs], num_workers=1, timeout=2.5, progress=lambda *words: report.append(words)) as pool:
        pool.score(["p"] * 2, ["fine", "x"], {})
    assert ("waiting for reward 'hangs' (each call has up to 2.5 s)", 1, 2) in report
    assert report[-1] == ("", 0, 0)
