"""The processes of rank 1 and above, as rank 0 starts and ends them; they end with it, however it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from policygrad.learners.fsdp.follower import main; "
    "main(*map(int, sys.argv[2:]))"
)


HERE = "127.0.0.1"
"""This machine, to itself."""


class Other(Protocol):
    """A process that this one has started, as `subprocess.Popen` says it."""

    def poll(self) -> int | None:
        """Its exit code; None while it lives."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...


@dataclass(frozen=True)
class Places:
    """Where the processes of rank 1 and above are: on this machine, unless something else starts them."""

    start: Callable[[str, int, int, int], Other]
    """(host, port, rank, size): starts the process that `Ranks.at` is to be called in, with these."""
    host: str = HERE
    """This machine, to those processes."""


class Follower(subprocess.Popen[bytes]):
    """A fresh interpreter with this one's import path, to which -P adds no folder. Nobody writes to its standard input, a pipe: see
    `end_with_rank_0`."""

    def __init__(self, port: int, rank: int, size: int) -> None:
        words = [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), *map(str, (port, rank, size))]
        super().__init__(words, stdin=subprocess.PIPE, start_new_session=True)  # a terminal's Ctrl-C is rank 0's

    def wait(self, timeout: float | None = None) -> int:
        """As `Popen.wait`; the pipe is closed then."""
        code = super().wait(timeout)
        if self.stdin is not None:
            self.stdin.close()
        return code


def started(host: str, port: int, rank: int, size: int) -> Other:
    """A process on this machine."""
    return Follower(port, rank, size)


def end_with_rank_0() -> None:
    """In a `Follower`: it ends at once when the process that started it does, which nothing else says before they are connected.
    A pipe's end comes whatever killed that process, on any system, and whichever thread had started this one."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ends with rank 0").start()


def ended(others: Sequence[Other]) -> str:
    """In words, the first of them to have ended; empty where none has."""
    codes = [(rank, other.poll()) for rank, other in enumerate(others, 1)]
    return next((f"rank {rank} has ended (exit code {code})" for rank, code in codes if code is not None), "")


def kill(others: Sequence[Other]) -> None:
    """Ends them, and waits until they have."""
    for other in others:
        other.kill()
    for other in others:
        other.wait()
