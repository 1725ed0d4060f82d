"""A save that is cut short leaves the checkpoint before it: a full disk, and `kill -9` at every stage."""

import errno
import os
import random
import resource
import signal
from pathlib import Path

import pytest
import torch

from doubles.checkpoints import Stages, content, in_child, names, silent
from policygrad.checkpoint import format as checkpoint
from policygrad.checkpoint.format import list_checkpoints, load_checkpoint, load_latest, save_checkpoint
from policygrad.errors import CheckpointError

# --- a full disk ---


@pytest.mark.parametrize("where", ["save_file", "seal", "replace", "mkdir"])
@pytest.mark.parametrize("step", [1, 2], ids=["same step", "next step"])
def test_full_disk(tmp_path, monkeypatch, where, step):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save_checkpoint(tmp_path, 1, content(1), {"save": 1})
    module = {"replace": os, "mkdir": Path}.get(where, checkpoint)
    monkeypatch.setattr(module, where, full)
    with pytest.raises(CheckpointError, match=r"disk is full.*step-000001, is intact: free some"):
        save_checkpoint(tmp_path, step, content(step), {"save": 2})
    monkeypatch.undo()
    assert names(tmp_path) == ["step-000001"]
    result = load_latest(tmp_path, warn=silent)
    assert result is not None
    assert result.state == {"save": 1}
    save_checkpoint(tmp_path, step, content(step), {"save": 2})
    assert load_checkpoint(tmp_path / f"step-00000{step}").state == {"save": 2}


def test_the_second_rename_fails(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, content(1), {"save": 1})
    replace = os.replace

    def picky(source: Path, target: Path) -> None:
        if ".tmp-step" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", picky)
    with pytest.raises(CheckpointError, match=r"Input/output error.*fix the cause"):
        save_checkpoint(tmp_path, 1, content(1), {"save": 2})
    assert names(tmp_path) == ["step-000001"]
    assert load_checkpoint(tmp_path / "step-000001").state == {"save": 1}


def test_a_write_that_the_system_refuses(tmp_path):
    """No mock: the file size limit makes the write itself fail, inside safetensors."""
    save_checkpoint(tmp_path, 1, content(1), {})

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(CheckpointError, match=r"previous checkpoint, step-000001, is intact"):
            save_checkpoint(tmp_path, 2, {"w": torch.ones(100_000)}, {})

    assert in_child(work) == 0
    assert names(tmp_path) == ["step-000001"]


def test_a_failed_checkpoint_names_the_option_that_goes_on(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "run" / "checkpoints"
    checkpoint.save_checkpoint(folder, 1, {"w": torch.zeros(2)}, {})
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"free some space, then resume from it with --resume .*run$"):
        checkpoint.save_checkpoint(folder, 2, {"w": torch.zeros(2)}, {})


# --- kill -9 ---


def check_intact(directory: Path, least: int, most: int) -> None:
    result = load_latest(directory, warn=silent)
    assert result is not None
    assert least <= result.state["save"] <= most
    assert torch.equal(result.tensors["w"], torch.full((64,), float(result.state["save"])))


@pytest.mark.parametrize("step", [2, 1], ids=["next step", "same step"])
def test_kill_at_every_stage_of_a_save(tmp_path, step):
    """The second save is killed before each call that changes the disk, which is after the one before it, and the next save puts
    everything in order."""

    def second_save(directory: Path, kill_at: int) -> None:
        count = 0

        def hook() -> None:
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        Stages(hook).install()
        save_checkpoint(directory, step, content(2), {"save": 2}, keep=1)

    survived, stage = False, -1  # odd: a hook is called before and after each call
    while not survived:
        stage += 2
        directory = tmp_path / str(stage)
        save_checkpoint(directory, 1, content(1), {"save": 1}, keep=1)
        status = in_child(lambda at=stage, d=directory: second_save(d, at))
        survived = os.WIFEXITED(status)
        assert survived or os.WTERMSIG(status) == signal.SIGKILL
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        check_intact(directory, 1, 2)
        save_checkpoint(directory, 3, content(3), {"save": 3}, keep=1)
        assert names(directory) == ["step-000003"]
    assert stage > 20


@pytest.mark.full
def test_kill_at_random_moments(tmp_path):
    """A child saves in a loop and tells of each stage; the parent kills it, unannounced, after the n-th word."""
    draw = random.Random(0)
    saved = 0
    for _ in range(10):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            os.close(read_end)
            Stages(lambda end=write_end: os.write(end, b".")).install()
            for i in range(saved + 1, saved + 1000):
                big = torch.full((100_000,), float(i))
                save_checkpoint(tmp_path, i % 3, {**content(i), "big": big}, {"save": i}, keep=draw.randint(1, 2))
                os.write(write_end, b"s")
            os._exit(0)
        os.close(write_end)
        words = b""
        stop = draw.randint(60, 200)
        while len(words) < stop:
            words += os.read(read_end, 1)
        os.kill(pid, signal.SIGKILL)
        while more := os.read(read_end, 1000):
            words += more
        os.close(read_end)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        done = words.count(b"s")
        assert done >= 1
        for path in list_checkpoints(tmp_path):  # every name step-N is a complete checkpoint
            kept = load_checkpoint(path)
            assert torch.equal(kept.tensors["w"], torch.full((64,), float(kept.state["save"])))
        assert any(
            load_checkpoint(p).state["save"] in (saved + done, saved + done + 1) for p in list_checkpoints(tmp_path)
        )
        saved += done + 1
