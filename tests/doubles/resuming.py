"""A run that is killed and taken up again."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import policygrad as pg
from doubles.files import rows, same, untimed, weights
from policygrad.checkpoint import format as checkpoint


def check_resume(run: pg.Run, folder: Path, *, killed_after: int = 1, display: Any = False) -> Path:
    """Train a run, and assert that one killed after a step and resumed ends the same, bit for bit.

    That is its model, the last checkpoint (moments, critic, reference, random state), metrics and completions. Returns the folder
    of the run that was not killed; the other is `folder / "pieces"`.
    """
    each = pg.CheckpointConfig(every=1, keep=run.steps)
    full = pg.train(replace(run, checkpoint=each, output=str(folder / "whole")), display=display).output
    pieces = rewind(full, folder / "pieces", killed_after)
    pg.train(resume=pieces, allow_code=("/",), display=False)
    first = [rows(f / "metrics.jsonl")[0] for f in (full, pieces)]
    assert first[0] == first[1]  # with its times: that step was not trained again
    assert same(weights(full), weights(pieces))
    last = [checkpoint.load_checkpoint(f / "checkpoints" / f"step-{run.steps:06d}").tensors for f in (full, pieces)]
    assert same(*last)
    assert untimed(full / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    assert rows(full / "completions.jsonl") == rows(pieces / "completions.jsonl")
    return full


def rewind(run: Path, to: Path, step: int) -> Path:
    """Copy a finished run as it would be if it had been killed after this step; it has checkpoints of all its steps."""
    shutil.copytree(run, to)
    for saved in (to / "checkpoints").iterdir():
        if int(saved.name.removeprefix("step-")) > step:
            shutil.rmtree(saved)
    shutil.rmtree(to / "model")
    (to / "result.json").unlink()
    return to
