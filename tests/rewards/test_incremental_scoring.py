"""Incremental scoring gives the same scores as scoring at once, in whatever order completions finish."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policygrad.errors import RewardError
from policygrad.rewards.base import Reward, RewardScores, reward
from policygrad.rewards.workers.pool import CallTimeEstimator, IncrementalScoring, RewardPool
from policygrad.rewards.workers.process import WorkerProcess

TIMEOUT = 3.0  # seconds, for what overruns it on purpose; anything else must be done by then on a busy machine, too


def unruly(prompts: Any, completions: Any, **_: Any) -> Any:
    """Misbehave as the completion says."""
    deeds: dict[str, Callable[[], Any]] = {
        "raise": lambda: 1 / 0,
        "exit": lambda: os._exit(3),
        "hang": lambda: time.sleep(1000),
        "nan": lambda: [float("nan")],
        "none": lambda: [None],
        "two": lambda: [1.0, 2.0],
    }
    return deeds.get(completions[0], lambda: [float(len(completions[0]))])()


def halves(prompts: Any, completions: Any, part: Any, **_: Any) -> list[float | None]:
    return [None if part[0] is None else part[0] / 2]


@reward(batch=True)
def rank(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [float(sorted(completions).index(c)) for c in completions]


def asked(completions: list[str]) -> tuple[list[str], dict[str, list[Any]]]:
    return [f"p{i}" for i in range(len(completions))], {"part": [i if i % 3 else None for i in range(len(completions))]}


def told(pool: RewardPool, completions: list[str], looks: list[tuple[list[int], bool]]) -> RewardScores:
    """Score with completions that finish in these groups; True: wait until the finished ones are scored."""
    prompts, columns = asked(completions)
    with pool.score_incrementally(prompts, columns) as begun:
        for number, (places, waits) in enumerate(looks, 1):
            begun.add_completions({place: completions[place] for place in places})
            if waits:
                answered(begun, 2 * sum(len(some) for some, _ in looks[:number]))  # by two functions
        return pool.score(prompts, completions, columns, begun)


def at_once(pool: RewardPool, completions: list[str]) -> RewardScores:
    prompts, columns = asked(completions)
    return pool.score(prompts, completions, columns)


def answered(begun: IncrementalScoring, count: int) -> None:
    """Poll until so many calls are scored."""
    for _ in range(6000):
        begun.add_completions({})
        if len(begun._scored) >= count:
            return
        threading.Event().wait(0.01)
    raise AssertionError("nobody answers")


# --- scores


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool([unruly, Reward("halves", halves, 0.5), rank], timeout=60.0) as pool:
        yield pool


DEEDS = st.sampled_from(["a", "bb", "ccc", "a", "bb", "raise", "none", "nan", "two", "exit"])


@settings(max_examples=8)
@given(st.data(), st.lists(DEEDS, min_size=1, max_size=12))
def test_scores_do_not_depend_on_when_completions_finish(
    pool: RewardPool, data: st.DataObject, completions: list[str]
) -> None:
    order = data.draw(st.permutations(range(len(completions))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=4)))
    looks = [(order[a:b], data.draw(st.booleans())) for a, b in zip([0, *cuts], cuts, strict=False)]
    assert told(pool, completions, looks) == at_once(pool, completions)


@pytest.mark.full
def test_a_hanging_call_costs_its_sample_and_no_call_is_repeated(tmp_path: Path) -> None:
    def counted(prompts: Any, completions: Any, **_: Any) -> list[float]:
        with (tmp_path / "calls").open("a") as file:
            file.write(f"{prompts[0]}\n")
        return [1.0]

    completions = ["a", "hang", "bb", "none", "exit", "a"]
    with RewardPool([unruly, counted], num_workers=2, timeout=TIMEOUT) as pool:
        full = at_once(pool, completions)
        assert full.failures == {"timeout": 1, "crashed": 1}
        (tmp_path / "calls").unlink()
        prompts, columns = asked(completions)
        with pool.score_incrementally(prompts, columns) as begun:
            begun.add_completions({0: "a", 1: "hang"})
            answered(
                begun, 4
            )  # two functions, two samples: the one that hangs has been given up while others were drawn
            begun.add_completions({5: "a", 4: "exit"})
            assert pool.score(prompts, completions, columns, begun) == full
        assert sorted((tmp_path / "calls").read_text().split()) == ["p0", "p1", "p2", "p3", "p4", "p5"]


def test_changed_completions_are_scored_again(pool: RewardPool) -> None:
    prompts, columns = asked(["a", "bb"])
    full = at_once(pool, ["a", "bb"])
    with pool.score_incrementally(prompts, columns) as begun:
        begun.add_completions({0: "raise", 1: "bb"})
        answered(begun, 1)
        assert pool.score(prompts, ["a", "bb"], columns, begun) == full


def test_errors_are_raised_by_score_and_not_while_sampling() -> None:
    prompts, columns = ["p"] * 2, {"part": [threading.Lock()] * 2}
    with RewardPool([unruly], num_workers=1) as pool, pool.score_incrementally(prompts, columns) as begun:
        begun.add_completions({0: "a"})
        begun.add_completions({1: "a"})
        with pytest.raises(RewardError, match="column 'part' cannot be sent to a reward worker"):
            pool.score(prompts, ["a", "a"], columns, begun)
        with pytest.raises(RewardError, match="closed"):
            pool.score(["p"], ["a"], {})


def test_progress_counts_results_that_arrived_before(monkeypatch: pytest.MonkeyPatch) -> None:
    message = list[tuple[str, int, int]]()
    with RewardPool([unruly], num_workers=1, timeout=TIMEOUT, progress=lambda *words: message.append(words)) as pool:
        at_once(pool, ["a"])
        monkeypatch.setattr("policygrad.rewards.workers.pool.REPORT_AFTER_SECONDS", 0.0)
        message.clear()
        with pool.score_incrementally(["p"] * 3, {}) as begun:
            begun.add_completions({0: "a"})
            answered(begun, 1)
            assert message == []
            pool.score(["p"] * 3, ["a", "hang", "a"], {}, begun)
    assert ("waiting for reward 'unruly' (each call has up to 3 s)", 1, 3) in message
    assert message[-1] == ("", 0, 0)


# --- interruption


def break_off(pool: RewardPool, result: list[IncrementalScoring], error: type[BaseException]) -> None:
    with pool.score_incrementally(["p"] * 3, {}) as begun:
        result.append(begun)
        begun.add_completions({0: "hang", 2: "a"})
        raise error


@pytest.mark.full
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_scoring_leaves_the_pool_usable(error: type[BaseException]) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    with RewardPool([unruly], num_workers=2, timeout=60.0) as pool:
        at_once(pool, ["a", "bb"])
        result: list[IncrementalScoring] = []
        with pytest.raises(error):
            break_off(pool, result, error)
        (begun,) = result
        begun.add_completions({1: "exit"})  # ignored: sampling may continue in a thread of its own
        assert [slot.work for slot in pool._slots] == [None, None]
        assert at_once(pool, ["a", "bb"]).parts == {"unruly": [1.0, 2.0]}
        left = {thread.name for thread in threading.enumerate()} - threads
        assert left <= {"reward workers", "reward output"}  # no thread that waits for the interrupted scoring


def test_another_scoring_waits_for_its_turn() -> None:
    result: list[RewardScores] = []
    with RewardPool([unruly], num_workers=1) as pool:
        with pool.score_incrementally(["p"] * 2, {}) as begun:
            begun.add_completions({0: "a"})
            other = threading.Thread(target=lambda: result.append(pool.score(["p"], ["ccc"], {})))
            other.start()
            assert pool.score(["p"] * 2, ["a", "bb"], {}, begun).total == [1.0, 2.0]
        other.join(60)
    assert [scores.total for scores in result] == [[3.0]]


# --- when overlap is worthwhile


def cheap(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [1.0]


def slow(prompts: Any, completions: Any, **_: Any) -> list[float]:
    time.sleep(0.05)
    return [1.0]


def slow_together(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return slow(prompts, completions) * len(completions)


def slow_steps(prompts: Any, completions: Any, **_: Any) -> list[Any]:
    return [[(1, x) for x in slow(prompts, completions)]]


def slow_to_fail(prompts: Any, completions: Any, **_: Any) -> list[float]:
    raise ValueError(slow(prompts, completions))


def slow_here() -> Callable[..., list[float]]:
    lock = threading.Lock()  # which cannot be sent to a worker

    def function(prompts: Any, completions: Any, **_: Any) -> list[float]:
        with lock:
            return slow(prompts, completions)

    return function


NEVER = {
    "cheap": cheap,
    "batched": Reward("r", slow_together, batched=True),
    "of steps": Reward("r", slow_steps, process_reward=True),
    "never answered": slow_to_fail,
    "in this process": slow_here,
}
COUNT = 16  # completions: 0.8 s of `slow`


@pytest.mark.parametrize("kind", NEVER)
@pytest.mark.filterwarnings("ignore:.*cannot be sent")
def test_overlap_is_not_worthwhile_for(kind: str) -> None:
    function: Any = NEVER[kind]() if kind == "in this process" else NEVER[kind]
    with RewardPool([function], num_workers=1) as pool:
        for score in (pool.score, pool.score_steps):
            score(["p"] * 4, ["c"] * 4, {})
        assert not pool.is_overlap_worthwhile(COUNT)


def test_overlap_is_worthwhile_for_many_slow_calls() -> None:
    with RewardPool([cheap, Reward("later", slow)], num_workers=1) as pool:
        assert not pool.is_overlap_worthwhile(10**9)  # nothing is known
        pool.score(["p"], ["c"], {})
        assert not pool.is_overlap_worthwhile(10**9)  # a worker's first call may load what it needs
        pool.score(["p"] * 3, ["c"] * 3, {})
        assert pool.is_overlap_worthwhile(COUNT)
        assert not pool.is_overlap_worthwhile(1)


def test_call_times_are_discounted_means() -> None:
    pace = CallTimeEstimator()
    assert pace.get("a") == 0.0
    for seconds in (1.0, 3.0):
        pace.record("a", seconds)
    assert (pace.get("a"), pace.get("b")) == (2.0, 0.0)
    pace.end_scoring()
    assert pace.get("a") == 2.0
    pace.record("a", 0.0)
    assert pace.get("a") == 1.0  # the first two count as one now


# --- starting workers


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_worker_outlives_the_thread_that_scored() -> None:
    """A rollout during an update runs in such a thread, and Linux ends a child with the thread that started it."""
    made: list[RewardPool] = []
    in_thread(lambda: made.append(RewardPool([unruly], num_workers=1)))
    with made[0] as pool:
        in_thread(lambda: at_once(pool, ["exit", "a"]))  # the second worker
        worker = pool._slots[0].worker
        assert isinstance(worker, WorkerProcess)
        for _ in range(20):
            in_thread(lambda: threading.Event().wait(0.01))
            assert worker.alive()
        assert at_once(pool, ["a"]).total == [1.0]
        assert pool._slots[0].worker is worker


def test_a_closed_pool_starts_no_worker() -> None:
    with RewardPool([unruly], num_workers=1) as pool:
        slot = pool._slots[0]
    with pytest.raises(RewardError, match="closed"):
        slot.launch()
