"""A run's folder is one process's: made before anything is loaded, held while the run lives, free again however it ends."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows, write_rows
from doubles.forked import Forked
from doubles.trackers import Record
from policygrad.errors import ModelError, RunError
from policygrad.training.run_folder import LOCK_FILE, create_run_folder
from policygrad.utils import filesystem
from policygrad.utils.filesystem import hold_lock

pytestmark = pytest.mark.skipif(not filesystem.HAS_FILE_LOCKS, reason="this system has no such locks")


class Waiting(pg.Callback):
    """Reports the run's folder before its first step, and waits to go on."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def start(self, trainer: Any) -> None:
        self.connection.send(str(trainer.folder))
        self.connection.recv()


def train_after_a_message(run: pg.Run, cwd: Path, connection: Connection) -> None:
    os.chdir(cwd)
    pg.train(run, display=False, callbacks=[Waiting(connection)])


@pytest.fixture
def begin(forked: Forked, tmp_path: Path) -> Callable[[pg.Run], tuple[Any, Connection]]:
    """Begins a run in another process, which sends its folder and waits for a message before its first step."""

    def start(run: pg.Run) -> tuple[Any, Connection]:
        ours, theirs = Pipe()
        process = forked.start(train_after_a_message, run, tmp_path, theirs)
        theirs.close()  # so that a process that fails ends `recv`
        return process, ours

    return start


def finish(process: Any, connection: Connection) -> int:
    """Let the run go on to its end, and return the exit code."""
    connection.send("go on")
    process.join()
    return int(process.exitcode)


@pytest.fixture
def run(small: pg.Run) -> pg.Run:
    return replace(small, steps=1, prompts_per_step=2, samples_per_prompt=2)


def test_two_runs_at_once_get_separate_folders(run: pg.Run, begin: Any, tmp_path: Path) -> None:
    (one, to_one), (other, to_other) = begin(run), begin(run)
    folders = {to_one.recv(), to_other.recv()}
    assert folders == {"runs/dr_grpo-1", "runs/dr_grpo-2"}
    assert finish(one, to_one) == finish(other, to_other) == 0
    assert all((tmp_path / folder / "result.json").is_file() for folder in folders)


def test_an_active_run_is_neither_replaced_nor_resumed(run: pg.Run, begin: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    run = replace(run, output=str(folder))
    process, connection = begin(run)
    assert connection.recv() == str(folder)  # it has written its pid into the lock
    lock = json.loads((folder / LOCK_FILE).read_text())
    assert lock["pid"] == process.pid
    for attempt in (
        lambda: pg.train(run, display=False),
        lambda: pg.train(resume=folder, allow_code=("/",), display=False),
    ):
        with pytest.raises(RunError, match=r"another process is at work on .*mine") as caught:
            attempt()
        for part in (f"pid {process.pid}", lock["host"], lock["since"]):
            assert part in str(caught.value)
    assert "wait for its end, or stop it, then --resume" in str(caught.value)
    assert finish(process, connection) == 0
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == [1]


def test_the_lock_of_a_killed_run_does_not_hold(run: pg.Run, begin: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    process, connection = begin(replace(run, output=str(folder)))
    connection.recv()
    lock = (folder / LOCK_FILE).read_text()
    process.kill()
    process.join()
    assert (folder / LOCK_FILE).read_text() == lock
    assert pg.train(resume=folder, allow_code=("/",), display=False).steps == 1
    assert pg.train(resume=folder, allow_code=("/",), display=False).steps == 1


def test_orphaned_reward_workers_do_not_hold_the_lock(tmp_path: Path) -> None:
    """A descriptor that a child inherits would hold the lock for it."""
    with hold_lock(tmp_path / LOCK_FILE) as file:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        assert not os.get_inheritable(file.fileno())
    with hold_lock(tmp_path / LOCK_FILE):
        pass
    child.communicate(b"\n")


def test_a_refused_run_leaves_no_folder(small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for output in (None, "mine", "a/b/c"):
        with pytest.raises(ModelError):
            pg.train(replace(small, model="nowhere/at/all", output=output), display=False)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError):
        pg.train(replace(small, model="nowhere/at/all", output="empty"), display=False)
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_run_killed_before_its_configuration_leaves_the_folder_usable(small: pg.Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).write_text("{")
    (tmp_path / "run" / ".tmp-run.toml").write_text("out")
    run = replace(small, steps=1, prompts_per_step=2, samples_per_prompt=2, output=str(tmp_path / "run"))
    assert pg.train(run, display=False).steps == 1
    (tmp_path / "run" / LOCK_FILE).write_text("who it was")
    with pytest.raises(RunError, match="is not empty: resume the run in it by --resume"):
        pg.train(run, display=False)
    assert (tmp_path / "run" / LOCK_FILE).read_text() == "who it was"


def test_a_refused_resume_deletes_nothing(small: pg.Run, tmp_path: Path) -> None:
    run = replace(small, steps=2, prompts_per_step=2, samples_per_prompt=2, output=str(tmp_path / "run"))
    pg.train(run, display=False, stop_after=1)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(ModelError):
        pg.train(replace(run, model="nowhere/at/all"), resume=tmp_path / "run", display=False)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    assert pg.train(resume=tmp_path / "run", display=False).steps == 2


def test_fine_tuning_and_reward_models_lock_their_folders(random_model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i} =\n", "completion": str(i)} for i in range(6)])
    pairs = [{"prompt": f"{i} =\n", "chosen": str(i), "rejected": "no"} for i in range(6)]
    chosen = write_rows(tmp_path / "pairs.jsonl", pairs)
    for train, configuration in (
        (pg.train_sft, pg.SFTConfig(data=data, model=str(random_model), output=str(tmp_path / "sft"))),
        (
            pg.train_reward_model,
            pg.RewardModelConfig(data=chosen, model=str(random_model), output=str(tmp_path / "rm")),
        ),
    ):
        folder = Path(str(configuration.output))
        train(configuration, display=False, stop_after=1)
        with (
            hold_lock(folder / LOCK_FILE),
            pytest.raises(RunError, match=rf"at work on .*{folder.name} \(pid {os.getpid()} on"),
        ):
            train(resume=folder, display=False)
        train(resume=folder, display=False, stop_after=1)


def test_a_file_system_without_locks_is_noted(small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filesystem.fcntl, "flock", none)
    display = Record()
    run = replace(small, steps=1, prompts_per_step=2, samples_per_prompt=2, output=str(tmp_path / "run"))
    assert pg.train(run, display=display).steps == 1
    assert "lock cannot be locked (No locks available): a second process in" in display.said


def test_a_lock_in_a_deleted_folder_is_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that never began deletes its lock with its folder; who waited for that file makes a new one."""
    path, real, calls = tmp_path / LOCK_FILE, filesystem.fcntl.flock, []

    def deleted_meanwhile(file: object, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            path.unlink()
        real(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(filesystem.fcntl, "flock", deleted_meanwhile)
    with hold_lock(path):
        assert len(calls) == 2
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_without_locks_folder_creation_is_exclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(filesystem, "HAS_FILE_LOCKS", False)
    with (
        create_run_folder(None, "grpo", "run.toml", print) as one,
        create_run_folder(None, "grpo", "run.toml", print) as other,
    ):
        assert (str(one.path), str(other.path)) == ("runs/grpo-1", "runs/grpo-2")
