"""`--resume RUN --output DIR`: the run goes on in a copy, bit for bit, and stays as it is."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows, same, untimed, weights, write_rows
from policygrad.training.run_folder import LOCK_FILE, copy_run
from policygrad.utils.filesystem import acquire_lock

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stopped(small: pg.Run, tmp_path: Path) -> Path:
    """A run of four steps that was stopped after its second."""
    folder = tmp_path / "stopped"
    pg.train(replace(small, steps=4, output=str(folder)), stop_after=2, display=False)
    return folder


def typed(run_command: Command, *argv: object) -> tuple[int, str, str]:
    return run_command(*map(str, argv))


def content(folder: Path) -> dict[str, str]:
    """Every file but the lock, by its hash."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_resume_in_a_copy_is_bitwise_and_leaves_the_run_unchanged(
    small: pg.Run, stopped: Path, tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted, copy, before = tmp_path / "whole", tmp_path / "deep" / "er" / "copy", content(stopped)
    pg.train(replace(small, steps=4, output=str(uninterrupted)), display=False)
    (stopped / "result.json").write_text("{}")  # as an end has left it
    folder = str(Path(str(small.task)).parent)
    code, _, err = typed(run_command, "train", "--resume", stopped, "--output", copy, "--allow-code", folder, "--plain")
    assert code == 0, err
    assert content(stopped) == before | {"result.json": hashlib.sha256(b"{}").hexdigest()}
    assert same(weights(copy), weights(uninterrupted))
    assert untimed(copy / "metrics.jsonl") == untimed(uninterrupted / "metrics.jsonl")
    assert rows(copy / "completions.jsonl") == rows(uninterrupted / "completions.jsonl")
    monkeypatch.chdir(tmp_path)
    code, _, err = typed(run_command, "train", "--resume", copy, "--steps", "5", "--allow-code", folder, "--plain")
    assert code == 0, err
    assert rows(copy / "metrics.jsonl")[-1]["step"] == 5
    assert content(stopped).keys() == before.keys() | {"result.json"}


@pytest.mark.full
def test_fine_tuning_resumes_in_a_copy(random_model: Path, tmp_path: Path, run_command: Command) -> None:
    data = write_rows(tmp_path / "sums.jsonl", [{"prompt": f"{i} + 1 =", "completion": str(i + 1)} for i in range(40)])
    argv = ("sft", "--data", data, "--model", random_model, "--batch-size", "8", "--plain")
    assert typed(run_command, *argv, "--output", tmp_path / "whole")[0] == 0
    assert typed(run_command, *argv, "--output", tmp_path / "begun", "--stop-after", "2")[0] == 0
    code, _, err = typed(run_command, "sft", "--resume", tmp_path / "begun", "--output", tmp_path / "copy", "--plain")
    assert code == 0, err
    assert same(weights(tmp_path / "copy"), weights(tmp_path / "whole"))
    assert not (tmp_path / "begun" / "model").exists()


def test_a_refused_copy_leaves_nothing(stopped: Path, tmp_path: Path, small: pg.Run) -> None:
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "mine.txt").touch()
    file.touch()
    for to, says in (
        (full, "is not empty: --resume .* choose another"),
        (file, "is not empty"),
        (stopped / "in", "is within"),
    ):
        with pytest.raises(pg.RunError, match=says):
            copy_run(stopped, to, "train", small, print)
    with pytest.raises(pg.RunError, match="holds no run of `policygrad sft`"):
        copy_run(stopped, tmp_path / "copy", "sft", small, print)
    with acquire_lock(stopped / LOCK_FILE), pytest.raises(pg.RunError, match="another process is at work on"):
        copy_run(stopped, tmp_path / "copy", "train", small, print)
    assert not (tmp_path / "copy").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == []


def test_a_copy_has_its_own_relative_directory(stopped: Path, tmp_path: Path, small: pg.Run) -> None:
    copy_run(stopped, tmp_path / "far" / "away", "train", replace(small, directory=str(tmp_path)), print)
    assert tomllib.loads((tmp_path / "far" / "away" / "run.toml").read_text())["directory"] == "../.."
