"""`--checkpoint.keep-best`: RUN/best is the best model of the log, whatever was killed and when."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import policygrad as pg
from doubles.files import rows
from policygrad.errors import ConfigError, RunError
from policygrad.training import best_model
from policygrad.training.best_model import BEST, BestModel, BestStep
from policygrad.training.config.supervised import SFTConfig

METRIC = "eval/reward"
EVALUATED = pg.EvaluationConfig(problems=2, samples_per_prompt=2, every=1)


class Killed(BaseException):
    """A process ends here."""


class History:
    """A run without a model: its log, its checkpoints, and a best model that says which attempt wrote it."""

    def __init__(self, folder: Path, steps: int = 6, every: int = 2, keep: int = 2) -> None:
        self.folder, self.steps, self.every, self.keep = folder, steps, every, keep
        self.log: dict[int, float] = {}
        self.weights: dict[int, str] = {}  # of each step in the log
        self.checkpoints: list[int] = []
        self.notes: list[str] = []
        self.attempt = 0

    def write(self, path: Path, best: BestStep) -> None:
        temporary = path.with_name(f".tmp-{path.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / "weights").write_text(self.now)
        best.add_to(temporary)
        os.replace(temporary, path)

    def run(self, draw: Callable[[int], float]) -> None:
        """Start, or resume from the newest checkpoint."""
        self.attempt += 1
        start = self.checkpoints[-1] if self.checkpoints else -1
        self.log = {step: value for step, value in self.log.items() if step <= start}
        self.best = BestModel(self.folder, METRIC, True, self.write, self.notes.append)
        self.best.restore(self.log, lambda name: self.log)
        for step in range(start + 1, self.steps + 1):
            value = draw(step)
            self.now = f"step {step} of attempt {self.attempt}"
            self.best.consider(step, {METRIC: value})
            self.log[step], self.weights[step] = value, self.now
            if step and step % self.every == 0:
                self.checkpoints = [*self.checkpoints, step][-self.keep :]
            self.best.prune(self.checkpoints)

    @property
    def kept(self) -> str:
        return (self.folder / BEST / "weights").read_text()

    @property
    def expected(self) -> str:
        """The weights of the first step with the highest value."""
        return self.weights[max(self.log, key=lambda step: (self.log[step], -step))]


def test_the_best_model_is_that_of_the_log_after_kills_at_any_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed steps get other values than before, as on a GPU; ties are frequent."""
    countdown = math.inf

    def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal countdown
            countdown -= 1
            if countdown < 0:
                raise Killed
            return operation(*args, **options)

        return call

    for module, name in ((os, "replace"), (shutil, "rmtree"), (best_model, "fsync_path")):
        monkeypatch.setattr(module, name, dying(getattr(module, name)))
    monkeypatch.setattr(BestStep, "add_to", dying(BestStep.add_to))
    kills = 0
    for trial in range(60):
        dice = random.Random(trial)
        history = History(tmp_path / str(trial))
        history.folder.mkdir()
        while True:
            countdown = dice.choice([*range(8), math.inf])
            try:
                history.run(lambda step, dice=dice: float(dice.randrange(4)))  # type: ignore[misc]
                break
            except Killed:
                kills += 1
                if dice.random() < 0.2:  # the newest checkpoint is damaged: the one before is used
                    history.checkpoints = history.checkpoints[:-1] or history.checkpoints
        countdown = math.inf
        assert history.kept == history.expected, (trial, history.log)
        assert history.notes == []
        left = len(list((history.folder / best_model.EARLIER).glob("*")))
        assert left <= len(history.checkpoints)
    assert kills > 50


def test_ties_missing_values_and_nan_leave_the_best_model(tmp_path: Path) -> None:
    history = History(tmp_path, steps=4)
    history.run(lambda step: [0.5, 0.7, 0.7, math.nan, 0.1][step])
    assert history.kept == "step 1 of attempt 1"
    assert history.notes == [f"step 3: {METRIC} is nan, so this model is not compared with the best one"]
    history.best.consider(5, {"eval/reward_stderr": 0.1})
    assert history.notes[1] == f"step 5: {METRIC} is missing, so this model is not compared with the best one"
    lower = BestModel(tmp_path, METRIC, False, history.write, history.notes.append)
    lower.consider(6, {METRIC: 0.9})
    assert history.kept == "step 1 of attempt 1"
    lower.consider(6, {METRIC: 0.2})
    assert json.loads((tmp_path / BEST / "best.json").read_text()) == {"step": 6, "metric": METRIC, "value": 0.2}


