"""Several processes that learn and an engine that draws: nobody has the policy as a whole, and the run is that of one process."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.files import rows, weights
from doubles.folder_engine import SilentEngine
from doubles.stops import send
from policygrad.checkpoint.format import newest_step
from policygrad.learners.fsdp.learner import FsdpLearner
from policygrad.samplers.config import ENGINES, SamplerConfig
from policygrad.samplers.engines import probe

pytestmark = pytest.mark.usefixtures("forked_ranks")
LOOSE = 2e-4
"""Sums are taken in another order."""


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of an engine after each of its loads is most of such a run."""
    monkeypatch.setattr(probe, "NUM_PROMPTS", 1)


class Bare(pg.Callback):
    """Sees that the process in command has no numbers of the model."""

    seen = 0

    def step(self, trainer: pg.Trainer, step: int, metrics: object) -> None:
        self.seen += all(p.is_meta for p in trainer.model.parameters())


@pytest.mark.full
@pytest.mark.parametrize("lora", ["", "rank=4"])
def test_a_run_with_an_engine_is_that_of_one_process(
    small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: str
) -> None:
    if lora:
        pytest.importorskip("peft")
    monkeypatch.setitem(ENGINES, "vllm", "doubles.folder_engine:FolderEngine")
    sampler = SamplerConfig(engine="vllm", urls=("http://there",), max_concurrency=64)
    run = replace(
        small,
        algorithm=pg.GRPO,
        steps=2,
        sampler=sampler,
        evaluation=pg.EvaluationConfig(problems=4, samples_per_prompt=2),
        learner=pg.LearnerConfig(micro_tokens=64, lora=lora),
    )
    watch = Bare()
    one = pg.train(replace(run, output=str(tmp_path / "one")), display=False)
    two = pg.train(
        replace(run, learner=replace(run.learner, world_size=2), output=str(tmp_path / "two")),
        display=False,
        callbacks=[watch],
    )
    assert watch.seen == 2
    message = [[row["completion"] for row in rows(r.output / "completions.jsonl")] for r in (one, two)]
    assert message[0] == message[1]
    expected, result = weights(one.output), weights(two.output)
    assert expected.keys() == result.keys()
    assert all(torch.allclose(expected[name], result[name], atol=LOOSE) for name in expected)
    files = [sorted(path.name for path in (r.output / "model").iterdir()) for r in (one, two)]
    assert files[0] == files[1]
    second = pg.train(replace(run, steps=3), resume=two.output, display=False)  # by one process
    assert second.steps == 3


@pytest.mark.full
@pytest.mark.parametrize("moment", ["while the server is silent", "while a tensor is gathered"])
def test_a_signal_during_the_transfer_of_weights_stops_resumably(
    small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It waits for the operation of all processes that it comes into, and not for the server."""
    engine = "Silent" if moment == "while the server is silent" else "Folder"
    monkeypatch.setitem(ENGINES, "vllm", f"doubles.folder_engine:{engine}Engine")
    monkeypatch.setattr(SilentEngine, "loads", 0)
    gather, sent = FsdpLearner.gather_parameter, list[int]()

    @wraps(gather)  # it is sent to the other process by its name
    def gather_and_send(learner: FsdpLearner, *args: Any) -> Any:
        if engine == "Folder" and learner.workers.rank == 0 and learner.version == 2 and not sent:
            send(signal.SIGTERM)
            sent.append(learner.version)
        return gather(learner, *args)

    monkeypatch.setattr(FsdpLearner, "gather_parameter", gather_and_send)
    run = replace(
        small,
        algorithm=pg.GRPO,
        steps=3,
        sampler=SamplerConfig(engine="vllm", urls=("http://there",)),
        evaluation=pg.EvaluationConfig(problems=0),
        learner=pg.LearnerConfig(micro_tokens=64, world_size=2),
        output=str(tmp_path),
    )
    stopped = pg.train(run, display=False)
    assert (stopped.steps, stopped.interrupted) == (2, True)
    assert newest_step(tmp_path / "checkpoints") == 2
    monkeypatch.setitem(ENGINES, "vllm", "doubles.folder_engine:FolderEngine")
    one = replace(run, learner=replace(run.learner, world_size=1))
    assert pg.train(one, resume=tmp_path, display=False).steps == 3
