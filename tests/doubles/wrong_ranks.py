"""What goes wrong in one of several processes that learn together: functions that all of them are told to call."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policygrad.checkpoint.shards import ShardFile, TensorShard, write_shard_file
from policygrad.learners.fsdp import controller
from policygrad.learners.fsdp.learner import FsdpLearner
from policygrad.samplers.base import Request
from policygrad.training import distributed
from policygrad.training.distributed import sample_shard

AFTER = 1
"""Updates, after which a process hangs."""


def for_ever() -> None:
    while True:
        time.sleep(3600)


def updating(learner: FsdpLearner, rank: int, how: str, *args: Any) -> Any:
    if learner.workers.rank == rank and learner.version >= AFTER:
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "hold":
            ctypes.PyDLL(None).sleep(3600)  # and lets no other thread run Python
        for_ever()
    return FsdpLearner.update(learner, *args)


def drawing(learner: FsdpLearner, requests: Sequence[Request], version: int, *args: Any) -> None:
    """Of a process above rank 0."""
    if version >= AFTER:
        for_ever()
    sample_shard(learner, requests, version, *args)


def hang(where: str, rank: int) -> None:
    """In rank 0: has a process hang in an update, be stopped in it, hold the interpreter in it, or hang in a draw."""
    if where == "draw":
        distributed.sample_shard = drawing
        return

    def update(self: controller.FsdpController, *args: Any) -> Any:
        return self.run_on_all(updating, rank, where, *args)

    controller.FsdpController.update = update  # type: ignore[method-assign]


def at_saves(learner: FsdpLearner, rank: int, how: str, at: int) -> None:
    """Has the `at`-th share of a process go wrong: it is killed before a byte is written, in the midst, or after; or is refused."""
    saves = 0

    def wrong(path: Path, pieces: Mapping[str, TensorShard]) -> ShardFile:
        nonlocal saves
        saves += 1
        if saves != at:
            return write_shard_file(path, pieces)
        if how == "refused":
            raise OSError(errno.EIO, "Input/output error")
        if how == "midst":
            path.write_bytes(b"half of it")
        if how == "after":
            write_shard_file(path, pieces)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    if learner.workers.rank == rank:
        distributed.write_shard_file = wrong
