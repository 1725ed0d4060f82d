"""Process rewards and prefix values on the real path: runs that resume bit for bit, and what is refused before they start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows, same, untimed, weights
from doubles.resuming import check_resume
from doubles.trackers import Record
from policygrad.errors import RunError
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.run import Run
from policygrad.training.trainer import train


@pytest.fixture
def stepwise(small: Run) -> Run:
    """The small run with a reward for steps beside its own."""
    process = small.reward[0].replace(":starts_with_a_digit", ":digits")
    return replace(
        small,
        algorithm=pg.GRPO_PROCESS,
        reward=(*small.reward, process),
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=6,
        evaluation=EvaluationConfig(problems=2, samples_per_prompt=2),
    )


def vine(run: Run) -> Run:
    algorithm = replace(pg.VINEPPO, advantage=(pg.PrefixValue(3),), update_rule=pg.GradientSteps(epochs=2))
    return replace(run, algorithm=algorithm, reward=run.reward[:1], step_end="[a-z ]")


@pytest.mark.full
@pytest.mark.parametrize("name", ["grpo_process", "vineppo"])
def test_resume_is_bitwise_with_process_rewards(stepwise: Run, tmp_path: Path, name: str) -> None:
    run = stepwise if name == "grpo_process" else vine(stepwise)
    full = check_resume(run, tmp_path)
    written = rows(full / "completions.jsonl")
    assert all(row["steps"][-1][0] == row["tokens"] for row in written)
    assert any(abs(advantage) > 0.1 for row in written for _, advantage in row["steps"])
    steps = [row for row in untimed(full / "metrics.jsonl") if "steps/mean" in row]
    assert len(steps) == run.steps
    for row in steps:
        assert row["steps/mean"] > 1.2
        if name == "vineppo":
            assert row["tokens/values"] > row["tokens/sampled"] / 2
            assert row["values/failed"] == 0
        else:
            assert 0 < row["rewards/" + run.reward[1]] < 1


def test_process_rewards_train_without_outcome_rewards(stepwise: Run, tmp_path: Path) -> None:
    """The same steps' scores beside the task's reward or beside its opposite: the outcome is measured and moves nothing."""
    (tmp_path / "other.py").write_text(
        "def no_digit(prompts, completions, **columns):\n    return [2.0 * (not c[:1].isdigit()) for c in completions]\n"
    )
    other = (f"{tmp_path / 'other.py'}:no_digit", stepwise.reward[1])

    def go(outcome: bool, reward: tuple[str, ...], name: str) -> Path:
        algorithm = replace(pg.GRPO_PROCESS, advantage=(pg.ProcessReward(outcome=outcome),))
        run = replace(stepwise, algorithm=algorithm, reward=reward, output=str(tmp_path / name))
        return train(replace(run, evaluation=EvaluationConfig(problems=0)), display=False).output

    one, two = go(False, stepwise.reward, "one"), go(False, other, "two")
    assert same(weights(one), weights(two))
    first, second = rows(one / "metrics.jsonl"), rows(two / "metrics.jsonl")
    assert [m["reward"] for m in first] != [m["reward"] for m in second]
    assert [m["objective"] for m in first] == [m["objective"] for m in second]
    assert any(row["steps"][0][1] for row in rows(one / "completions.jsonl"))
    assert not same(weights(one), weights(go(True, stepwise.reward, "with")))


def test_the_display_describes_step_rewards(stepwise: Run, tmp_path: Path) -> None:
    def told(run: Run, name: str) -> str:
        shown = Record()
        train(
            replace(run, output=str(tmp_path / name), evaluation=EvaluationConfig(problems=0)),
            display=shown,
            stop_after=1,
        )
        assert shown.info is not None
        return shown.info.facts["reward"]

    process = stepwise.reward[1]
    assert told(stepwise, "a").endswith(f"{process} (of steps)")
    assert told(replace(vine(stepwise), reward=stepwise.reward, step_end=None), "c").endswith(
        f"{process} (only where steps end)"
    )
    assert told(vine(stepwise), "d").endswith("steps by '[a-z ]'")


def test_a_task_without_steps_is_refused(stepwise: Run, tmp_path: Path) -> None:
    for algorithm in (pg.GRPO_PROCESS, pg.VINEPPO):
        run = replace(stepwise, algorithm=algorithm, reward=stepwise.reward[:1], output=str(tmp_path / "no"))
        with pytest.raises(RunError, match="--task embedded_steps"):
            train(run)
    assert not (tmp_path / "no").exists()
