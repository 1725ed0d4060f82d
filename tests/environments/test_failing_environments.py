"""Environments, tools and their rewards that raise, hang or return what cannot be used: each costs its episode, and is named."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import policygrad as pg
from doubles.files import rows
from doubles.scripted_sampler import ScriptedSampler
from doubles.trackers import Record
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rollout import environment_calls
from policygrad.rollout.batching import batch_groups, measure_rollout
from policygrad.rollout.environment_calls import EnvironmentCalls
from policygrad.rollout.episodes import run_episodes
from policygrad.rollout.scoring import score_groups
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec
from policygrad.samplers.base import SamplingParams
from policygrad.utils.async_runner import AsyncRunner, OverdueError, await_with_timeout

ASKED = pg.Example("1 + 2 =\n", {"answer": "3"}, "sums.jsonl:7")
CALL = '<tool_call>{"name": "%s", "arguments": {%s}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("tiny", load_model("tiny"))


def played(
    tokenizer: Tokenizer, environment: Any, turns: tuple[str, ...] = ("3",), samples: int = 2, **options: Any
) -> EpisodeGroup:
    """The episodes of one example; the policy says these turns. options: of `Calls`, whose clock stands still."""
    sampler = ScriptedSampler(tokenizer, lambda key, context: turns[key[5] if len(key) > 5 else 0])
    work = run_episodes(
        [EpisodeSpec(ASKED, (0, TRAIN, 1, 0), 1500)],
        samples,
        SamplingParams(max_tokens=1500),
        sampler=sampler,
        encoder=tokenizer,
        environment=environment,
        calls=EnvironmentCalls(**{"clock": lambda: 0.0} | options),
    )
    with AsyncRunner() as waiter:
        return waiter(work)[0]


class World:
    """One turn, worth 1; `made` says which of the group's episodes it is."""

    made = 0

    def __init__(self, example: pg.Example) -> None:
        self.number = type(self).made
        type(self).made += 1

    def __init_subclass__(cls) -> None:
        cls.made = 0

    async def reset(self) -> pg.Observation:
        return pg.Observation("1 + 2 =\n")

    async def step(self, action: pg.Action) -> pg.Step:
        return pg.Step(reward=1.0)


async def never() -> None:
    """Does not end when it is cancelled."""
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


# --- numbers


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1)])
def test_every_kind_of_number_is_a_reward(tokenizer: Tokenizer, reward: Any) -> None:
    class Scored(World):
        async def step(self, action: pg.Action) -> pg.Step:
            return pg.Step(reward=reward if self.number else 0, metrics={"right": reward})

    def add(a: int) -> int:
        """Adds.

        Args:
            a: a number
        """
        return a

    group = played(tokenizer, Scored)
    batch = batch_groups([group])
    assert batch.reward.dtype == torch.float32
    assert batch.reward.tolist() == [0.0, 1.0]
    assert [t.metrics["right"] for t in group.trajectories] == [1.0, 1.0]
    tools = pg.ToolUse((add,), lambda answer, example: reward, lambda call, answer: reward, tools_in_prompt=False)
    (trajectory,) = played(tokenizer, tools, (CALL % ("add", '"a": 1'), "3"), samples=1).trajectories
    assert (trajectory.turn_rewards, trajectory.reward) == ((1.0, 1.0), 2.0)
    assert all(type(value) is float for value in trajectory.turn_rewards)


@pytest.mark.parametrize("reward", ["1", 1j, [1.0, 2.0], float("nan"), 10**400])
def test_rewards_that_are_not_finite_fail_the_episode(tokenizer: Tokenizer, reward: Any) -> None:
    class Scored(World):
        async def step(self, action: pg.Action) -> pg.Step:
            return pg.Step(reward=reward)

    with pytest.raises(
        pg.EngineError, match=r"Scored\.step: Step has reward = .*: give a finite number.*sums\.jsonl:7"
    ):
        played(tokenizer, Scored)
    ((lost, _), judged) = judged_alone(played(tokenizer, pg.ToolUse((), lambda a, e: reward, tools_in_prompt=False)))
    assert lost.reward is None
    assert "reward returned" in judged.messages[0]


def judged_alone(group: EpisodeGroup) -> tuple[tuple[Any, ...], Any]:
    (result,), judged = score_groups([group], None)
    return result.trajectories, judged


# --- what raises


