"""Dynamic sampling on the real path: what it samples for what it trains, and what waits for the next step at a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows, same, untimed, weights
from doubles.resuming import rewind
from doubles.trackers import Record
from policygrad.checkpoint import format as checkpoints
from policygrad.training.config.run import Run
from policygrad.training.trainer import train


@pytest.mark.full
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


@pytest.fixture(scope="module")
def refilling(small: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The small run with dynamic sampling, an epoch more, and a reward that about half of the answers have."""
    folder = tmp_path_factory.mktemp("refilling")
    (folder / "odd.py").write_text(
        "def odd(prompts, completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n"
    )
    algorithm = replace(
        pg.DR_GRPO, filters=(pg.DropZeroVariance(max_rounds=6),), update_rule=pg.GradientSteps(epochs=2)
    )
    changed = {"prompts_per_step": 6, "samples_per_prompt": 3, "reward": (f"{folder / 'odd.py'}:odd",)}
    each = pg.CheckpointConfig(every=1, keep=9)
    return replace(
        small,
        algorithm=algorithm,
        lr=1e-3,
        checkpoint=each,
        output=str(folder / "whole"),
        **changed,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def whole(refilling: Run) -> tuple[Path, int]:
    """The folder of the run when it has ended, and its first step after which groups are left over."""
    folder = train(refilling, display=False).output
    saved = (checkpoints.load_checkpoint(path) for path in sorted((folder / "checkpoints").iterdir()))
    return folder, next(checkpoint.step for checkpoint in saved if checkpoint.state["leftover_groups"])


@pytest.mark.full
def test_resume_is_bitwise_with_leftover_groups(refilling: Run, whole: tuple[Path, int], tmp_path: Path) -> None:
    full, step = whole
    assert step < refilling.steps
    pieces = rewind(full, tmp_path / "pieces", step)
    train(resume=pieces, allow_code=("/",), display=False)
    assert same(weights(full), weights(pieces))
    assert untimed(full / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    assert (full / "completions.jsonl").read_text() == (pieces / "completions.jsonl").read_text()
    carried = [m["dynamic/leftover"] for m in rows(full / "metrics.jsonl")]
    assert carried[0] == 0
    assert carried[step]


def test_dynamic_sampling_samples_little_more_than_it_trains(whole: tuple[Path, int]) -> None:
    """A quarter of the groups have no variance. Rounds of whole steps would sample two for each that is trained on."""
    steps = rows(whole[0] / "metrics.jsonl")
    assert all(m["dynamic/unfilled"] == m["dynamic/discarded"] == 0 for m in steps)
    assert sum(m["completions/sampled_per_trained"] for m in steps) / len(steps) < 1.7


def test_resuming_with_another_filter_discards_leftover_groups(
    refilling: Run, whole: tuple[Path, int], tmp_path: Path
) -> None:
    full, step = whole
    folder = rewind(full, tmp_path / "run", step)
    saved = checkpoints.load_latest(folder / "checkpoints", warn=pytest.fail)
    assert {name for name in saved.tensors if name.startswith("leftover/")}
    record = Record()
    filters = (pg.DropZeroVariance(max_rounds=6, keep_leftovers=False),)
    other = replace(refilling, algorithm=replace(refilling.algorithm, filters=filters), output=str(folder))
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
