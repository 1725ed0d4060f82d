"""Dynamic sampling on the real path: what it samples for what it trains, and what waits for the next step at a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows, same, untimed, weights
from doubles.trackers import Record
from policygrad.checkpoint import format as checkpoints
from policygrad.training.config.run import Run
from policygrad.training.trainer import train


def test_dapo_on_the_embedded_task_samples_little_more_than_it_trains(tmp_path: Path) -> None:
    """As it comes, at its first steps: 2.0 completions sampled for each that was trained on, when every round was a whole step."""
    run = Run(
        algorithm=pg.DAPO,
        evaluation=pg.EvaluationConfig(problems=0),
        rewards=pg.RewardConfig(num_workers=1),
        output=str(tmp_path / "run"),
    )
    train(run, stop_after=4, display=False)
    steps = rows(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 4
    assert 1 < steps[0]["completions/sampled_per_trained"] <= 1.25
    assert sum(m["completions/sampled_per_trained"] for m in steps) / 4 <= 1.25
    assert all(m["dynamic/unfilled"] == m["dynamic/discarded"] == 0 for m in steps)
    assert all(bool(m["dynamic/leftover"]) == bool(m["staleness/max"]) for m in steps)


@pytest.fixture
def refilling(small: Run, tmp_path: Path) -> Run:
    """The small run with dynamic sampling, an epoch more, and a reward that about half of the answers have."""
    (tmp_path / "odd.py").write_text(
        "def odd(prompts, completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n"
    )
    algorithm = replace(
        pg.DR_GRPO, filters=(pg.DropZeroVariance(max_rounds=6),), update_rule=pg.GradientSteps(epochs=2)
    )
    changed = {"prompts_per_step": 6, "samples_per_prompt": 3, "reward": (f"{tmp_path / 'odd.py'}:odd",)}
    return replace(small, algorithm=algorithm, lr=1e-3, **changed)  # type: ignore[arg-type]


def test_resume_is_bitwise_with_leftover_groups(refilling: Run, tmp_path: Path) -> None:
    full = train(replace(refilling, output=str(tmp_path / "whole")), display=False)
    pieces = tmp_path / "pieces"
    result = train(replace(refilling, output=str(pieces)), stop_after=1, display=False)
    while result.steps < refilling.steps:
        result = train(resume=pieces, stop_after=1, display=False)
    assert same(weights(full.output), weights(pieces))
    assert untimed(full.output / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    assert (full.output / "completions.jsonl").read_text() == (pieces / "completions.jsonl").read_text()
    carried = [m["dynamic/leftover"] for m in rows(full.output / "metrics.jsonl")]
    assert carried[0] == 0
    assert any(carried)


def test_resuming_with_another_filter_discards_leftover_groups(refilling: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = replace(refilling, output=str(folder))
    train(run, stop_after=1, display=False)
    while not (saved := checkpoints.load_latest(folder / "checkpoints", warn=pytest.fail)).state["leftover_groups"]:
        train(resume=folder, stop_after=1, display=False)
    assert {name for name in saved.tensors if name.startswith("leftover/")}
    record = Record()
    other = replace(
        run, algorithm=replace(run.algorithm, filters=(pg.DropZeroVariance(max_rounds=6, keep_leftovers=False),))
    )
    train(other, resume=folder, stop_after=1, display=record)
    assert "its parts start without their state" in record.said
    assert rows(folder / "metrics.jsonl")[-1]["dynamic/leftover"] == 0


def test_leftover_groups_give_no_staleness_note(refilling: Run, tmp_path: Path) -> None:
    """It is how dynamic sampling works; the metric counts them."""
    record = Record()
    first_order = replace(refilling.algorithm, update_rule=pg.GradientSteps())
    train(replace(refilling, output=str(tmp_path / "run"), algorithm=first_order), display=record)
    assert any(m["dynamic/leftover"] for m in rows(tmp_path / "run" / "metrics.jsonl"))
    assert not [note for note in record.notes if "step before" in note or "older than the weights" in note]