def raising(how: str) -> Any:
    """An environment of which the first of two episodes fails in a way of its own."""

    def fail() -> None:
        raise {"cancelled": asyncio.CancelledError(), "exit": SystemExit(3)}.get(how, KeyError("x17"))

    class Fails(World):
        def __init__(self, example: pg.Example) -> None:
            super().__init__(example)
            if how == "made" and self.number == 0:
                fail()

        async def reset(self) -> pg.Observation:
            if how == "reset" and self.number == 0:
                fail()
            return await super().reset()

        async def step(self, action: pg.Action) -> pg.Step:
            if how in ("step", "cancelled", "exit") and self.number == 0:
                fail()
            return pg.Step(reward=1.0)

        async def close(self) -> None:
            if how == "close" and self.number == 0:
                fail()

    return Fails


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("how", ["made", "reset", "step", "close", "cancelled", "exit"])
def test_a_raising_environment_fails_only_its_episode(tokenizer: Tokenizer, how: str, waits: bool) -> None:
    environment = raising(how)
    environment.waits = waits
    group = played(tokenizer, environment)
    (lost, kept), judged = judged_alone(group)
    assert (lost.reward, lost.stop_reason, kept.reward) == (None, "failed", 1.0)
    assert judged.failed == 1
    (message,) = judged.messages
    assert message.startswith("the environment's Fails")
    assert "(completion of sums.jsonl:7" in message
    assert ("KeyError: 'x17'" in message) is (how not in ("cancelled", "exit"))
    batch = batch_groups([group])
    assert measure_rollout([([group], batch)])["environment/ended_failed"].value == 0.5


def test_a_rollout_without_any_reward_is_a_batch(tokenizer: Tokenizer) -> None:
    class Broken(World):
        async def reset(self) -> pg.Observation:
            raise OSError("no display")

    (group,), judged = score_groups([played(tokenizer, Broken)], None)
    batch = batch_groups([group])
    assert not batch.mask.any()
    assert "entropy" not in measure_rollout([([group], batch)])
    assert judged.failed == 2


@pytest.mark.parametrize("what", ["reward", "call_reward", "tools"])
def test_a_raising_tool_function_fails_its_episode(tokenizer: Tokenizer, what: str) -> None:
    asked = list[str]()

    def fails(*args: Any, **more: Any) -> Any:
        asked.append(what)
        if len(asked) == 1:
            raise ValueError("the judge is away")
        return (add,) if what == "tools" else 0.5

    def add(a: int) -> int:
        """Adds.

        Args:
            a: a number
        """
        return a

    given: dict[str, Any] = {"tools": (add,), "tools_in_prompt": False, "reward": lambda answer, example: 0.5} | {
        what: fails
    }
    turns = (CALL % ("add", '"a": 1'), "3")
    (lost, kept), judged = judged_alone(played(tokenizer, pg.ToolUse(**given), turns))
    assert lost.reward is None
    assert kept.reward == (1.0 if what == "call_reward" else 0.5)
    assert "ValueError: the judge is away" in judged.messages[0]
    assert "ToolUse" in judged.messages[0]


def test_reward_functions_are_not_called_on_what_an_environment_has_lost(tokenizer: Tokenizer) -> None:
    received = list[str]()

    def score(prompts: Any, texts: Any, columns: Any) -> Any:
        received.extend(texts)
        return pg_scores([2.0] * len(texts))

    (group,), judged = score_groups([played(tokenizer, raising("step"))], score)
    assert [t.reward for t in group.trajectories] == [None, 3.0]
    assert [t.reward_parts for t in group.trajectories] == [(None, None), (2.0, 1.0)]
    assert received == ["3"]
    assert judged.failed == 1


def pg_scores(total: list[float | None]) -> Any:
    from policygrad.rewards.base import RewardScores

    return RewardScores(total, {"mine": list(total)})


MINE = """
import pathlib

import policygrad as pg

here = pathlib.Path(__file__).parent


class Away:
    def __init__(self, example):
        self.example = example

    async def reset(self):
        return pg.Observation(self.example.prompt)

    async def step(self, action):
        if not (here / "mended").exists():
            raise ValueError("the server is away")
        return pg.Step(reward=len(action.text) % 2)


def surrogate(word: str) -> str:
    '''Echoes.

    Args:
        word: any
    '''
    return word + "\\ud800"


def every_turn(text):
    return (pg.ToolCall("surrogate", {"word": "\\udfff"}),)


HALVES = pg.ToolUse((surrogate,), lambda answer, example: 1, tools_in_prompt=False, max_turns=2, parser=every_turn)
"""


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    (tmp_path / "mine.py").write_text(MINE)
    return replace(
        small,
        model="tiny",
        reward=(),
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=4,
        output=str(tmp_path / "run"),
        environment=f"{tmp_path}/mine.py:Away",
    )


