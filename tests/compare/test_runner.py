"""Runs as processes: a small program stands in for `policygrad`, so that stopping, killing and failing take no model."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from policygrad.compare.runner import SubprocessRunner, is_finished, read_cost
from policygrad.errors import RunError
from policygrad.utils.filesystem import hold_lock

PROGRAM = """
import json, os, pathlib, signal, sys, time
words = sys.argv[1:]
go_on = "--resume" in words
folder = pathlib.Path(words[words.index("--resume" if go_on else "--output") + 1])
folder.mkdir(parents=True, exist_ok=True)
(folder / "run.toml").write_text("")
print("words:", *words, os.environ["OMP_NUM_THREADS"], flush=True)
if "fails" in words:
    sys.exit("error: the learning rate is too high")
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
(folder / "began").touch()
while "waits" in words and not go_on and not stopped:
    time.sleep(0.01)
if not stopped:
    (folder / "result.json").write_text(json.dumps({"go_on": go_on}))
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return (sys.executable, str(path))


def until_there(path: Path) -> None:
    for _ in range(60_000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} never came")


def test_a_run_has_a_log_and_a_cost(tmp_path: Path, program: tuple[str, str]) -> None:
    folder = tmp_path / "c" / "runs" / "grpo" / "seed-0"
    SubprocessRunner(3, program)(["train", "grpo"], folder)
    assert is_finished(folder)
    assert (folder.parent / "seed-0.log").read_text() == f"words: train grpo --output {folder} --plain 3\n"
    used = read_cost(folder)
    assert used["cpu_seconds"] >= 0  # to a tenth
    assert used["threads"] == 3
    assert used["processes"] == 1
    SubprocessRunner(3, program)(["train", "grpo"], folder)  # finished: not run again
    assert read_cost(folder) == used


def test_a_failure_names_the_command_and_the_end_of_the_log(tmp_path: Path, program: tuple[str, str]) -> None:
    with pytest.raises(
        RunError, match=r"policygrad fails --output \S+ ended with code 1:\n(.|\n)*the learning rate is too high"
    ):
        SubprocessRunner(1, program)(["fails"], tmp_path / "run")
    with pytest.raises(RunError, match="train --resume"):  # what it left is gone on with
        SubprocessRunner(1, (*program, "fails"))(["train"], tmp_path / "run")


def test_a_stopped_run_can_be_resumed(tmp_path: Path, program: tuple[str, str]) -> None:
    folder, processes = tmp_path / "run", SubprocessRunner(1, program)
    thread = threading.Thread(target=processes, args=(["waits"], folder))
    thread.start()
    until_there(folder / "began")
    processes.stop()
    thread.join(600)
    assert not thread.is_alive()
    assert not is_finished(folder)
    processes(["waits"], folder)  # and begins nothing any more
    assert not is_finished(folder)
    SubprocessRunner(1, program)(["waits"], folder)
    assert json.loads((folder / "result.json").read_text()) == {"go_on": True}
    assert read_cost(folder)["processes"] == 2


def test_a_run_that_outlived_its_comparison_is_awaited(tmp_path: Path, program: tuple[str, str]) -> None:
    """As after kill -9 of the comparison: the process holds its run's lock by itself."""
    folder = tmp_path / "run"
    with hold_lock(tmp_path / "run.lock") as lock:
        orphan = subprocess.Popen(
            [*program, "waits", "--output", str(folder)],
            pass_fds=(lock.fileno(),),
            env={"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
    until_there(folder / "began")
    with pytest.raises(RunError, match="another process is at work"), hold_lock(tmp_path / "run.lock"):
        pass
    thread = threading.Thread(target=SubprocessRunner(1, program), args=(["waits"], folder))
    thread.start()
    (folder / "result.json").write_text("{}")  # it comes to its end by itself
    orphan.kill()
    orphan.wait()
    thread.join(600)
    assert not thread.is_alive()
    assert not (tmp_path / "run.log").exists()  # nothing was run a second time


def test_a_folder_without_a_started_run_is_started_anew(tmp_path: Path, program: tuple[str, str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".run.toml.tmp").touch()
    SubprocessRunner(1, program)(["train"], folder)
    assert json.loads((folder / "result.json").read_text()) == {"go_on": False}
    assert not (folder / ".run.toml.tmp").exists()


def test_a_resumed_run_keeps_the_permissions_of_its_command_line(tmp_path: Path, program: tuple[str, str]) -> None:
    """Its own file permits nothing, and neither does another run's."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").touch()
    words = ["train", "mine.py:ALGORITHM", "--reward=a.b.score", "--trust-remote-code", "--sampler.folder", "out"]
    SubprocessRunner(1, program, allow=["other.py"])(words, folder)
    permitted = "--allow-code a.b mine.py other.py out --trust-remote-code"
    assert f"words: train --resume {folder} {permitted} --plain" in (tmp_path / "run.log").read_text()


@pytest.mark.full
def test_a_run_does_not_import_modules_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `policygrad train` there does not."""
    for name in ("json", "shlex", "tomllib", "tyro"):
        (tmp_path / f"{name}.py").write_text(
            "import pathlib; pathlib.Path('ran').touch(); raise SystemExit('planted')\n"
        )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="was stopped early"):  # as help is no run
        SubprocessRunner(1)(["train", "--help"], tmp_path / "run")
    assert not (tmp_path / "ran").exists()