def test_a_best_model_that_cannot_be_written_is_noted_and_the_one_before_stays(tmp_path: Path) -> None:
    history = History(tmp_path, steps=1)
    history.run(lambda step: 0.5)

    def fail(path: Path, best: BestStep) -> None:
        raise RunError("the disk is full")

    replace(history.best, write=fail).consider(2, {METRIC: 0.9})
    assert history.kept == "step 0 of attempt 1"
    assert history.notes == [
        f"step 2 has the best {METRIC} so far, 0.9, and the disk is full; the best model stays that of step 0"
    ]


def test_a_run_keeps_its_best_model_and_a_resumed_copy_the_same(small: pg.Run, tmp_path: Path) -> None:
    weights: dict[int, dict[str, torch.Tensor]] = {}

    class Remember(pg.Callback):
        def start(self, trainer: Any) -> None:
            weights[trainer.progress.step] = self.copy(trainer)

        def step(self, trainer: Any, step: int, metrics: Any) -> None:
            weights[step] = self.copy(trainer)

        def copy(self, trainer: Any) -> dict[str, torch.Tensor]:
            return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}

    file = tmp_path / "mine.py"
    file.write_text(
        "def mine(prompts, completions, **columns): return [sum(map(ord, c)) % 7 / 7 for c in completions]\n"
    )
    small = replace(small, reward=(f"{file}:mine",))
    checkpoint = replace(small.checkpoint, every=2, keep=1, keep_best=METRIC)
    sizes: dict[str, Any] = {"steps": 3, "prompts_per_step": 2, "sampling": pg.SamplingParams(max_tokens=4)}
    run = replace(small, **sizes, lr=1e-2, evaluation=EVALUATED, checkpoint=checkpoint, output=str(tmp_path / "whole"))
    trained = pg.train(run, display=False, callbacks=[Remember()])
    scores = {row["step"]: row[METRIC] for row in rows(trained.output / "metrics.jsonl") if METRIC in row}
    assert sorted(scores) == [0, 1, 2, 3]
    assert len(set(scores.values())) > 1
    first = max(scores, key=lambda step: (scores[step], -step))
    best = json.loads((trained.output / BEST / "best.json").read_text())
    assert best == {"step": first, "metric": METRIC, "value": scores[first]}
    assert json.loads((trained.output / "result.json").read_text())["best"] == best
    saved = load_file(trained.output / BEST / "model.safetensors")
    assert saved
    assert all(torch.equal(tensor, weights[first][name]) for name, tensor in saved.items())
    assert "the best model so far" in (trained.output / BEST / "README.md").read_text()
    plain = pg.train(replace(run, checkpoint=small.checkpoint, output=str(tmp_path / "plain")), display=False)
    final = "model/model.safetensors"
    assert (plain.output / final).read_bytes() == (trained.output / final).read_bytes()
    allowed = [str(small.reward[0].rpartition(":")[0])]
    stopped = replace(run, output=str(tmp_path / "stopped"))
    pg.train(stopped, display=False, stop_after=2)
    copied = tmp_path / "copied"
    shutil.copytree(tmp_path / "stopped", copied)
    pg.train(resume=copied, display=False, allow_code=allowed)
    for name in ("best.json", "model.safetensors"):
        assert (copied / BEST / name).read_bytes() == (trained.output / BEST / name).read_bytes()


def test_a_metric_that_the_run_never_produces_is_refused_before_it_starts(small: pg.Run, tmp_path: Path) -> None:
    run = replace(small, steps=2, evaluation=EVALUATED, output=str(tmp_path / "run"))

    def keep(metric: str) -> Any:
        return replace(small.checkpoint, keep_best=metric)

    for metric in ("eval/gsm8k/mean", "eval/reward_stderr", "eval/rewards"):
        with pytest.raises(ConfigError, match=rf"keep_best='{metric}' is no metric .* it has eval/reward$"):
            pg.train(replace(run, checkpoint=keep(metric)), display=False)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="names a metric of evaluations, such as eval/reward, not 'reward'"):
        keep("reward")
    with pytest.raises(ConfigError, match=r"this run has none: set evaluation\.every"):
        replace(run, checkpoint=keep(METRIC), evaluation=replace(EVALUATED, every=0))
    with pytest.raises(ConfigError, match="sft evaluates only before and after"):
        SFTConfig(data="rows.jsonl", checkpoint=keep("eval/loss"))