def test_an_environment_that_always_raises_ends_the_run_resumably(run: pg.Run, tmp_path: Path) -> None:
    with pytest.raises(
        pg.RewardError,
        match=r"no sample of the first step has a reward: the environment's Away\.step raised ValueError: the server",
    ):
        pg.train(run, display=False)
    (tmp_path / "mended").touch()
    assert pg.train(resume=tmp_path / "run", display=False, allow_code=[str(tmp_path)]).steps == 2


def test_lone_surrogates_are_replaced_and_the_run_resumes(run: pg.Run, tmp_path: Path) -> None:
    run = replace(run, environment=f"{tmp_path}/mine.py:HALVES", sampling=pg.SamplingParams(max_tokens=24))
    assert pg.train(run, stop_after=1, display=False).steps == 1
    assert pg.train(resume=tmp_path / "run", display=False, allow_code=[str(tmp_path)]).steps == 2
    said = [
        argv
        for row in rows(tmp_path / "run" / "completions.jsonl")
        for who, argv in row.get("turns", ())
        if who != "policy"
    ]
    assert any("\ufffd\ufffd" in argv for argv in said)


def test_surrogates_in_environment_output_are_replaced(tokenizer: Tokenizer) -> None:
    half = "\ud800"

    class Half(World):
        async def reset(self) -> pg.Observation:
            return pg.Observation(f"say {half}", tools=({"name": half},))

        async def step(self, action: pg.Action) -> pg.Step:
            if action.text == "3":
                return pg.Step(pg.Observation(f"again {half}"))
            return pg.Step(reward=1.0, metrics={half: 1.0}, stop_reason=half)

    (trajectory, _) = played(tokenizer, Half, ("3", "4")).trajectories
    assert "again \ufffd" in trajectory.text
    assert (trajectory.stop_reason, dict(trajectory.metrics)) == ("\ufffd", {"\ufffd": 1.0})
    chat = pg.Observation([{"role": "user", "content": half}])
    assert chat.content == [{"role": "user", "content": "\ufffd"}]
    call = pg.ToolCall(half, {half: [half, {"a": (half,)}]}, (half,), half)
    assert (call.name, call.arguments, call.positional, call.error) == (
        "\ufffd",
        {"\ufffd": ["\ufffd", {"a": ("\ufffd",)}]},
        ("\ufffd",),
        "\ufffd",
    )


# --- what hangs


@pytest.mark.parametrize("how", ["raises CancelledError", "cancels itself", "swallows its cancellation"])
def test_a_tool_that_ignores_cancellation_fails_its_call(tokenizer: Tokenizer, how: str) -> None:
    async def odd() -> str:
        """Is odd."""
        if how == "raises CancelledError":
            raise asyncio.CancelledError
        if how == "cancels itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        await never()
        return "never"

    tools = pg.ToolUse((odd,), lambda answer, example: 1, tools_in_prompt=False, timeout=0.01)
    (trajectory,) = played(tokenizer, tools, (CALL % ("odd", ""), "3"), samples=1).trajectories
    assert trajectory.reward == 1.0
    failed = "slow" if how == "swallows its cancellation" else "raised"
    assert trajectory.metrics[f"calls_{failed}"] == 1.0


class Hangs(World):
    """The first of a group's episodes never comes back from its step."""

    blocks = False
    now = 0.0
    """What the clock says."""

    async def step(self, action: pg.Action) -> pg.Step:
        if self.number == 0:
            if not self.blocks:
                await never()
            type(self).now += 1000.0
            threading.Event().wait(60)
            raise AssertionError("nobody has interrupted it")
        return pg.Step(reward=1.0)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_calls, "REPORT_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(environment_calls, "REPORT_INTERVAL", 0.001)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_hanging_environment_fails_its_episode(
    tokenizer: Tokenizer, at_once: None, blocks: bool, waits: bool
) -> None:
    if not (waits or blocks):
        pytest.skip("an environment that never waits does not hang in an await")

    class Stuck(Hangs):
        pass

    Stuck.blocks, Stuck.waits = blocks, waits  # type: ignore[attr-defined]
    report = list[tuple[str, int, int]]()
    phase = lambda *said: report.append(said)  # noqa: E731
    group = played(tokenizer, Stuck, timeout=0.05, progress=phase, clock=lambda: Stuck.now)
    (lost, kept), judged = judged_alone(group)
    assert (lost.reward, kept.reward) == (None, 1.0)
    assert judged.messages == (
        "the environment's Stuck.step timed out after 0.05 s (--environment.timeout) (completion of sums.jsonl:7, turn 1)",
    )
    if blocks:  # else the thread that reports may come too late
        assert report[-1] == ("", 0, 0)
        assert "waiting for Stuck.step (each call has up to 0.05 s, --environment.timeout)" in {
            text for text, _, _ in report
        }


