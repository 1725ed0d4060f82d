"""Ranks above 0 that are forked from a process that has imported torch and done nothing: they need not import it each.

Each is the same program as one that is started, from `worker.main` on, and can be killed like it. That a started one works is for
tests/learners/test_rank_processes.py and, in the full tier, for runs of test_ranks_run.py. Not forked from this process: torch
keeps much of a group that its fork cannot use.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import reduction
from typing import Any

import pytest

from policygrad.learners.fsdp import processes, worker
from policygrad.learners.fsdp.message_key import send_key

PRELOADED = (
    "policygrad.learners.fsdp.worker",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)


class ForkedWorker:
    """A rank that joins the group, with the interface of `processes.LocalWorker`."""

    def __init__(self, host: str, port: int, rank: int, size: int, key: bytes) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        reader, writer = os.pipe()  # the key, and then nothing: that it ends tells the rank that rank 0 has ended
        self._writer: int | None = writer
        send_key(writer, key)
        descriptors = [_Descriptor(fd) for fd in (reader, 1, 2)]
        args = (descriptors, dict(os.environ), os.getcwd(), port, rank, size)
        self._process = context.Process(target=_serve, args=args)
        self._lock = threading.Lock()  # the watchdog's thread asks too
        self._process.start()
        os.close(reader)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None
        return code

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def forking_ranks() -> Iterator[None]:
    """While the block runs, ranks above 0 are forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "WorkerLauncher", partial(processes.WorkerLauncher, ForkedWorker))
        yield


class _Descriptor:
    """A file descriptor of this process as an argument of another."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return _take_descriptor, (reduction.DupFd(self._descriptor),)


def _take_descriptor(sent: Any) -> int:
    return int(sent.detach())


def _serve(descriptors: list[int], environment: dict[str, str], folder: str, port: int, rank: int, size: int) -> None:
    """Be the rank, with the environment and the outputs that a program which is started inherits."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    worker.main(port, rank, size)
