"""Fine-tuning and reward models that were killed go on bit for bit."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import same, untimed, weights, write_rows
from doubles.forked import Forked


class KilledAfterStep(pg.Callback):
    """Kills the process once this step is logged."""

    def __init__(self, at: int) -> None:
        self.at = at

    def step(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def resume_and_die(kind: str, folder: str, moment: str, at: int) -> None:
    """Resume, and be killed once step `at` is logged, or once a new checkpoint is in place and the old one not yet deleted."""
    replace_file = os.replace

    def replace_and_die(old: Any, new: Any) -> None:
        replace_file(old, new)
        if ".tmp-step" in str(old):
            os.kill(os.getpid(), signal.SIGKILL)

    if moment == "saved":
        os.replace = replace_and_die  # type: ignore[assignment]
    train = pg.train_sft if kind == "sft" else pg.train_reward_model
    train(resume=folder, display=False, callbacks=[KilledAfterStep(at)] if moment == "logged" else [])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sft", "reward-model"])
def test_resume_is_bitwise_after_sigkill(random_model: Path, tmp_path: Path, kind: str, forked: Forked) -> None:
    asked = [{"prompt": f"{i} =\n"} for i in range(12)]
    every = pg.CheckpointConfig(every=2)
    config: pg.SFTConfig | pg.RewardModelConfig
    if kind == "sft":
        data = write_rows(tmp_path / "rows.jsonl", [row | {"completion": str(i)} for i, row in enumerate(asked)])
        config, train = pg.SFTConfig(data=data, batch_size=2, checkpoint=every), pg.train_sft
    else:
        rows = [row | {"chosen": str(i), "rejected": "no"} for i, row in enumerate(asked)]
        data = write_rows(tmp_path / "rows.jsonl", rows)
        config, train = pg.RewardModelConfig(data=data, batch_size=2, checkpoint=every), pg.train_reward_model
    config = replace(config, model=str(random_model), epochs=1)
    full, killed = (replace(config, output=str(tmp_path / name)) for name in ("whole", "killed"))
    result = train(full, display=False)
    train(killed, stop_after=1, display=False)
    for moment, at in (("logged", 3), ("saved", 1)):
        assert forked.exit_code(resume_and_die, kind, str(killed.output), moment, at) == -signal.SIGKILL
        assert not (tmp_path / "killed" / "model").exists()
    assert train(resume=killed.output, display=False).steps == result.steps
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert untimed(tmp_path / "whole" / "metrics.jsonl") == untimed(tmp_path / "killed" / "metrics.jsonl")
