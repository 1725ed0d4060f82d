"""A disk that is full when a step is logged: the error says so, and what is rescued is the state before the step, to the bit."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.cases import keep_fast
from doubles.files import rows, same, untimed, weights
from doubles.trackers import Record
from policygrad.checkpoint import format as checkpoint
from policygrad.errors import RunError
from policygrad.trackers.jsonl import COMPLETIONS, METRICS

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


class Full(pg.Callback):
    """From the end of a step on, nothing more fits into one of the logs."""

    def __init__(self, at: int, name: str) -> None:
        self.at, self.name = at, name

    def step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            trainer.files._files[self.name].close()
            trainer.files._files[self.name] = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 (the tracker closes it)


@pytest.fixture(scope="module")
def base(small: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> pg.Run:
    folder = tmp_path_factory.mktemp("full")
    (folder / "mine.py").write_text(
        "def mine(prompts, completions, **columns):\n    return [sum(map(ord, c)) % 7 / 7 for c in completions]\n"
    )
    algorithm = replace(pg.DR_GRPO, update_rule=pg.GradientSteps(epochs=2, minibatches=2))
    sizes: dict[str, Any] = {
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "sampling": pg.SamplingParams(max_tokens=4),
    }
    reward = (f"{folder / 'mine.py'}:mine",)
    return replace(small, steps=4, algorithm=algorithm, reward=reward, **sizes, output=str(folder / "whole"))


@pytest.fixture(scope="module")
def whole(base: pg.Run) -> Path:
    """The folder of the run to which nothing has happened, with all its checkpoints."""
    return pg.train(replace(base, checkpoint=pg.CheckpointConfig(every=1, keep=9)), display=False).output


@pytest.fixture
def run(base: pg.Run, tmp_path: Path) -> pg.Run:
    return replace(base, checkpoint=pg.CheckpointConfig(every=100), output=str(tmp_path / "run"))


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.load_checkpoint(folder / "checkpoints" / f"step-{step:06d}").tensors


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """What is written beyond fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("size", "name"), [(0, "lock"), (1000, "run.toml")])
def test_a_full_disk_at_the_start_leaves_no_folder(run: pg.Run, tmp_path: Path, size: int, name: str) -> None:
    with pytest.raises(RunError, match=rf"{name} .*File too large"), no_file_longer_than(size):
        pg.train(run, display=False)
    assert not (tmp_path / "run").exists()
    pg.train(replace(run, steps=1, evaluation=pg.EvaluationConfig(problems=0)), display=False)


@pytest.mark.parametrize("name", keep_fast((METRICS, COMPLETIONS)))
def test_a_failed_step_saves_the_state_before_it(run: pg.Run, whole: Path, tmp_path: Path, name: str) -> None:
    record, folder = Record(), tmp_path / "run"
    with pytest.raises(RunError, match=rf"{name} cannot be written: No space left on device") as caught:
        pg.train(run, display=record, callbacks=[Full(2, name)])
    (message,) = caught.value.__notes__
    assert message.startswith(f"step 3 failed; step 2 is saved: policygrad train --resume {folder} --allow-code ")
    assert message.endswith(" resumes from step 2")
    assert message in record.said
    assert same(state(folder, 2), state(whole, 2))  # the weights, AdamW's moments, the random state
    saved, never_failed = (checkpoint.load_checkpoint(f / "checkpoints" / "step-000002").state for f in (folder, whole))
    for state_of in (saved, never_failed):
        del state_of["seconds"], state_of["fingerprint"]  # which has the options of checkpoints
    assert saved == never_failed
    pg.train(resume=folder, display=False)
    assert same(weights(whole), weights(folder))
    assert untimed(whole / METRICS) == untimed(folder / METRICS)
    assert rows(whole / COMPLETIONS) == rows(folder / COMPLETIONS)


def test_without_a_snapshot_the_last_checkpoint_is_resumed(
    run: pg.Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of many gigabytes: no update is counted twice there either."""
    from policygrad.training.trainer import Trainer

    monkeypatch.setattr(Trainer, "max_snapshot_bytes", 0)
    with pytest.raises(RunError, match="No space left") as caught:
        pg.train(replace(run, checkpoint=pg.CheckpointConfig(every=2)), callbacks=[Full(3, METRICS)], display=False)
    assert "step 3 could not be saved (the weights have changed since" in caught.value.__notes__[0]
    assert "resumes from step 2" in caught.value.__notes__[0]
    pg.train(resume=tmp_path / "run", display=False)
    assert same(weights(whole), weights(tmp_path / "run"))
