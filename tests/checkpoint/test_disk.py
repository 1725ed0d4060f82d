"""Files that are whole or not there: a disk that is full or fails names what was not written, and how to go on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from policygrad.checkpoint import model_export
from policygrad.errors import RunError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.utils import filesystem


def test_a_full_disk_while_the_model_is_saved_names_the_way_to_go_on(
    random_model: Path, tmp_path: Path, monkeypatch
) -> None:
    model = load_model(str(random_model))
    tokenizer = load_tokenizer(str(random_model), model)

    def full(folder, *args, **kwargs):
        Path(folder).mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(RunError, match=r"model was not written: the disk is full; .*--resume"):
        model_export.save_model(tmp_path, model, tokenizer.hf)
    assert list(tmp_path.iterdir()) == []


def test_a_small_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(filesystem.os, "fsync", full)
    with pytest.raises(RunError, match=r"run\.toml was not written: No space left"):
        filesystem.write_atomically(tmp_path / "run.toml", "steps = 1")
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_on_the_disk_before_the_old_one_goes(random_model: Path, tmp_path: Path, monkeypatch) -> None:
    model = load_model(str(random_model))
    tokenizer = load_tokenizer(str(random_model), model)
    final = model_export.save_model(tmp_path, model, tokenizer.hf)
    (final / "mark").write_text("old")
    synced: list[str] = []
    real_sync, real_replace = model_export.fsync_path, filesystem.os.replace
    monkeypatch.setattr(model_export, "fsync_path", lambda path: (synced.append(path.name), real_sync(path))[1])

    def fails_when_installed(source, target):
        if Path(target) == final and Path(source).name == ".tmp-model":
            raise OSError(errno.EIO, "Input/output error")
        real_replace(source, target)

    monkeypatch.setattr(filesystem.os, "replace", fails_when_installed)
    with pytest.raises(RunError, match="Input/output error"):
        model_export.save_model(tmp_path, model, tokenizer.hf)
    assert (final / "mark").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    monkeypatch.setattr(filesystem.os, "replace", real_replace)
    os.replace(final, tmp_path / "model.old")  # killed between the two renames
    model_export.save_model(tmp_path, model, tokenizer.hf)
    assert not (final / "mark").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert {p.name for p in final.iterdir()} | {".tmp-model"} <= set(synced)
