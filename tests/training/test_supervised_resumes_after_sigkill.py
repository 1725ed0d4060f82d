"""Fine-tuning and reward models that were killed go on bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import policygrad as pg
from doubles.files import same, untimed, weights, write_rows

CHILD = """
import os, sys
import policygrad as pg
from policygrad.checkpoint import format as checkpoint

kind, folder, moment, at = *sys.argv[1:4], int(sys.argv[4])

class Killed(pg.Callback):
    def step(self, trainer, step, metrics):
        if moment == "logged" and step == at:
            os.kill(os.getpid(), 9)

calls = 0
def replaced(old, new, *, inner=os.replace):
    global calls
    inner(old, new)
    calls += ".tmp-step" in str(old)
    if moment == "saved" and calls == at:  # the new one is in its place, the old one not yet deleted
        os.kill(os.getpid(), 9)
os.replace = replaced

train = pg.train_sft if kind == "sft" else pg.train_reward_model
train(resume=folder, display=False, callbacks=[Killed()])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "reward-model"])
def test_resume_is_bitwise_after_sigkill(random_model: Path, tmp_path: Path, kind: str) -> None:
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
    one = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums are split among threads
    full, killed = (replace(config, output=str(tmp_path / name)) for name in ("whole", "killed"))
    result = train(full, display=False)
    train(killed, stop_after=1, display=False)
    for moment, at in (("logged", 3), ("saved", 1)):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, kind, str(killed.output), moment, str(at)],
            env=os.environ | one,
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.returncode == -signal.SIGKILL, child.stderr
        assert not (tmp_path / "killed" / "model").exists()
    assert train(resume=killed.output, display=False).steps == result.steps
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert untimed(tmp_path / "whole" / "metrics.jsonl") == untimed(tmp_path / "killed" / "metrics.jsonl")
