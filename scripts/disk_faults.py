"""Faults of a disk under a checkpoint: a save that is killed or refused at each of its calls, and bits that turn."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import policygrad as pg
from policygrad.checkpoint import format as checkpoint
from policygrad.errors import CheckpointError

CALLS = ("fsync", "replace", "unlink", "rmdir", "mkdir")
"""By which a save changes the disk, next to safetensors' own writing."""
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)
Content = tuple[dict[str, torch.Tensor], dict[str, Any]]


def calls_of_a_save(hook: Callable[[], None]) -> dict[str, Any]:
    """Calls `hook` before and after each call by which a save changes the disk; the functions as they were, to put back."""

    def around(function: Any) -> Any:
        def wrapped(*args: object, **kwargs: object) -> object:
            hook()
            result = function(*args, **kwargs)
            hook()
            return result

        return wrapped

    before = {name: getattr(os, name) for name in CALLS} | {"save_file": checkpoint.save_file}
    put({name: around(function) for name, function in before.items()})
    return before


def put(functions: Mapping[str, Any]) -> None:
    for name, function in functions.items():
        setattr(checkpoint if name == "save_file" else os, name, function)


def at_call(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """A hook that acts at the n-th of its calls."""
    count = 0

    def hook() -> None:
        nonlocal count
        count += 1
        if count == number:
            act()

    return hook


def made(folder: Path) -> Content:
    """What a checkpoint of the embedded model's run holds: tensors and state."""
    run = pg.Run(
        algorithm=pg.PPO,
        steps=1,
        prompts_per_step=2,
        samples_per_prompt=2,
        evaluation=pg.EvaluationConfig(problems=0),
        checkpoint=pg.CheckpointConfig(every=1),
        output=str(folder / "run"),
    )
    pg.train(run, display=False)
    found = checkpoint.load_latest(folder / "run" / "checkpoints", warn=fail_on)
    assert found is not None
    return found.tensors, found.state


def fail_on(message: str) -> None:
    raise AssertionError(message)


def same(found: checkpoint.Checkpoint, content: Content, mark: int) -> bool:
    """Whether it is what the save of that mark was given."""
    tensors, state = content
    return found.state == state | {"mark": mark} and all(
        torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items()
    )


def wrong_after(directory: Path, content: Content) -> str:
    """What does not hold in a folder whose first save was whole and whose second was cut short; empty when all does."""
    try:
        found = checkpoint.load_latest(directory, warn=fail_on)
    except (AssertionError, CheckpointError) as error:
        return f"the newest checkpoint is not whole: {error}"
    if found is None or not any(same(found, content, mark) for mark in (1, 2)):
        return "the newest checkpoint is neither the one before nor this one"
    save(directory, 3, content, 3)
    names = sorted(path.name for path in directory.iterdir())
    last = checkpoint.load_checkpoint(directory / "step-000003")
    if names != ["step-000003"] or not same(last, content, 3):
        return f"the next save leaves {', '.join(names)}"
    return ""


def save(directory: Path, step: int, content: Content, mark: int) -> None:
    checkpoint.save_checkpoint(directory, step, content[0], content[1] | {"mark": mark}, keep=1)


def killed_save(directory: Path, step: int, content: Content, at: int) -> bool:
    """In a process of its own; whether it was killed."""
    if (pid := os.fork()) == 0:
        torch.set_num_threads(1)
        calls_of_a_save(at_call(at, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        try:
            save(directory, step, content, 2)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def failed_save(directory: Path, step: int, content: Content, at: int, number: int) -> tuple[bool, str]:
    """(whether the save came to that call, what does not hold)."""
    struck = False

    def fail() -> None:
        nonlocal struck
        struck = True
        raise OSError(number, os.strerror(number))

    before, said = calls_of_a_save(at_call(at, fail)), ""
    try:
        save(directory, step, content, 2)
    except CheckpointError as error:
        if not re.search(r"step-00000[12](\.old)?, is intact", str(error)):
            said = f"the error does not say what is left: {error}"
    except OSError as error:
        said = f"no CheckpointError, but {error!r}"
    finally:
        put(before)
    return struck, said


def kills(content: Content, folder: Path, times: int) -> dict[str, Any]:
    """Before and after every call, of a save under the next name and of one under the same."""
    count, wrong = 0, list[str]()
    for turn in range(times):
        for step in (2, 1):
            at, alive = 0, False
            while not alive:
                at += 1
                directory = folder / f"kill-{turn}-{step}-{at}"
                save(directory, 1, content, 1)
                alive = not killed_save(directory, step, content, at)
                count += not alive
                if said := wrong_after(directory, content):
                    wrong.append(f"killed at call {at} of a save: {said}")
                shutil.rmtree(directory)
    return {"count": count, "wrong": wrong}


def errors(content: Content, folder: Path) -> dict[str, Any]:
    """Every error at every call, before and after it, likewise."""
    count, wrong = 0, list[str]()
    for number in ERRORS:
        for step in (2, 1):
            at, struck = 0, True
            while struck:
                at += 1
                directory = folder / f"error-{number}-{step}-{at}"
                save(directory, 1, content, 1)
                struck, said = failed_save(directory, step, content, at, number)
                count += struck
                if said := said or wrong_after(directory, content):
                    wrong.append(f"{errno.errorcode[number]} at call {at} of a save: {said}")
                shutil.rmtree(directory)
    return {"count": count, "kinds": [errno.errorcode[number] for number in ERRORS], "wrong": wrong}


def flips(content: Content, folder: Path, number: int) -> dict[str, Any]:
    """Anywhere in the files of a checkpoint, a third of them in each."""
    draw, wrong = random.Random(0), list[str]()
    save(folder / "flips", 1, content, 1)
    path = folder / "flips" / "step-000001"
    files = sorted(path.iterdir())
    for turn in range(number):
        file = files[turn % len(files)]
        at, bit = draw.randrange(file.stat().st_size), 1 << draw.randrange(8)
        turned(file, at, bit)
        try:
            checkpoint.load_checkpoint(path)
            wrong.append(f"bit {bit} of byte {at} of {file.name} was not noticed")
        except CheckpointError as error:
            if str(path) not in str(error):
                wrong.append(f"bit {bit} of byte {at} of {file.name}: the error names no file: {error}")
        turned(file, at, bit)
    if not same(checkpoint.load_checkpoint(path), content, 1):
        wrong.append("turned back, it is not what it was")
    return {"count": number, "files": [file.name for file in files], "wrong": wrong}


def turned(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        value = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([value ^ bit]))
