"""Ranks above 0 that are forked from the process of rank 0: they need not import torch and transformers first.

Each is the same program as one that is started, from `worker.main` on, and can be killed like it. That a started one works is for
tests/learners/test_rank_processes.py and, in the full tier, for runs of test_ranks_run.py.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import pytest
import torch
from torch.distributed.tensor import debug
from torch.distributed.tensor._redistribute import _gen_transform_infos

from policygrad.learners.fsdp import processes, worker


class ForkedWorker:
    """A fork of this process that joins the group, with the interface of `processes.LocalWorker`."""

    def __init__(self, host: str, port: int, rank: int, size: int) -> None:
        reader, self._writer = os.pipe()  # nothing is written: that it ends tells the rank that rank 0 has ended
        self._code: int | None = None
        self._lock = threading.Lock()  # the watchdog's thread asks too
        self.pid = os.fork()
        if self.pid == 0:
            _serve(reader, port, rank, size)
        os.close(reader)

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
                    os.close(self._writer)
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)


@contextmanager
def forking_ranks() -> Iterator[None]:
    """While the block runs, ranks above 0 are forks. OpenMP's threads do not survive a fork, so all compute with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "WorkerLauncher", partial(processes.WorkerLauncher, ForkedWorker))
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _serve(reader: int, port: int, rank: int, size: int) -> NoReturn:
    """Be the rank: with rank 0's outputs and none of its files and sockets, which would stay open here after its end."""
    try:
        _forget_rank_0()
        gc.freeze()  # what is collected here would close files that others have by now
        os.setsid()
        os.dup2(reader, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        torch.set_num_threads(1)
        worker.main(port, rank, size)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _forget_rank_0() -> None:
    """Empty torch's caches: a mesh equals another process's of the same size, and cached is which part rank 0 has."""
    clear: Callable[[], object] = debug._clear_sharding_prop_cache
    clear()
    _gen_transform_infos.cache_clear()
