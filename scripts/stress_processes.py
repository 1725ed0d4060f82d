"""A command of policygrad as a process that is watched from outside and killed: what it is at, what it holds, what it leaves.

Linux only: it reads /proc, and adopts what a killed process leaves behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from policygrad.utils.processes import adopt_orphans

LAUNCH = """
import faulthandler, os, signal, sys
from policygrad.utils.processes import die_with_parent
die_with_parent()
told = sys.argv.pop(1)
faulthandler.register(signal.SIGUSR1, file=open(told + ".new", "w"), all_threads=False)
os.rename(told + ".new", told)
from policygrad.cli import main
sys.exit(main())
"""
"""The command line as it is; asked by SIGUSR1, it writes where it stands. It ends with whoever watches it, or it would hold its
folder when that one is started again."""
PATIENCE = 0.1
"""Seconds that a process has to say where it stands. One that waits for the disk does not, or not to the end: "in the kernel"."""
_FRAME = re.compile(r'File "[^"]*?policygrad/([\w/]+)\.py", line \d+ in (\w+)')


def phase_of(stack: str) -> str:
    """What a run is at, of its main thread's stack as faulthandler writes it."""
    frames = _FRAME.findall(stack)
    files, functions = [file for file, _ in frames], [function for _, function in frames]

    def within(*rooms: str) -> bool:
        return any(file.startswith(rooms) for file in files)

    if not whole(stack):
        return "in the kernel"
    if not within("training/base_trainer"):
        return "starting"
    if {"build", "restore", "start", "truncate_after"} & {*functions}:
        return "loading"
    if within("checkpoint/"):
        return "saving"
    if ("training/base_trainer", "evaluate_at") in frames:  # a rollout takes, too
        return "evaluating"
    if within("rewards/"):
        return "rewarding"
    if within("rollout/", "samplers/"):
        return "sampling"
    if within("trackers/"):
        return "logging"
    learning = within("training/loop", "training/supervised", "training/sft", "training/reward_model")
    return "updating" if learning else "between"


def whole(stack: str) -> bool:
    """Whether faulthandler, which writes a stack word by word from the innermost frame on, has come to the outermost one, or to as
    many as it writes."""
    return stack.endswith(("in <module>\n", "  ...\n"))


class Watched:
    """One process of the command, in a session of its own."""

    def __init__(self, words: Sequence[str], told: Path, log: IO[str], environment: Mapping[str, str]) -> None:
        """told: the file in which it says where it stands. log: what it prints."""
        told.unlink(missing_ok=True)
        self.told, self.began = told, time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(told), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            start_new_session=True,
        )

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    def kill(self) -> str:
        """SIGKILL; what it was at."""
        stack = ""
        if self.told.exists():
            self.process.send_signal(signal.SIGUSR1)
            end = time.monotonic() + PATIENCE
            while not whole(stack := self.told.read_text()) and time.monotonic() < end and self.code is None:
                time.sleep(0.001)
        else:
            stack = "in <module>\n"  # of the launcher
        self.process.kill()
        self.process.wait()
        return phase_of(stack)


def adopt() -> None:
    """What a killed process leaves behind becomes this one's, so that it is found."""
    if sys.platform != "linux":
        raise SystemExit("processes are watched in /proc: on Linux only")
    adopt_orphans()


def below(pid: int) -> list[int]:
    """The processes below this one that are not ended, children first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    result, new = list[int](), [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        result += new
    return result


def left_behind(seconds: float) -> list[str]:
    """The command lines of processes below this one that are there after so many seconds still; they are then ended."""
    end = time.monotonic() + seconds
    while there := below(os.getpid()):
        if time.monotonic() > end:
            break
        _collect()
        time.sleep(0.01)
    _collect()
    result = []
    for pid in there:
        with contextlib.suppress(OSError):
            result.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
            os.kill(pid, signal.SIGKILL)
    return result


def _collect() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def memory(pid: int) -> float:
    """Resident, MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def descriptors(pid: int) -> int:
    """Open files, pipes and the like."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    """Of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def held(pid: int, folder: Path) -> dict[str, float]:
    """What a run has at this moment: resident memory of trainer and workers [MiB], the trainer's descriptors and threads,
    processes, files."""
    workers = below(pid)
    return {
        "trainer_mib": memory(pid),
        "workers_mib": sum(map(memory, workers)),
        "descriptors": descriptors(pid),
        "threads": threads(pid),
        "processes": 1 + len(workers),
        "files": sum(path.is_file() for path in folder.rglob("*")),
    }
