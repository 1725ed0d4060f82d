"""More completions than are trained on, on the real path: resumed to the bit, on the command line, refused where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows, same, weights
from doubles.resuming import check_resume
from policygrad.training.config.run import Run
from policygrad.training.trainer import train

ODD = "def odd(prompts, completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n"
"""A reward that about half of the answers have."""


def write_odd_reward(folder: Path) -> str:
    """Write the reward to a file, and return its name."""
    (folder / "odd.py").write_text(ODD)
    return f"{folder / 'odd.py'}:odd"


@pytest.fixture
def run(small: Run) -> Run:
    return replace(small, steps=2, prompts_per_step=2, sampling=pg.SamplingParams(max_tokens=4))


@pytest.mark.parametrize("statistics", ["all", pytest.param("kept", marks=pytest.mark.full)])
def test_resume_is_bitwise_with_downsampling(run: Run, tmp_path: Path, statistics: Any) -> None:
    """Which completions train is drawn anew in every step, and in a resumed step as if nothing had stopped."""
    part = pg.Downsample(3, "random", statistics)
    algorithm = replace(pg.DR_GRPO, filters=(part,), update_rule=pg.GradientSteps(minibatches=2))
    run = replace(run, algorithm=algorithm, reward=(write_odd_reward(tmp_path),))
    full = check_resume(run, tmp_path)
    metrics = rows(full / "metrics.jsonl")
    assert [m["completions/sampled_per_trained"] for m in metrics] == pytest.approx([8 / 3] * 2)
    everyone = train(
        replace(run, algorithm=replace(algorithm, filters=()), output=str(tmp_path / "all")), display=False
    )
    assert not same(weights(full), weights(everyone.output))


@pytest.mark.full
def test_keeping_all_samples_changes_nothing(run: Run, tmp_path: Path) -> None:
    runs = [
        train(
            replace(
                run,
                reward=(write_odd_reward(tmp_path),),
                output=str(tmp_path / name),
                algorithm=replace(pg.DR_GRPO, filters=filters),
            ),
            display=False,
        )
        for name, filters in (
            ("plain", ()),
            ("every", (pg.Downsample(8),)),
            ("kept", (pg.Downsample(8, statistics="kept"),)),
        )
    ]
    assert all(same(weights(runs[0].output), weights(other.output)) for other in runs[1:])


@pytest.mark.full
def test_downsampling_with_dynamic_sampling_and_overlong_mask(small: Run, tmp_path: Path) -> None:
    """Two of eight are trained on; where the mask leaves none, none is, which is counted and moves nothing."""
    filters = (pg.DropZeroVariance(max_rounds=3), pg.Downsample(2, "max_variance"))
    reward, output = (write_odd_reward(tmp_path),), str(tmp_path / "run")
    run = replace(small, algorithm=replace(pg.DAPO, filters=filters), reward=reward, steps=2, output=output)
    train(run, display=False)
    for m in rows(tmp_path / "run" / "metrics.jsonl"):
        assert m["completions/trained"] == 2 * (4 - m["dynamic/unfilled"]) > 0
        assert m["completions/sampled_per_trained"] == m["completions/sampled"] / m["completions/trained"]
    masked = replace(run.algorithm, filters=(filters[0], pg.MaskTruncated(), filters[1]))
    tight = replace(run, algorithm=masked, sampling=pg.SamplingParams(max_tokens=1), output=str(tmp_path / "tight"))
    train(tight, display=False)
    for m in rows(tmp_path / "tight" / "metrics.jsonl"):
        assert m["completions/truncated_ratio"] == 1
        assert m["completions/trained"] == 0
        assert "completions/sampled_per_trained" not in m


def test_the_downsampling_option_on_the_command_line(small: Run, tmp_path: Path, run_command: Any) -> None:
    options = ["--model", small.model, "--task", small.task, "--reward", small.reward[0], "--evaluation.problems", "0"]
    options += ["--steps", "1", "--prompts-per-step", "2", "--max-tokens", "4", "--output", str(tmp_path / "run")]
    options += ["--algorithm.filters", "Downsample", "--algorithm.filters.downsample.keep", "2"]
    options += ["--algorithm.filters.downsample.by", "max_variance"]
    code, _, errors = run_command("train", "dr_grpo", *options, "--samples-per-prompt", "5", "--plain")
    assert code == 0, errors
    assert rows(tmp_path / "run" / "metrics.jsonl")[0]["completions/sampled_per_trained"] == 5 / 2
    code, _, errors = run_command("train", "dr_grpo", *options, "--samples-per-prompt", "1", "--plain")
    assert code == 2
    assert "Downsample trains on 2 samples per prompt, and there are 1" in errors
    code, message, _ = run_command("train", "dr_grpo", *options, "--dry-run")
    assert "of the largest variance of R" in message
