"""The guard of fine-tuning and reward models: a spike is said, skipped, rolled back or stopped at; what is no number is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.files import rows, same, untimed, weights, write_rows
from doubles.trackers import Record
from policygrad.checkpoint.format import load_checkpoint
from policygrad.errors import NumericsError, RunError
from policygrad.training.config.guard import SupervisedGuardConfig

Train = Callable[..., Any]
GUARD = SupervisedGuardConfig(window=2, loss=0)


BOTH = pytest.mark.parametrize("kind", ["sft", "reward-model"], indirect=True)


@pytest.fixture(params=["sft", pytest.param("reward-model", marks=pytest.mark.full)])
def kind(request: pytest.FixtureRequest, random_model: Path, tmp_path: Path) -> tuple[Any, Train]:
    """(a configuration of six steps, what trains it)."""
    how: dict[str, Any] = {"model": str(random_model), "batch_size": 4, "lr": 1e-3, "guard": GUARD}
    how |= {"output": str(tmp_path / "run"), "checkpoint": pg.CheckpointConfig(every=2, keep=9)}
    asked = [{"prompt": f"{i} + {i} =\n"} for i in range(32)]
    held = [{"prompt": f"{i} + 40 =\n"} for i in range(4)]
    answers = {"sft": ("completion",), "reward-model": ("chosen", "rejected")}[request.param]
    files = {}
    for name, prompts in (("data", asked[:24]), ("eval_data", held)):
        made = [row | {key: f"{key} {i}" for key in answers} for i, row in enumerate(prompts)]
        files[name] = write_rows(tmp_path / f"{name}.jsonl", made)
    if request.param == "sft":
        return pg.SFTConfig(**how, **files), pg.train_sft
    return pg.RewardModelConfig(**how, **files), pg.train_reward_model


class Spoiling(pg.Callback):
    """Multiplies the gradient of step `at`, as often as that step comes."""

    def __init__(self, at: int, by: float) -> None:
        self.at, self.by = at, by
        self.rates: list[float] = []

    def start(self, trainer: Any) -> None:
        self._spoil(trainer, trainer.progress.step + 1)

    def step(self, trainer: Any, step: int, metrics: Any) -> None:
        self.rates.append(trainer.learner.lr)
        self._spoil(trainer, step + 1)

    def _spoil(self, trainer: Any, step: int) -> None:
        optimizer = trainer.learner.optimizer
        if step != self.at:
            return

        def spoilt() -> tuple[float | None, float]:
            del optimizer.step  # the class's own is back
            for master in optimizer.masters.values():
                if master.grad is not None:
                    master.grad.mul_(self.by)
            return optimizer.step()  # type: ignore[no-any-return]

        optimizer.step = spoilt


def learned(folder: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = load_checkpoint(folder / "checkpoints" / f"step-{step:06d}").tensors
    return {n: t for n, t in tensors.items() if n.startswith(("weights/", "adam/"))}


def test_a_spike_is_noted_and_training_continues(kind: tuple[Any, Train], tmp_path: Path) -> None:
    config, train = kind
    record = Record()
    assert train(config, display=record, callbacks=[Spoiling(4, 1e6)]).steps == 6
    assert "step 4: grad_norm is " in record.said
    report = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "grad_norm" in row]
    assert [row["guard/alarms"] for row in report] == [0, 0, 0, 1, 0, 0]
    assert report[3]["guard/grad_norm"] == 1
    away = replace(config, guard=replace(GUARD, grad_norm=0), output=str(tmp_path / "away"))
    record = Record()
    train(away, display=record, callbacks=[Spoiling(4, 1e6)])
    assert "grad_norm is" not in record.said
    assert same(weights(tmp_path / "run"), weights(tmp_path / "away"))


@pytest.mark.full
@BOTH
def test_a_skipped_step_is_undone_and_resume_is_bitwise(kind: tuple[Any, Train], tmp_path: Path) -> None:
    config, train = kind
    config = replace(config, guard=replace(GUARD, action="skip"), checkpoint=pg.CheckpointConfig(every=1, keep=9))
    full, pieces = tmp_path / "run", tmp_path / "pieces"
    train(config, display=False, callbacks=[Spoiling(4, 1e6)])
    assert same(learned(full, 3), learned(full, 4))
    assert not same(learned(full, 4), learned(full, 5))
    report = [row for row in rows(full / "metrics.jsonl") if "grad_norm" in row]
    assert [row.get("guard/undone", 0) for row in report] == [0, 0, 0, 1, 0, 0]
    train(replace(config, output=str(pieces)), stop_after=3, display=False)
    train(resume=pieces, stop_after=1, display=False, callbacks=[Spoiling(4, 1e6)])
    train(resume=pieces, display=False)
    assert same(weights(full), weights(pieces))
    assert untimed(full / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")


def test_a_rollback_restores_the_checkpoint_at_a_lower_rate_and_resume_is_bitwise(
    kind: tuple[Any, Train], tmp_path: Path
) -> None:
    config, train = kind
    config = replace(config, guard=replace(GUARD, action="rollback", lr_factor=0.25))
    full, pieces = tmp_path / "run", tmp_path / "pieces"
    record, spoiling = Record(), Spoiling(4, 1e6)
    train(config, display=record, callbacks=[spoiling])
    assert "step 4: restored the weights of step 2, at a lower learning rate" in record.said
    assert same(learned(full, 2), learned(full, 4))
    assert spoiling.rates == pytest.approx([1e-3] * 4 + [0.25e-3] * 2)
    train(replace(config, output=str(pieces)), stop_after=4, display=False, callbacks=[Spoiling(4, 1e6)])
    train(resume=pieces, display=False)
    assert same(weights(full), weights(pieces))
    assert untimed(full / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")


def test_a_stop_undoes_the_update_and_is_resumable(kind: tuple[Any, Train], tmp_path: Path) -> None:
    config, train = kind
    config = replace(config, guard=replace(GUARD, action="stop"), checkpoint=pg.CheckpointConfig(every=1, keep=9))
    with pytest.raises(RunError, match=r"step 4: grad_norm is .* saved without its updates: .*resume"):
        train(config, display=False, callbacks=[Spoiling(4, 1e6)])
    assert same(learned(tmp_path / "run", 3), learned(tmp_path / "run", 4))
    assert train(resume=tmp_path / "run", display=False).steps == 6


@pytest.mark.parametrize("action", ["warn", pytest.param("skip", marks=pytest.mark.full)])
def test_a_nonfinite_gradient_ends_the_run_with_weights_unchanged(
    kind: tuple[Any, Train], tmp_path: Path, action: str
) -> None:
    config, train = kind
    config = replace(config, guard=replace(GUARD, action=action))
    with pytest.raises(NumericsError, match=r"norm is nan at update 4, first in model\.embed_tokens\.weight") as caught:
        train(config, display=False, callbacks=[Spoiling(4, math.nan)])
    assert any("step 3 is saved" in note and "--resume" in note for note in caught.value.__notes__)
    assert train(resume=tmp_path / "run", display=False).steps == 6
