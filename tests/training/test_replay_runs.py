"""A replay buffer on the real path: resumed, sampled ahead, verified, and without a note that its samples are old."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows
from doubles.resuming import check_resume
from doubles.trackers import Record
from policygrad.checkpoint import format as checkpoints
from policygrad.commands.train import parse_run
from policygrad.core.replay import ReplayBuffer
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_config
from policygrad.training.config.trust import CodePermissions
from policygrad.training.trainer import train
from policygrad.verification.verify import verify_run


@pytest.fixture(scope="module")
def replaying(small: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The small run with a replay buffer, and a reward that about half of the answers have."""
    folder = tmp_path_factory.mktemp("replaying")
    (folder / "odd.py").write_text(
        "def odd(prompts, completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n"
    )
    algorithm = replace(small.algorithm, filters=(ReplayBuffer(size=8, max_age=3),))
    return replace(
        small,
        algorithm=algorithm,
        prompts_per_step=6,
        samples_per_prompt=3,
        lr=1e-3,
        reward=(f"{folder / 'odd.py'}:odd",),
    )


def test_resume_is_bitwise_with_a_replay_buffer(replaying: Run, tmp_path: Path) -> None:
    """Killed after the third step, when it holds groups of several steps; `verify` repeats the last."""
    record = Record()
    full = check_resume(replaying, tmp_path, killed_after=3, display=record)
    steps = rows(full / "metrics.jsonl")
    assert steps[0]["replay/used"] == 0 < sum(step["replay/used"] for step in steps[3:])
    assert all(step["staleness/max"] == 0 or step["replay/used"] for step in steps)
    assert max(step["staleness/max"] for step in steps) <= 3
    saved = checkpoints.load_checkpoint(full / "checkpoints" / "step-000003")
    assert len({group["key"][2] for group in saved.state["leftover_groups"]}) > 1
    assert not [note for note in record.notes if "older than the weights" in note]
    result = verify_run(full, load_config(full / "run.toml", Run(), CodePermissions(("/",))))
    assert not result.failures, result.failures
    held = {(finding.subject, finding.step) for finding in result.findings if finding.status == "holds"}
    assert {("samples", 5), ("advantages", 5), ("weights", 5)} <= held


@pytest.mark.full
def test_a_replay_buffer_travels_with_rollouts_that_are_sampled_ahead(replaying: Run, tmp_path: Path) -> None:
    full = check_resume(replace(replaying, max_staleness=2), tmp_path)
    assert sum(step["replay/used"] for step in rows(full / "metrics.jsonl")) > 0


def test_resuming_with_another_buffer_begins_with_an_empty_one(replaying: Run, tmp_path: Path) -> None:
    folder, record = tmp_path / "run", Record()
    train(replace(replaying, output=str(folder)), stop_after=2, display=False)
    other = replace(replaying.algorithm, filters=(ReplayBuffer(size=8, max_age=2),))
    train(replace(replaying, algorithm=other, output=str(folder)), resume=folder, stop_after=1, display=record)
    assert "its parts start without their state" in record.said
    assert rows(folder / "metrics.jsonl")[-1]["replay/used"] == 0


def test_a_buffer_is_an_option_of_the_command_line() -> None:
    words = ["grpo", "--algorithm.filters", "ReplayBuffer", "--algorithm.filters.replay-buffer.max-age", "3"]
    assert parse_run(words)[0].algorithm.filters == (pg.parts.ReplayBuffer(max_age=3),)
