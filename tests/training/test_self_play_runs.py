"""Runs of self-play: they learn, resume bit for bit, are verified, and are refused where the algorithm does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows
from doubles.resuming import check_resume
from policygrad.environments.nim import Nim

Command = Callable[..., tuple[int, str, str]]
SMALL = ("--steps", "2", "--prompts-per-step", "4", "--max-tokens", "24", "--evaluation.problems", "2")
SMALL = (*SMALL, "--evaluation.samples-per-prompt", "2", "--environment", "nim", "--plain")


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    return replace(
        small,
        model="tiny",
        algorithm=pg.SPIRAL,
        reward=(),
        steps=2,
        prompts_per_step=4,
        samples_per_prompt=1,
        sampling=pg.SamplingParams(max_tokens=24),
        environment="nim",
        output=str(tmp_path / "run"),
    )


@pytest.mark.full
def test_resume_is_bitwise(run: pg.Run, tmp_path: Path) -> None:
    """With means by role in the checkpoint, and opponents that move at random in evaluations."""
    full = check_resume(run, tmp_path)
    measured = rows(full / "metrics.jsonl")
    assert {"reward/role/first", "reward/role/second", "environment/moves"} <= set().union(*measured)
    assert any("baseline/first" in row for row in measured)


@pytest.mark.full
def test_rollouts_that_wait_for_a_later_step_resume_bitwise(run: pg.Run, tmp_path: Path) -> None:
    check_resume(replace(run, max_staleness=1), tmp_path)


@pytest.mark.full
def test_a_run_is_verified(run_command: Command, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    code, _, err = run_command("train", "spiral", *SMALL, "--output", folder)
    assert code == 0, err
    code, out, err = run_command("verify", folder, "--json")
    assert code == 0, out + err
    report = json.loads(out)
    subjects = {finding["subject"] for finding in report["findings"] if finding["status"] == "holds"}
    assert {"samples", "advantages", "gradient", "weights"} <= subjects


@pytest.mark.parametrize(
    "algorithm", ["grpo", *(pytest.param(name, marks=pytest.mark.full) for name in ("dapo", "remax"))]
)
def test_algorithms_that_compare_all_players_are_refused(run_command: Command, tmp_path: Path, algorithm: str) -> None:
    code, _, err = run_command(
        "train", algorithm, *SMALL, "--samples-per-prompt", "2", "--output", str(tmp_path / "run")
    )
    assert code == 2
    assert "rewards of a zero-sum game add up to 0 whatever the policy does: use algorithm spiral" in " ".join(
        err.split()
    )


def test_players_of_one_role_can_be_compared(run_command: Command, tmp_path: Path) -> None:
    """The remedy of the message."""
    within = ("--algorithm.advantage", "GroupMean", "--algorithm.advantage.group-mean.within", "peers")
    folder = tmp_path / "run"
    code, _, err = run_command("train", "grpo", *SMALL, *within, "--samples-per-prompt", "4", "--output", str(folder))
    assert code == 0, err
    assert (folder / "model").exists()


@pytest.mark.full
def test_a_critic_and_single_turns_fit(small: pg.Run, run_command: Command, tmp_path: Path) -> None:
    """A critic values each player's own text; and without a game there is one role, whose mean is that of all completions."""
    code, _, err = run_command("train", "a2c", *SMALL, "--output", str(tmp_path / "critic"))
    assert code == 0, err
    argv = ("--steps", "1", "--prompts-per-step", "4", "--evaluation.problems", "0", "--plain")
    argv = (*argv, "--model", str(small.model), "--task", str(small.task), "--reward", small.reward[0])
    code, _, err = run_command("train", "spiral", *argv, "--output", str(tmp_path / "one"))
    assert code == 0, err


def take_one(turn: pg.Turn) -> str:
    return "1"


@pytest.mark.parametrize("opponent", ["random", "initial", pytest.param("tiny", marks=pytest.mark.full), take_one])
def test_the_policy_can_play_against_somebody_else(run: pg.Run, opponent: object) -> None:
    environment = pg.SelfPlay(Nim, opponent=opponent, eval_opponent=opponent)  # type: ignore[arg-type]
    rollout = pg.collect(replace(run, environment=None), environment=environment)
    assert len(rollout.completions) == run.prompts_per_step
    assert rollout.batch.role is not None
    assert set(rollout.batch.role.tolist()) == {0, 1}


def test_against_somebody_else_any_algorithm_fits(run: pg.Run) -> None:
    """All games of a prompt have one role, and begin alike."""
    environment = pg.SelfPlay(Nim, opponent="random")
    run = replace(run, environment=None, algorithm=pg.DR_GRPO, samples_per_prompt=4)
    batch = pg.collect(run, environment=environment).batch
    assert batch.role is not None
    assert (batch.role.view(-1, 4) == batch.role.view(-1, 4)[:, :1]).all()
    assert pg.DR_GRPO.with_max_tokens(24).compute_advantages(batch).isfinite().all()


def test_an_evaluation_can_be_repeated(run: pg.Run) -> None:
    run = replace(run, evaluation=pg.EvaluationConfig(problems=4, samples_per_prompt=3), output=None)
    result, again = pg.evaluate(run), pg.evaluate(run)
    assert result.scores == again.scores
    assert [len(problem) for problem in result.problems] == [3] * 4
