"""Checkpoints that somebody has made or changed and sealed anew: the one before is taken, with the reason, or a refusal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import policygrad as pg
from doubles.checkpoints import content
from doubles.files import same, weights, write_rows
from doubles.trackers import Record
from policygrad.checkpoint.format import FILES, STATE, TENSORS_FILE, load_latest, save_checkpoint
from policygrad.checkpoint.manifest import MANIFEST, dump_json, seal
from policygrad.errors import CheckpointError

DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def deep(path: Path) -> None:
    path.write_bytes(DEEP)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", [MANIFEST, *FILES])
@pytest.mark.parametrize("harm", [deep, pipe, endless, folder])
def test_what_is_no_file_or_too_deep_is_passed_over(tmp_path: Path, name: str, harm: Callable[[Path], None]) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, content(step), {"step": step})
    harm(tmp_path / "step-000002" / name)
    if harm is deep and name != MANIFEST:
        seal(tmp_path / "step-000002", FILES)
    received: list[str] = []
    result = load_latest(tmp_path, warn=received.append)
    assert result is not None
    assert result.step == 1
    (message,) = received
    assert "step-000002" in message
    assert "using the one before it, step-000001" in message
    save_checkpoint(tmp_path, 3, content(3), {"step": 3}, keep=1)  # the damaged one is in nobody's way
    assert load_latest(tmp_path, warn=pytest.fail).step == 3  # type: ignore[union-attr]


def test_the_only_one_is_a_refusal(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, content(1), {"step": 1})
    pipe(tmp_path / "step-000001" / STATE)
    with pytest.raises(CheckpointError, match="it is no regular file"):
        load_latest(tmp_path, warn=pytest.fail)


# --- sealed anew, in a run


def without(folder: Path, lost: Callable[[str], bool], *, report: bool) -> None:
    """Takes tensors away and seals what is left; told: the list of tensors says so too."""
    kept = {n: t for n, t in load_file(folder / TENSORS_FILE).items() if not lost(n)}
    save_file(kept, folder / TENSORS_FILE)
    record = json.loads((folder / STATE).read_bytes())
    if report:
        record["tensors"] = sorted(kept)
    (folder / STATE).write_bytes(dump_json(record))
    seal(folder, FILES)


def changed(folder: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    record = json.loads((folder / STATE).read_bytes())
    change(record["state"])
    (folder / STATE).write_bytes(dump_json(record))
    seal(folder, FILES)


CRAFTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no Adam": (lambda p: without(p, lambda n: n.startswith("adam/"), report=False), "'adam/"),
    "no Adam, and none listed": (
        lambda p: without(p, lambda n: n.startswith("adam/"), report=True),
        "moments of the optimiser",
    ),
    "one moment less": (
        lambda p: without(p, lambda n: n == "adam/model.norm.weight/exp_avg", report=True),
        "moments of the optimiser",
    ),
    "no random state": (lambda p: without(p, lambda n: n == "rng/torch", report=True), "lacks the random state"),
    "no learner": (lambda p: changed(p, lambda s: s.pop("learner")), "it has no 'learner'"),
    "no optimiser": (lambda p: changed(p, lambda s: s["learner"].pop("optimizer")), "'optimizer'"),
    "a list": (lambda p: changed(p, lambda s: s.update(learner=[])), "lacks a part of the state"),
    "no count": (lambda p: changed(p, lambda s: s.update(tokens="many")), "its counts are not numbers"),
}


@pytest.fixture(scope="module")
def runs(small: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[pg.Run, Path]:
    """A run of three steps that was stopped after two, and the folder of the same run without a stop."""
    folder = tmp_path_factory.mktemp("crafted")
    (folder / "mine.py").write_text(
        "def mine(prompts, completions, **columns):\n    return [sum(map(ord, c)) % 7 / 7 for c in completions]\n"
    )
    run = replace(small, steps=3, reward=(f"{folder / 'mine.py'}:mine",), output=str(folder / "run"))
    pg.train(run, stop_after=2, display=False)
    return run, pg.train(replace(run, output=str(folder / "whole")), display=False).output


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=[pytest.mark.full] * (how in ("one moment less", "no optimiser"))) for how in CRAFTED],
)
def test_a_state_that_was_sealed_without_a_part_of_it(runs: tuple[pg.Run, Path], tmp_path: Path, how: str) -> None:
    run, whole = runs
    shutil.copytree(str(run.output), tmp_path / "run")
    craft, reason = CRAFTED[how]
    craft(tmp_path / "run" / "checkpoints" / "step-000002")
    record = Record()
    pg.train(replace(run, output=str(tmp_path / "run")), resume=tmp_path / "run", display=record)
    assert reason in record.said
    assert "using the one before it, step-000001" in record.said
    assert same(weights(whole), weights(tmp_path / "run"))


@pytest.mark.parametrize(
    ("lost", "reason"), [("adam/", "moments of the optimiser"), ("rng/torch", "lacks the random state")]
)
def test_of_fine_tuning_too(random_model: Path, tmp_path: Path, lost: str, reason: str) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i} =\n", "completion": str(i)} for i in range(6)])
    config = pg.SFTConfig(
        data=data, model=str(random_model), batch_size=2, checkpoint=pg.CheckpointConfig(every=1, keep=2)
    )
    full = pg.train_sft(replace(config, output=str(tmp_path / "whole")), display=False).output
    pg.train_sft(replace(config, output=str(tmp_path / "sft")), stop_after=2, display=False)
    without(tmp_path / "sft" / "checkpoints" / "step-000002", lambda n: n.startswith(lost), report=True)
    record = Record()
    pg.train_sft(resume=tmp_path / "sft", display=record)
    assert reason in record.said
    assert "using the one before it, step-000001" in record.said
    assert same(weights(full), weights(tmp_path / "sft"))


def test_a_tensor_of_another_shape_is_refused(random_model: Path, tmp_path: Path) -> None:
    """`copy_` would broadcast it."""
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i} =\n", "completion": str(i)} for i in range(6)])
    config = pg.SFTConfig(data=data, model=str(random_model), output=str(tmp_path / "sft"), epochs=2)
    pg.train_sft(config, stop_after=1, display=False)
    newest = tmp_path / "sft" / "checkpoints" / "step-000001"
    tensors = load_file(newest / TENSORS_FILE)
    tensors["weights/model.norm.weight"] = torch.ones(1)
    save_file(tensors, newest / TENSORS_FILE)
    seal(newest, FILES)
    with pytest.raises(pg.RunError, match=r"weights/model\.norm\.weight is \[1\] and the model's is \[32\]"):
        pg.train_sft(resume=tmp_path / "sft", display=False)
