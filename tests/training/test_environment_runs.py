"""An environment of one's own by its name: on the command line, in run.toml, after a resume, in an evaluation; bit for bit."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows
from doubles.resuming import check_resume
from policygrad.training.config.trust import find_code_references

MINE = """
import asyncio
from random import Random

import policygrad as pg


class Guess:
    '''Three turns: a number is told, another one each time, and letters count.'''

    def __init__(self, example, seed):
        self.example, self.draw, self.turns = example, Random(seed), 0

    async def reset(self):
        return pg.Observation(f"{self.example.columns['answer']} then {self.draw.randrange(100)}: ")

    async def step(self, action):
        self.turns += 1
        await asyncio.sleep(0)
        worth = float(sum(c.isdigit() for c in action.text))
        if self.turns == 3:
            return pg.Step(reward=worth, metrics={"digits": worth}, stop_reason="guessed")
        return pg.Step(pg.Observation(f" no, {self.draw.randrange(100)}: "), worth / 2)


def look(word: str) -> str:
    '''Looks a word up.

    Args:
        word: the word
    '''
    return word[::-1]


def every_turn(text):
    return (pg.ToolCall("look", {"word": text}),)


def long(answer, example):
    return float(len(example.columns["answer"]))


LOOKS = pg.ToolUse((look,), long, lambda call, answer: len(answer.text) / 9, max_turns=3, tools_in_prompt=False, parser=every_turn)
NUMBER = 3
"""


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    (tmp_path / "mine.py").write_text(MINE)
    return replace(
        small,
        model="tiny",  # which ends its turns
        reward=(),
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=3,
        sampling=pg.SamplingParams(max_tokens=24),
        environment=f"{tmp_path / 'mine.py'}:Guess",
        output=str(tmp_path / "run"),
    )


BY_TURN = replace(
    pg.PPO, advantage=(pg.TurnGAE(0.9), pg.Whiten()), critic=pg.Critic(turn_gamma=0.9), update_rule=pg.GradientSteps()
)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        pytest.param("Guess", None, id="Guess"),
        pytest.param("LOOKS", BY_TURN, id="LOOKS", marks=pytest.mark.full),
        pytest.param("LOOKS", pg.ECHO, id="LOOKS, predicted", marks=pytest.mark.full),
    ],
)
def test_resume_is_bitwise_with_an_environment(
    run: pg.Run, tmp_path: Path, name: str, algorithm: pg.Algorithm | None
) -> None:
    """With the world's draws, tools in threads of their own, and credit along turns from a critic."""
    run = replace(run, environment=f"{tmp_path / 'mine.py'}:{name}", algorithm=algorithm or run.algorithm)
    full = check_resume(run, tmp_path)
    report = rows(full / "completions.jsonl")
    assert max(sum(who == "policy" for who, _ in row.get("turns", ())) for row in report) == 3
    assert ("guessed" if name == "Guess" else "turns") in {row["stop_reason"] for row in report}
    measured = rows(full / "metrics.jsonl")
    assert all(row["environment/turns"] > 1 for row in measured)
    predicted = [row["observation/nll"] for row in measured if "observation/nll" in row]
    assert predicted == sorted(predicted, reverse=True)
    assert len(predicted) == (run.steps if run.algorithm.reads_observations else 0)


def test_a_groups_environments_share_a_seed(run: pg.Run) -> None:
    first, second = (pg.collect(run, step=1) for _ in range(2))
    later = pg.collect(run, step=2)
    assert first.completions == second.completions
    message = [tuple(g.prompt_ids.tolist()) for g in first.groups]
    assert message != [tuple(g.prompt_ids.tolist()) for g in later.groups]
    columns = [g.spec.example.columns["answer"] for g in first.groups]
    assert len({*message}) == len({*columns}) == len(message)


def test_the_command_takes_an_environment_by_name(
    run: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("--task", str(run.task), "--environment", "mine.py:Guess", "--max-tokens", "24", "--steps", "2")
    small = ("--prompts-per-step", "2", "--samples-per-prompt", "2", "--evaluation.problems", "0", "--output", "out")
    code, _, err = run_command("train", "dr_grpo", "--model", str(run.model), *argv, *small, "--stop-after", "1")
    assert code in (0, 3), err
    assert tomllib.loads(Path("out/run.toml").read_text())["environment"] == "mine.py:Guess"
    code, _, err = run_command("train", "--resume", "out", "--environment", "mine.py:LOOKS")
    assert code == 2
    assert "with another --environment would make evaluations before and after incomparable" in err
    code, _, err = run_command("train", "--resume", "out")
    assert code == 0, err
    code, out, err = run_command("eval", "out", "--task", str(run.task), "--environment", "mine.py:Guess", "--problems", "2",
                                 "--samples", "1", "--max-tokens", "24")  # fmt: skip
    assert code == 0, err
    assert " no, " in out


def test_the_calculator_is_built_in(run: pg.Run) -> None:
    run = replace(run, environment="calculator", reward=("exact_match",), sampling=pg.SamplingParams(max_tokens=16))
    assert {"environment/calls"} <= pg.collect(run).metrics.keys()
    assert not list(find_code_references({"environment": "calculator"}))  # ours: a file may name it


def test_an_invalid_environment_is_refused(run: pg.Run, tmp_path: Path) -> None:
    for given, says in (
        (f"{tmp_path / 'mine.py'}:Gess", "did you mean 'Guess'"),
        (f"{tmp_path / 'mine.py'}:NUMBER", "creates no environment"),
        (3, "3 creates no environment"),
    ):
        with pytest.raises(pg.ConfigError, match=says):
            pg.train(replace(run, environment=given), display=False)
    with pytest.raises(pg.ConfigError, match="environment is set both in the run and as an argument"):
        pg.collect(run, environment=lambda example: pg.SingleTurn(example))
    assert list(find_code_references({"environment": "/elsewhere/mine.py:Guess"})) == ["/elsewhere/mine.py"]
