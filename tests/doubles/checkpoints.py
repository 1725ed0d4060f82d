"""A small checkpoint, and what a folder of them holds; saves that are killed."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from policygrad.checkpoint import format as checkpoint


def silent(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


def content(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64,), float(step)), "step": torch.tensor(step)}


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def in_child(work) -> int:
    """Run `work` in a forked process; its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


class Stages:
    """Calls `hook` before and after each system call by which a save changes the disk."""

    def __init__(self, hook) -> None:
        self.hook = hook

    def install(self) -> None:
        for name in ("fsync", "replace", "unlink", "rmdir", "mkdir"):
            setattr(os, name, self.around(getattr(os, name)))
        checkpoint.save_file = self.around(checkpoint.save_file)

    def around(self, function):
        def wrapped(*args: object, **kwargs: object) -> object:
            self.hook()
            result = function(*args, **kwargs)
            self.hook()
            return result

        return wrapped
