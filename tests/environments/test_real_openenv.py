"""OpenEnv's own server, in a virtual environment of its own: make test-environments."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv", reason="OpenEnv has an environment of its own: make test-environments")

import policygrad as pg
from doubles.files import rows, untimed
from policygrad.environments.registry import resolve_environment

pytestmark = pytest.mark.environments
TEXT = pg.Example("1 + 1 =\n")
TESTS = Path(__file__).parents[1]


@contextmanager
def serving(sessions: int = 64, *more: str, app: str = "app") -> Iterator[str]:
    """The address of a server of our own."""
    name = f"doubles.openenv_server:{app}"
    argv = [sys.executable, "-m", "uvicorn", name, "--port", "0", "--log-level", "info", *more]
    process = subprocess.Popen(
        argv, cwd=TESTS, env={**os.environ, "SESSIONS": str(sessions)}, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        message = []
        for line in process.stderr:  # until it says where it listens
            message.append(line)
            if result := re.search(r"running on (http://[\d.]+:\d+)", line):
                yield result[1]
                return
        pytest.fail("".join(message))
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as result:
        yield result


def episodes(factory: Any, seeds: list[int], say: Callable[[str, int], str]) -> list[tuple[str, list[pg.Step]]]:
    """(what each begins with, its steps), all side by side; `say(last observation, turn)` is a turn's text."""

    async def one(seed: int) -> tuple[str, list[pg.Step]]:
        environment = factory(TEXT, seed=seed)
        try:
            first = received = str((await environment.reset()).content)
            steps: list[pg.Step] = []
            while not steps or steps[-1].observation is not None:
                steps.append(await environment.step(pg.Action(say(received, len(steps)))))
                received = str(steps[-1].observation and steps[-1].observation.content)
            return first, steps
        finally:
            await environment.close()

    async def all_of_them() -> list[tuple[str, list[pg.Step]]]:
        return list(await asyncio.gather(*(one(seed) for seed in seeds)))

    return asyncio.run(all_of_them())


def upwards(received: str, turn: int) -> str:
    return f"Perhaps {turn}?"


def test_episodes_side_by_side_are_sessions_with_seeds(address: str) -> None:
    factory = resolve_environment(f"openenv:{address}")
    result = episodes(factory, [1, 2, 1, 3, 4, 5], upwards)
    assert result[0] == result[2]
    assert len({len(steps) for _, steps in result}) > 1
    for first, steps in result:
        number = len(steps) - 1
        assert first == f"Find a digit. Its parity is {number % 2}.\n"
        assert (steps[-1].reward, steps[-1].stop_reason) == (1.0, "terminated")
        assert all(step.observation.content == "\nhigher\n" for step in steps[:-1])


def test_unreadable_and_refused_actions_are_reported_to_the_policy(address: str) -> None:
    message = iter(["no number", "12", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"])
    ((_, steps),) = episodes(pg.OpenEnv(address), [1], lambda received, turn: next(message))
    assert steps[0].observation.content == "\nerror: answer with a whole number\n"
    assert steps[1].observation.content == "\nerror: a digit is below ten\n"
    assert [step.metrics for step in steps[:3]] == [
        {"malformed": 1.0, "refused": 0.0},
        {"malformed": 0.0, "refused": 1.0},
        {"malformed": 0.0, "refused": 0.0},
    ]
    assert steps[-1].reward == 1.0


def test_tools_are_called_as_tools() -> None:
    """A tool tells the number, another one ends the episode with the reward."""

    def say(received: str, turn: int) -> str:
        number = re.search(r"\d", received)
        name, arguments = ("guess", f'{{"number": {number[0]}}}') if number and turn else ("look", "{}")
        return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'

    with serving(app="tools_app") as address:
        ((first, steps),) = episodes(pg.OpenEnv(address), [1], say)
    assert first == TEXT.prompt
    assert [step.reward for step in steps] == [0.0, 1.0]
    assert steps[1].stop_reason == "terminated"
    assert [step.metrics["calls_raised"] for step in steps] == [0, 0]


def test_a_full_server_is_reported_with_a_remedy() -> None:
    with (
        serving(sessions=2) as address,
        pytest.raises(pg.EngineError, match=r"no capacity for another session.*max_concurrent_envs"),
    ):
        episodes(pg.OpenEnv(address), [1, 2, 3], upwards)


def test_pings_are_answered_while_this_process_computes() -> None:
    """It hangs up after 0.3 seconds of silence, and the loop of the episode is held up by a program that takes longer."""
    beats = ("--ws-ping-interval", "0.1", "--ws-ping-timeout", "0.2")

    def say(received: str, turn: int) -> str:
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        return str(turn)

    with serving(64, *beats) as address:
        ((_, steps),) = episodes(pg.OpenEnv(address), [1], say)
    assert steps[-1].reward == 1.0


def test_a_server_that_dies_is_reported() -> None:
    with (
        serving() as address,
        pytest.raises(pg.EngineError, match=rf"{address} closed the connection during a step .*in turn 1"),
    ):
        episodes(pg.OpenEnv(address), [1], lambda received, turn: "99")


def test_a_missing_server_is_reported(address: str) -> None:
    with pytest.raises(pg.EngineError, match="does not describe an action"):
        episodes(pg.OpenEnv("http://127.0.0.1:9"), [1], upwards)
    with pytest.raises(pg.EngineError, match=r"there is no OpenEnv server at ws://127\.0\.0\.1:9/ws"):
        episodes(pg.OpenEnv("http://127.0.0.1:9", text_field="number"), [1], upwards)


def test_sessions_of_a_rollout_end_with_it(tmp_path: Path) -> None:
    """Two steps of four episodes, and an evaluation of two, where there is room for four."""
    with serving(sessions=4) as address:
        run = pg.Run(
            algorithm=pg.GRPO,
            environment=f"openenv:{address}",
            steps=2,
            prompts_per_step=2,
            samples_per_prompt=2,
            sampling=pg.SamplingParams(max_tokens=30),
            evaluation=pg.EvaluationConfig(problems=2, samples_per_prompt=1),
            checkpoint=pg.CheckpointConfig(every=1, keep=3),
            output=str(tmp_path / "whole"),
        )
        full = pg.train(run, display=False)
        message = [row for row in rows(full.output / "metrics.jsonl") if "environment/turns" in row]
        assert len(message) == 2
        assert all("environment/malformed" in row for row in message)
        pieces = tmp_path / "pieces"
        pg.train(replace(run, output=str(pieces)), stop_after=1, display=False)
        with pytest.raises(pg.ConfigError, match=f"--allow-code {address}"):  # it is shown what the model writes
            pg.train(resume=pieces, display=False)
        pg.train(resume=pieces, allow_code=(address,), display=False)
        assert untimed(full.output / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
        assert rows(full.output / "completions.jsonl") == rows(pieces / "completions.jsonl")
