"""Answers that a tight budget cuts off, on the real path: they end in nothing, or go on in the critic's value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows, same, untimed, weights
from policygrad.training.config.run import Run
from policygrad.training.trainer import train


@pytest.mark.parametrize(
    "name", ["ppo", pytest.param("a2c", marks=pytest.mark.full), pytest.param("vapo", marks=pytest.mark.full)]
)
def test_truncated_completions_are_bootstrapped(small: Run, tmp_path: Path, name: str) -> None:
    """The head starts at V = 0, so the first step is the same with and without; from the second on V of the end counts."""

    def go(bootstrap: bool) -> Path:
        algorithm = pg.get_algorithm(name)
        critic = replace(algorithm.critic, pretrain=0, lr=3e-2)  # type: ignore[type-var]
        first = replace(algorithm.advantage[0], bootstrap=bootstrap)  # type: ignore[call-arg]
        algorithm = replace(
            algorithm,
            advantage=(first, *algorithm.advantage[1:]),
            critic=critic,
            shaping=(),
            update_rule=pg.GradientSteps(),
        )
        output = str(tmp_path / str(bootstrap))
        run = replace(small, algorithm=algorithm, sampling=pg.SamplingParams(max_tokens=3), steps=2, output=output)
        return train(run, display=False).output

    with_it, without = go(True), go(False)
    steps = rows(with_it / "metrics.jsonl")
    assert all(m["completions/truncated_ratio"] > 0.5 for m in steps)
    first, second = (untimed(folder / "metrics.jsonl") for folder in (with_it, without))
    assert first[0] == second[0]
    assert first[1]["explained_variance"] != second[1]["explained_variance"]
    assert not same(weights(with_it), weights(without))
    assert rows(with_it / "completions.jsonl")[0]["advantage"] == rows(without / "completions.jsonl")[0]["advantage"]


def test_the_bootstrap_option_on_the_command_line(small: Run, tmp_path: Path, run_command: object) -> None:
    options = ["--model", small.model, "--task", small.task, "--reward", small.reward[0], "--evaluation.problems", "0"]
    options += ["--steps", "2", "--prompts-per-step", "2", "--samples-per-prompt", "3", "--max-tokens", "2", "--plain"]
    options += ["--algorithm.advantage.gae.bootstrap", "--output", str(tmp_path / "run")]
    code, _, errors = run_command("train", "ppo", *options)  # type: ignore[operator]
    assert code == 0, errors
    assert "bootstrap = true" in (tmp_path / "run" / "run.toml").read_text()
    code, message, _ = run_command("train", "ppo", "--algorithm.advantage.gae.bootstrap", "--dry-run")  # type: ignore[operator]
    assert "where truncated" in message
