"""Checkpoints of runs of several processes: no process has the whole, as many go on to the bit, any number goes on, and kills."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import policygrad as pg
from doubles import wrong_ranks
from doubles.files import rows, same, untimed, weights
from doubles.trackers import Record
from policygrad.checkpoint import format as checkpoints
from policygrad.learners.fsdp.controller import FsdpController
from policygrad.training.config.serialization import dump_config
from policygrad.training.export import export_stopped

pytestmark = pytest.mark.usefixtures("forked_ranks")
LOOSE = 2e-4
"""Sums are taken in another order."""


@pytest.fixture(scope="module")
def run(small: pg.Run, forked_ranks: None) -> pg.Run:
    return replace(small, algorithm=pg.GRPO, steps=3, learner=pg.LearnerConfig(micro_tokens=64, world_size=2))


@pytest.fixture(scope="module")
def unbroken(run: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes."""
    return pg.train(replace(run, output=str(tmp_path_factory.mktemp("unbroken") / "run")), display=False).output


def check_same(unbroken: Path, folder: Path) -> None:
    assert same(weights(unbroken), weights(folder))
    assert untimed(unbroken / "metrics.jsonl") == untimed(folder / "metrics.jsonl")
    assert rows(unbroken / "completions.jsonl") == rows(folder / "completions.jsonl")
    one, other = (checkpoints.load_checkpoint(path / "checkpoints" / "step-000003") for path in (unbroken, folder))
    assert same(one.tensors, other.tensors)


def check_alike(unbroken: Path, folder: Path) -> None:
    expected, results = weights(unbroken), weights(folder)
    assert all(torch.allclose(expected[name], results[name], atol=LOOSE) for name in expected)


def gathers(learner: FsdpController) -> None:
    raise AssertionError("no process is to hold the whole state")


@pytest.mark.full
def test_as_many_go_on_to_the_bit_and_any_number_goes_on(
    run: pg.Run, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(FsdpController, "state", gathers)
    pg.train(replace(run, output=str(folder)), stop_after=2, display=False)
    newest = folder / "checkpoints" / "step-000002"
    held = [load_file(newest / f"shard-0000{rank}.safetensors") for rank in (0, 1)]
    name = "adam/model.layers.0.mlp.up_proj.weight/exp_avg"
    assert [share[name].shape for share in held] == [(32, 32), (32, 32)]
    assert not any(name.startswith(("weights/", "adam/")) for name in load_file(newest / "tensors.safetensors"))
    copies = {ranks: tmp_path / str(ranks) for ranks in (1, 3)}
    for copy in copies.values():
        shutil.copytree(folder, copy)
    pg.train(run, resume=folder, display=False)
    check_same(unbroken, folder)
    for ranks, copy in copies.items():
        pg.train(replace(run, learner=replace(run.learner, world_size=ranks)), resume=copy, display=False)
        check_alike(unbroken, copy)
    assert (copies[3] / "checkpoints" / "step-000003" / "shard-00002.safetensors").is_file()
    assert not list((copies[1] / "checkpoints" / "step-000003").glob("shard-*"))


def test_what_one_process_has_saved_is_gone_on_with_and_what_two_have_is_exported(run: pg.Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    one = replace(run, learner=replace(run.learner, world_size=1), output=str(folder))
    pg.train(one, stop_after=1, display=False)
    two = pg.train(run, resume=folder, stop_after=1, display=False)
    assert two.steps == 2
    model = export_stopped(folder)
    saved = checkpoints.load_checkpoint(folder / "checkpoints" / "step-000002").tensors
    expected = {name.removeprefix("weights/"): x for name, x in saved.items() if name.startswith("weights/")}
    results = load_file(model / "model.safetensors")
    assert all(torch.equal(results[name], x) for name, x in expected.items() if name in results)
    assert len(results) > 10


def with_wrong(rank: int, how: str, at: int) -> Callable[[nn.Module, pg.Run], Any]:
    """A learner's factory."""

    def make(model: nn.Module, run: pg.Run) -> Any:
        learner = pg.make_local_learner(model, run)
        assert isinstance(learner, FsdpController)
        learner.run_on_all(wrong_ranks.at_saves, rank, how, at)
        return learner

    return make


@pytest.mark.full
@pytest.mark.parametrize(("how", "left"), [("before", 1), ("midst", 1), ("after", 1)])
def test_a_process_that_is_killed_while_it_saves_leaves_a_run_that_resumes(
    run: pg.Run, unbroken: Path, tmp_path: Path, how: str, left: int
) -> None:
    """At its second checkpoint; then as many processes as before go on from the first one, and end as if nothing had been."""
    folder = tmp_path / "run"
    with pytest.raises(pg.RunError, match=r"rank 1 has exited \(exit code -9\)"):
        pg.train(replace(run, output=str(folder)), learner=with_wrong(1, how, 2), display=False)
    assert checkpoints.newest_step(folder / "checkpoints") == left
    assert not list((folder / "checkpoints").glob(".tmp-*"))
    pg.train(run, resume=folder, display=False)
    check_same(unbroken, folder)


KILLED = """
import os, signal, sys
from policygrad.checkpoint import format as checkpoints
from policygrad.cli import main

finish = checkpoints.CheckpointWriter.finish

def killed(self, written=tuple):
    if written is not tuple and self.final.name == "step-000002":  # a checkpoint, not a record
        written()
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(self, written)

checkpoints.CheckpointWriter.finish = killed
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
def test_rank_0_that_is_killed_before_it_seals_leaves_a_run_that_resumes(
    run: pg.Run, unbroken: Path, tmp_path: Path
) -> None:
    """All shares are on the disk, and there is no manifest: the checkpoint before it is the newest."""
    (tmp_path / "run.toml").write_text(dump_config(run))
    folder = tmp_path / "run"
    words = ["train", "--config", "run.toml", "--output", str(folder), "--plain"]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *words, "--allow-code", run.reward[0].rpartition(":")[0]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoints.newest_step(folder / "checkpoints") == 1
    pg.train(run, resume=folder, display=False)
    check_alike(unbroken, folder)  # another process may compute with another number of threads


@pytest.mark.full
def test_a_share_that_cannot_be_written_is_said_and_training_goes_on(
    run: pg.Run, unbroken: Path, tmp_path: Path
) -> None:
    record = Record()
    result = pg.train(replace(run, output=str(tmp_path / "run")), learner=with_wrong(1, "refused", 2), display=record)
    assert result.steps == 3
    assert "step-000002 was not written: [Errno 5] rank 1: Input/output error" in record.said
    assert "the previous checkpoint, step-000001, is intact" in record.said
    assert same(weights(unbroken), weights(tmp_path / "run"))