@pytest.mark.parametrize("blocks", [False, True])
def test_waiting_is_reported(tokenizer: Tokenizer, at_once: None, blocks: bool) -> None:
    """It comes back when the display has been told of it."""
    report = list[str]()
    released = threading.Event()

    def phase(text: str, done: int, total: int) -> None:
        report.append(text)
        released.set()

    class Waits(World):
        async def step(self, action: pg.Action) -> pg.Step:
            if blocks:
                assert released.wait(60)
            else:
                assert await asyncio.to_thread(released.wait, 60)
            return pg.Step(reward=1.0)

    assert [t.reward for t in played(tokenizer, Waits, progress=phase).trajectories] == [1.0, 1.0]
    assert report[0].startswith("waiting for Waits.")
    assert report[-1] == ""


def test_a_method_that_always_times_out_ends_the_rollout(tokenizer: Tokenizer) -> None:
    class Stuck(World):
        async def step(self, action: pg.Action) -> pg.Step:
            await never()
            return pg.Step()

    with pytest.raises(pg.EngineError, match=r"Stuck\.step timed out in all 4 calls \(0\.01 s each\)"):
        played(tokenizer, Stuck, samples=8, timeout=0.01)
    group = played(tokenizer, Stuck, samples=8, timeout=0.01, tolerate_timeouts=True)
    assert [t.stop_reason for t in group.trajectories] == ["failed"] * 8


