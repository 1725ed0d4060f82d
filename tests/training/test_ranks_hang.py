"""A process that hangs while the others wait is named with its stack, and the run ends resumably."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles import wrong_ranks
from policygrad.checkpoint.format import newest_step
from policygrad.commands import STOPPED
from policygrad.training.config.serialization import dump_config

SCRIPT = """
import sys
from doubles.wrong_ranks import hang
hang(sys.argv[1], int(sys.argv[2]))
from policygrad.cli import main
sys.exit(main(sys.argv[3:]))
"""
TESTS = Path(wrong_ranks.__file__).parents[1]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]


@pytest.fixture(scope="module")
def run(small: pg.Run) -> pg.Run:
    learner = pg.LearnerConfig(micro_tokens=64, world_size=2, hang_timeout=5)
    return replace(small, algorithm=pg.GRPO, steps=3, learner=learner)


def hung(run: pg.Run, folder: Path, where: str, rank: int, start: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a training in which a process hangs."""
    folder.mkdir()
    (folder / "run.toml").write_text(dump_config(run))
    (folder / "hang.py").write_text(SCRIPT)
    words = [*start, "hang.py", where, str(rank), "train", "--config", "run.toml", "--output", "run", "--plain"]
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *words, "--allow-code", run.reward[0].rpartition(":")[0]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )


def alive(pid: int) -> bool:
    """Return whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check_named(done: subprocess.CompletedProcess[str], folder: Path, message: str, stack: str) -> None:
    """The message names the rank, the stacks are written, the run can be resumed, and no process is left."""
    assert message in done.stderr
    assert "resume from the last checkpoint with --resume run" in done.stderr
    shown = (folder / "run" / "stacks.txt").read_text()
    assert re.findall(r"^rank (\d) ", shown, re.MULTILINE) == ["0", "1"]
    assert stack in shown
    pids = [int(pid) for pid in re.findall(r"\(process (\d+) on ", shown)]
    assert len(pids) == 2
    waiting = threading.Event()  # ranks end after rank 0, at which the command has ended
    assert any(not any(alive(pid) for pid in pids) or waiting.wait(0.1) for _ in range(600))
    assert newest_step(folder / "run" / "checkpoints") == 1


@pytest.mark.full
@pytest.mark.parametrize(("where", "what"), [("update", "updating"), ("draw", "drawing")])
def test_a_process_that_hangs_is_named_and_ends_the_run(run: pg.Run, tmp_path: Path, where: str, what: str) -> None:
    done = hung(run, tmp_path / where, where, 1, [])
    assert done.returncode == STOPPED, done.stderr
    check_named(done, tmp_path / where, "rank 1 hung in for_ever (", f"in {what}\n")
    assert any(line.startswith("error: rank 1 hung in for_ever (") for line in done.stderr.splitlines())
    if where == "update":
        left = replace(run, learner=replace(run.learner, world_size=1, hang_timeout=45.0))
        assert pg.train(left, resume=tmp_path / where / "run", display=False).steps == 3


@pytest.mark.full
@pytest.mark.parametrize("where", ["stop", "hold"])
def test_a_process_that_is_stopped_or_lets_no_python_run_is_named(run: pg.Run, tmp_path: Path, where: str) -> None:
    """The second shows its stack all the same."""
    done = hung(run, tmp_path / where, where, 1, [])
    assert done.returncode == STOPPED, done.stderr
    check_named(done, tmp_path / where, "rank 1 did not answer for 5 seconds", "its last heartbeat was")
    assert ("wrong_ranks.py" in done.stderr and " in updating\n" in done.stderr) == (where == "hold")


@pytest.mark.full
def test_rank_0_that_hangs_ends_with_the_resumable_exit_code(run: pg.Run, tmp_path: Path) -> None:
    done = hung(run, tmp_path / "zero", "update", 0, [])
    assert done.returncode == STOPPED, done.stderr
    check_named(done, tmp_path / "zero", "rank 0 hung in for_ever (", "in updating\n")


@pytest.mark.full
def test_a_hang_under_torchrun(run: pg.Run, tmp_path: Path) -> None:
    done = hung(run, tmp_path / "torchrun", "update", 1, [*TORCHRUN, "localhost:0"])
    assert done.returncode == 1, done.stderr
    check_named(done, tmp_path / "torchrun", "rank 1 hung in for_ever (", "in updating\n")
