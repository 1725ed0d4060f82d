"""Processes that this one starts: their start, their end with it, the end of all that they started, the end of what they print.

It needs the standard library alone, since it is also loaded into Pythons without policygrad, and is itself a program, the guard:

    python processes.py PARENT SECONDS FOLDER COMMAND...

The guard runs a command, and ends it with everything that it started. It stands between this process and a server. Servers
start processes of their own, which outlive them when they are killed: vLLM's engine core keeps its GPU memory, and `npx` is only
the parent of the program that it runs. The guard ends all of them when the command ends, when it is told to (SIGTERM), or when
the process that started it is gone, whatever ended that. Standard input and output are the command's.

PARENT is the process id of who starts it. SECONDS is how long the command has to exit after SIGTERM, before it is killed. FOLDER
holds files in shared memory, which the guard removes if its parent can no longer do it; "" = none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from types import FrameType

_POLL_SECONDS = 0.1  # seconds between the guard's looks at the command and at its parent
_MAX_ROUNDS = 200  # searches for processes that were forked while others were being stopped or killed
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


# Start, and end with the parent


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command line of a fresh interpreter with this one's import path (-P adds no folder to it), which runs `code`.

    The arguments are its sys.argv[1:].
    """
    return [sys.executable, "-P", "-c", f"{_SET_IMPORT_PATH}; {code}", json.dumps(sys.path), *arguments]


_SET_IMPORT_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1))"


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends (Linux)."""
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent has ended (Linux)."""
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _call_prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


# The guard


def guard_command(argv: Sequence[str], exit_seconds: float, shared_folder: str = "") -> list[str]:
    """Return the command line that runs `argv` below a guard of this process."""
    return [sys.executable, "-P", __file__, str(os.getpid()), f"{exit_seconds:g}", shared_folder, *argv]


def guard(parent: int, exit_seconds: float, shared_folder: str, argv: Sequence[str]) -> int:
    """Run a command, and end it and everything it started when it ends, on SIGTERM, or when the process `parent` is gone.

    Args:
        exit_seconds: Time for the command between SIGTERM and SIGKILL.
        shared_folder: Removed when the parent is gone.

    Returns:
        The command's exit code.
    """
    is_stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        is_stopping = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    adopt_orphans()
    try:  # preexec_fn runs in the command's process before its program starts
        command = subprocess.Popen(argv, preexec_fn=die_with_parent if sys.platform == "linux" else None)
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        return 127  # a shell's exit code for it
    code: int | None = None
    deadline: float | None = None
    while code is None:
        code = _reap(command.pid)
        if deadline is None and (is_stopping or os.getppid() != parent):
            deadline = time.monotonic() + exit_seconds
            with contextlib.suppress(ProcessLookupError):
                os.kill(command.pid, signal.SIGTERM)
        if code is None:
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
    kill_descendants()
    if shared_folder and os.getppid() != parent:
        shutil.rmtree(shared_folder, ignore_errors=True)
    return 1 if code is None else code if code >= 0 else 128 - code


def _reap(command: int) -> int | None:
    """Wait for ended children, adopted ones too. Returns the command's exit code, or minus its signal; None while it runs."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == command:
                code = os.waitstatus_to_exitcode(status)
    return code


# The end of all that a process started


def kill_group(leader: int) -> None:
    """Kill a process group, named by the process that began it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def send_signal(processes: Iterable[int], number: signal.Signals) -> None:
    """Signal those of the processes that are there and this one's."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_descendants(except_for: Collection[int] = ()) -> None:
    """Kill all descendants of this process, but for some and theirs; elsewhere than on Linux, all others of its group.

    They are first stopped, until none is new: so a process that forks without end is caught too.
    """
    if sys.platform != "linux":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpid(), signal.SIGTERM)
        return
    for _ in range(_MAX_ROUNDS):
        stopped = set[int]()
        for _ in range(_MAX_ROUNDS):
            running = set(list_descendants(os.getpid(), except_for)) - stopped
            if not running:
                break
            send_signal(running, signal.SIGSTOP)
            stopped |= running
        if not stopped:
            return
        send_signal(stopped, signal.SIGKILL)
        time.sleep(_POLL_SECONDS / 100)
        with contextlib.suppress(ChildProcessError):
            for pid in [child for child in list_descendants(os.getpid(), except_for) if child in stopped]:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def list_descendants(pid: int, except_for: Collection[int] = ()) -> list[int]:
    """Return the processes below one, each before its own, those that have ended and were not waited for too (Linux)."""
    descendants, unvisited = list[int](), [pid]
    while unvisited:
        folder = f"/proc/{unvisited.pop()}/task"
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(folder):
                with contextlib.suppress(OSError), open(f"{folder}/{thread}/children", encoding="ascii") as file:
                    children = [child for child in map(int, file.read().split()) if child not in except_for]
                    descendants += children
                    unvisited += children
    return descendants


# The end of what a process prints


class Tail:
    """The last bytes of an output, and the length of all of it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.data, self.length = b"", 0

    def add(self, piece: bytes) -> None:
        self.data = (self.data + piece)[-self._max_bytes :]
        self.length += len(piece)


def last_lines(output: bytes, number: int, width: int) -> list[str]:
    """Return the last lines that are not blank, without white space around them and cut to a width."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines()]
    return [line[:width] for line in lines if line][-number:]


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:]))