def test_open_episodes_are_closed_at_once_within_one_grace(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every close waits until all have begun, and one never ends; what ended the rollout is what is raised."""
    monkeypatch.setattr(environment_calls, "CLOSE_TIMEOUT", 0.05)
    monkeypatch.setattr("policygrad.rollout.episodes.CLOSE_TIMEOUT", 0.05)
    closing = list[int]()

    class Server(World):
        async def step(self, action: pg.Action) -> pg.Step:
            if self.number == 3:
                raise pg.EngineError("the server has hung up")
            await never()
            return pg.Step()

        async def close(self) -> None:
            closing.append(self.number)
            await never()

    with pytest.raises(pg.EngineError, match="hung up"):
        played(tokenizer, Server, samples=8)
    assert sorted(closing) == list(range(8))


def test_the_first_signal_ends_a_rollout_whose_environment_swallows_its_cancellation(tokenizer: Tokenizer) -> None:
    from policygrad.training.interrupts import StopController, StopRequested

    class Stuck(World):
        async def step(self, action: pg.Action) -> pg.Step:
            os.kill(os.getpid(), signal.SIGTERM)
            await never()
            return pg.Step()

    with StopController() as stopping, pytest.raises(StopRequested), stopping.interruptible():
        played(tokenizer, Stuck, samples=1)
    assert stopping.requested


def test_await_with_timeout_always_returns() -> None:
    async def exits() -> None:
        raise SystemExit(3)

    async def cancels() -> None:
        raise asyncio.CancelledError

    async def work() -> int:
        return 3

    with AsyncRunner() as waiter:
        assert waiter(await_with_timeout(60, work())) == 3
        with pytest.raises(OverdueError, match=r"within 0\.01 seconds"):
            waiter(await_with_timeout(0.01, never()))
        with pytest.raises(RuntimeError, match="SystemExit"):
            waiter(await_with_timeout(60, exits()))
        with pytest.raises(RuntimeError, match="CancelledError"):
            waiter(await_with_timeout(60, cancels()))


# --- what cannot be meant


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (42, r"Observation\.content must be text or a list of chat messages, not int 42 \(sums\.jsonl:7\)"),
        (({"content": "hello"},), r"message 1 of an Observation has no role: \{'content': 'hello'\}"),
        (({"role": "user", "content": "a"}, "hello"), r"message 2 of an Observation has no role: 'hello'"),
    ],
)
def test_an_invalid_observation_is_reported_with_environment_and_row(
    tokenizer: Tokenizer, content: Any, says: str
) -> None:
    class Odd(World):
        async def reset(self) -> pg.Observation:
            return pg.Observation(content)

    with pytest.raises(pg.EngineError, match=rf"Odd\.reset: {says}"):
        played(tokenizer, Odd)


def test_an_empty_observation_is_attributed_to_the_environment(tokenizer: Tokenizer) -> None:
    class Silent(World):
        async def reset(self) -> pg.Observation:
            return pg.Observation("")

    with pytest.raises(pg.ModelError, match=r"the first observation of Silent \(sums\.jsonl:7\) has no tokens"):
        played(tokenizer, Silent)


@pytest.mark.parametrize("name", ["turns", "branches", "branched_ratio", "ended_turns", 3])
def test_reserved_metric_names_are_refused(tokenizer: Tokenizer, name: Any) -> None:
    class Odd(World):
        async def step(self, action: pg.Action) -> pg.Step:
            return pg.Step(reward=1.0, metrics={name: 2.0})

    with pytest.raises(pg.EngineError, match=rf"Odd\.step: Step\.metrics has the name {name!r}: .*environment/turns"):
        played(tokenizer, Odd)


def test_a_step_without_a_valid_observation_is_refused(tokenizer: Tokenizer) -> None:
    class Odd(World):
        async def step(self, action: pg.Action) -> pg.Step:
            return pg.Step("again")  # type: ignore[arg-type]

    with pytest.raises(pg.EngineError, match=r"Odd\.step: Step\.observation must be an Observation .* not str"):
        played(tokenizer, Odd)


def test_a_class_without_step_is_refused_before_anything_is_sampled(tokenizer: Tokenizer, run: pg.Run) -> None:
    class Half:
        def __init__(self, example: pg.Example) -> None:
            pass

        async def reset(self) -> pg.Observation:
            return pg.Observation("1")

    with pytest.raises(pg.EngineError, match="Half has no method 'step'"):
        played(tokenizer, lambda example: Half(example))
    with pytest.raises(pg.ConfigError, match="--environment Half has no method 'step'"):
        pg.collect(replace(run, environment=Half))


def test_the_calls_of_a_turn_are_limited(tokenizer: Tokenizer) -> None:
    made = list[int]()

    def add(a: int) -> int:
        """Adds.

        Args:
            a: a number
        """
        made.append(a)
        return a

    many = "".join(CALL % ("add", f'"a": {i}') for i in range(9))
    paid: Callable[..., int] = lambda call, answer: 1  # noqa: E731
    tools = pg.ToolUse((add,), None, paid, tools_in_prompt=False, max_calls=4)
    (trajectory,) = played(tokenizer, tools, (many, "3"), samples=1).trajectories
    assert made == [0, 1, 2, 3]
    assert "error: 5 more calls were not made: a turn has at most 4" in trajectory.text
    assert (trajectory.metrics["calls"], trajectory.metrics["calls_excess"], trajectory.reward) == (9.0, 5.0, 4.0)
    with pytest.raises(pg.ConfigError, match="max_calls"):
        pg.ToolUse((add,), max_calls=0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_timeout_is_refused(run: pg.Run, seconds: float) -> None:
    with pytest.raises(pg.ConfigError, match=r"environment\.timeout must be above 0 seconds and finite"):
        replace(run, environment_timeout=seconds)
    with pytest.raises(pg.ConfigError, match=r"environment\.timeout must be above 0 seconds and finite"):
        pg.evaluate(pg.RunOptions(environment_timeout=seconds))


def test_the_option_reaches_the_environments_of_a_run_and_of_an_evaluation(
    run: pg.Run, tmp_path: Path, at_once: None, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "mine.py").write_text(
        MINE
        + "\n\nasync def stuck(self):\n    import asyncio\n    await asyncio.Event().wait()\n\n\nAway.reset = stuck\n"
    )
    record = Record()
    with pytest.raises(pg.EngineError, match=r"Away\.reset timed out in all 4 calls \(0\.02 s each\)"):
        pg.train(replace(run, environment_timeout=0.02), display=record)
    argv = ("--environment", f"{tmp_path}/mine.py:Away", "--environment.timeout", "0.02", "--task", str(run.task))
    code, _, err = run_command("eval", "tiny", *argv, "--problems", "2", "--samples", "4")
    assert code == 2
    assert "Away.reset timed out in all 4 calls (0.02 s each)" in err
    text = (tmp_path / "run" / "run.toml").read_text()
    assert "environment_timeout = 0.02" in text
