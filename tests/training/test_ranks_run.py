"""Runs of two processes, started here or by torchrun: that of one; ended by a process that dies, and gone on with by one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import policygrad as pg
from doubles.files import rows, untimed, weights
from doubles.forked_ranks import forking_ranks
from policygrad.errors import NumericsError, PolicygradError
from policygrad.learners.fsdp.controller import FsdpController
from policygrad.samplers.base import Generation, Request
from policygrad.training.config.serialization import dump_config
from policygrad.training.distributed import _sample_together

LOOSE = 2e-4
"""Sums are taken in another order."""


@pytest.fixture(scope="module")
def run(small: pg.Run) -> pg.Run:
    return replace(
        small,
        algorithm=pg.GRPO,
        steps=3,
        evaluation=pg.EvaluationConfig(problems=4, samples_per_prompt=2),
        learner=pg.LearnerConfig(micro_tokens=64),
    )


@pytest.fixture(scope="module")
def alone(run: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    return pg.train(replace(run, output=str(tmp_path_factory.mktemp("alone") / "run")), display=False).output


def check_alike(alone: Path, folder: Path) -> None:
    """The same completions and held-out scores, and numbers that differ by rounding."""
    assert rows(alone / "completions.jsonl") == [
        row | {"advantage": pytest.approx(row["advantage"], abs=LOOSE)} for row in rows(folder / "completions.jsonl")
    ]
    for one, other in zip(untimed(alone / "metrics.jsonl"), untimed(folder / "metrics.jsonl"), strict=True):
        assert other == pytest.approx(one, rel=LOOSE, abs=LOOSE)
    expected, results = weights(alone), weights(folder)
    assert expected.keys() == results.keys()
    assert all(torch.allclose(expected[name], results[name], atol=LOOSE) for name in expected)


class Killing(pg.Callback):
    """Kills the other process after a step, as the kernel would."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, trainer: pg.Trainer, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            assert isinstance(trainer.learner, FsdpController)
            (other,) = trainer.learner._workers._processes
            other.kill()


@pytest.mark.parametrize("ranks", ["forked", pytest.param("started", marks=pytest.mark.full)])
def test_a_process_that_dies_ends_the_run_and_one_process_goes_on_with_it(
    run: pg.Run, alone: Path, tmp_path: Path, ranks: str
) -> None:
    folder = tmp_path / "run"
    two = replace(run, learner=replace(run.learner, world_size=2), output=str(folder))
    killed = pytest.raises(pg.RunError, match=r"rank 1 has exited \(exit code -9\), during")
    with killed as raised, forking_ranks() if ranks == "forked" else nullcontext():
        pg.train(two, display=False, callbacks=[Killing(2)])
    assert f"--resume {folder}" in "".join(raised.value.__notes__)
    result = pg.train(replace(two, learner=run.learner), resume=folder, display=False)
    assert result.steps == 3
    check_alike(alone, folder)


@pytest.mark.full
@forking_ranks()
def test_adapters_are_trained_and_drawn_with_by_two_processes(run: pg.Run, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    learner = replace(run.learner, lora="rank=4")
    one, two = (
        pg.train(replace(run, learner=replace(learner, world_size=n), output=str(tmp_path / f"{n}")), display=False)
        for n in (1, 2)
    )
    assert all("lora_" in name for name in weights(two.output))
    check_alike(one.output, two.output)
    resumed = pg.train(replace(run, learner=learner, steps=4), resume=two.output, display=False)
    assert resumed.steps == 4


@pytest.mark.full
def test_torchrun_trains_the_same_run(run: pg.Run, alone: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump_config(run))
    folder = tmp_path / "run"
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
    ]
    argv = ["localhost:0", "-m", "policygrad", "train", "--config", "run.toml", "--output", str(folder), "--plain"]
    done = subprocess.run(
        [*start, *argv, "--allow-code", run.reward[0].rpartition(":")[0]],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    check_alike(alone, folder)


class _Two:
    """Rank 0 of two processes; what the other one has is made up."""

    rank, size = 0, 2

    def __init__(self, other: tuple[list[Generation], PolicygradError | None]) -> None:
        self.other, self.sent = other, list[object]()

    def all_gather(self, x: object) -> list[object]:
        self.sent.append(x)
        return [x, self.other]


class _Draws:
    """A sampler of one answer, or of an error."""

    def __init__(self, said: list[Generation] | PolicygradError) -> None:
        self.said = said

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        if isinstance(self.said, PolicygradError):
            raise self.said
        return self.said


def test_what_one_process_cannot_draw_is_raised_in_all_of_them() -> None:
    """After all have met: whoever raised alone would leave the others waiting."""
    answer = Generation(torch.tensor([1]), torch.zeros(1), "stop", 0)
    wrong = NumericsError("no number")
    asked = [Request(torch.tensor([1]), (0, 0), pg.SamplingParams(), 1)] * 2
    full = _Two(([answer], None))
    assert asyncio.run(_sample_together(_Draws([answer]), asked, full)) == [answer, answer]  # type: ignore[arg-type]
    for said, other in ((wrong, ([answer], None)), ([answer], ([], wrong))):
        ranks = _Two(other)
        with pytest.raises(NumericsError, match="no number"):
            asyncio.run(_sample_together(_Draws(said), asked, ranks))  # type: ignore[arg-type]
        assert len(ranks.sent) == 1
