"""A process for a test, forked from this one: it can be killed like any other, and need not import torch and transformers first."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Forked:
    """Calls functions in forks of this process; those that still run at the end are killed.

    OpenMP's threads do not survive a fork, so this process computes with one thread meanwhile, and so do its forks.
    """

    def __init__(self) -> None:
        self._processes: list[Any] = []

    def start(self, function: Callable[..., object], *args: object, stdout: int | None = None) -> Any:
        """Begin function(*args) in a process (`multiprocessing.Process`); `stdout`: a descriptor for both its outputs."""
        process = multiprocessing.get_context("fork").Process(target=_call, args=(function, args, stdout))
        process.start()
        self._processes.append(process)
        return process

    def exit_code(self, function: Callable[..., object], *args: object, stdout: int | None = None) -> int:
        """The exit code of a process that calls function(*args); -9: it was killed by SIGKILL."""
        process = self.start(function, *args, stdout=stdout)
        process.join()
        return int(process.exitcode)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextmanager
def forking() -> Iterator[Forked]:
    threads, forked = torch.get_num_threads(), Forked()
    torch.set_num_threads(1)
    try:
        yield forked
    finally:
        forked.kill()
        torch.set_num_threads(threads)


def _call(function: Callable[..., object], args: tuple[object, ...], stdout: int | None) -> None:
    gc.freeze()  # what this process has left to collect may wait for threads that are not here: process groups do
    if stdout is not None:
        os.dup2(stdout, 1)
        os.dup2(stdout, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)  # line by line
    result = function(*args)
    if isinstance(result, int):
        sys.exit(result)
