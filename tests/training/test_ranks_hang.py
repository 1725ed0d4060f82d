"""A process that hangs while the others wait is named with its stack, and the run ends resumably."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles import wrong_ranks
from doubles.forked import Forked
from policygrad import cli
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


def hang_under_torchrun(run: pg.Run, folder: Path) -> tuple[int, str]:
    """A training in which rank 1 hangs in an update: its exit code and what its processes say."""
    words = ["localhost:0", "hang.py", "update", "1", *write_run(run, folder)]
    (folder / "hang.py").write_text(SCRIPT)
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, *TORCHRUN, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def hang_in_forks(forked: Forked, run: pg.Run, folder: Path, where: str, rank: int) -> tuple[int, str]:
    """A training in which a rank hangs: its exit code and what its processes say. All are forks of this one."""
    words = write_run(run, folder)
    with (folder / "said.txt").open("wb") as file:
        code = forked.exit_code(train_and_hang, folder, where, rank, words, stdout=file.fileno())
    return code, (folder / "said.txt").read_text()


def train_and_hang(folder: Path, where: str, rank: int, words: Sequence[str]) -> int:
    os.chdir(folder)
    wrong_ranks.hang(where, rank)
    return cli.main(words)


def write_run(run: pg.Run, folder: Path) -> list[str]:
    """Write the run's file into the folder, and return the command's words there."""
    folder.mkdir()
    (folder / "run.toml").write_text(dump_config(run))
    code = run.reward[0].rpartition(":")[0]
    return ["train", "--config", "run.toml", "--output", "run", "--plain", "--allow-code", code]


def alive(pid: int) -> bool:
    """Return whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check_named(said: str, folder: Path, message: str, stack: str) -> None:
    """The message names the rank, the stacks are written, the run can be resumed, and no process is left."""
    assert message in said
    assert "resume from the last checkpoint with --resume run" in said
    shown = (folder / "run" / "stacks.txt").read_text()
    assert re.findall(r"^rank (\d) ", shown, re.MULTILINE) == ["0", "1"]
    assert stack in shown
    pids = [int(pid) for pid in re.findall(r"\(process (\d+) on ", shown)]
    assert len(pids) == 2
    waiting = threading.Event()  # ranks end after rank 0, at which the command has ended
    assert any(not any(alive(pid) for pid in pids) or waiting.wait(0.1) for _ in range(600))
    assert newest_step(folder / "run" / "checkpoints") == 1


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("where", "what"), [("update", "updating"), pytest.param("draw", "drawing", marks=pytest.mark.full)]
)
def test_a_process_that_hangs_is_named_and_ends_the_run(
    run: pg.Run, tmp_path: Path, forked: Forked, where: str, what: str
) -> None:
    code, said = hang_in_forks(forked, run, tmp_path / where, where, 1)
    assert code == STOPPED, said
    check_named(said, tmp_path / where, "rank 1 hung in for_ever (", f"in {what}\n")
    assert any(line.startswith("error: rank 1 hung in for_ever (") for line in said.splitlines())
    if where == "update":
        left = replace(run, learner=replace(run.learner, world_size=1, hang_timeout=45.0))
        assert pg.train(left, resume=tmp_path / where / "run", display=False).steps == 3


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("where", ["stop", "hold"])
def test_a_process_that_is_stopped_or_lets_no_python_run_is_named(
    run: pg.Run, tmp_path: Path, forked: Forked, where: str
) -> None:
    """The second shows its stack all the same."""
    code, said = hang_in_forks(forked, run, tmp_path / where, where, 1)
    assert code == STOPPED, said
    check_named(said, tmp_path / where, "rank 1 did not answer for 5 seconds", "its last heartbeat was")
    assert ("wrong_ranks.py" in said and " in updating\n" in said) == (where == "hold")


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
def test_rank_0_that_hangs_ends_with_the_resumable_exit_code(run: pg.Run, tmp_path: Path, forked: Forked) -> None:
    code, said = hang_in_forks(forked, run, tmp_path / "zero", "update", 0)
    assert code == STOPPED, said
    check_named(said, tmp_path / "zero", "rank 0 hung in for_ever (", "in updating\n")


@pytest.mark.full
def test_a_hang_under_torchrun(run: pg.Run, tmp_path: Path) -> None:
    code, said = hang_under_torchrun(run, tmp_path / "torchrun")
    assert code == 1, said
    check_named(said, tmp_path / "torchrun", "rank 1 hung in for_ever (", "in updating\n")
