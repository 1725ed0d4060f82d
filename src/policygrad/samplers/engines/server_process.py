"""Servers on this machine that are started here, restarted when they die, and gone when this process is, whatever ends it.

Between this process and a server stands a guard: this file, run as a program with the standard library alone. A server starts
processes of its own (vLLM's engine core, SGLang's schedulers), which outlive it when it is killed, and keep its GPU memory. The
guard ends all of them when the server ends, when it is told to (SIGTERM), or when the process that started it is gone.

    python server_process.py PARENT FOLDER COMMAND...

FOLDER holds weights in shared memory, which the guard removes if its parent can no longer do it; "" = none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

_POLL_SECONDS = 0.1  # seconds between the guard's looks at the server and at its parent
_EXIT_SECONDS = 10.0  # seconds that a server has to exit after SIGTERM, before it is killed
_MAX_ROUNDS = 50  # searches for processes that were forked while others were being killed
_LOG_LINES, _LINE_WIDTH = 12, 300  # lines of the log, and characters of each, in an error message
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_HIDDEN_VARIABLES = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
)  # of this process's environment, which may not be the server's

LaunchCommand = tuple[Mapping[str, str], Sequence[str]]  # (environment variables, argv)


class ServerProcess:
    """One server on this machine, with its guard and its log."""

    def __init__(self, log: Path, make_command: Callable[[], LaunchCommand], shared_folder: str = "") -> None:
        """
        Args:
            log: The file that its output is appended to.
            make_command: Called at every start: the command may name the newest weights.
            shared_folder: A folder in shared memory to remove if this process is killed; "" = none.
        """
        self.log, self._make_command, self._shared_folder = log, make_command, shared_folder
        self.guard: subprocess.Popen[bytes] | None = None
        self.is_starting = True
        """The owner sets it to False once the server has answered; a server that ends later is started again."""
        self._started = 0.0  # monotonic time of the last start
        self._log_start = 0  # byte of the log at which the output since then begins

    def ensure_running(self) -> str:
        """Start the server unless it runs.

        Returns:
            How it ended, if it did so before it answered: then it is started by the next call only. Otherwise "".
        """
        if self.guard is not None:
            code = self.guard.poll()
            if code is None:
                return ""
            self._kill_remains()
            if self.is_starting:
                return f"it ended with exit code {code} before it answered. {self.read_log_end()}"
        self._start()
        return ""

    @property
    def seconds_since_start(self) -> float:
        """Seconds since it was last started."""
        return time.monotonic() - self._started

    def read_log_end(self) -> str:
        """Return the last lines of its log since it was started, below the log's name, for an error message."""
        lines = self._read_lines()[-_LOG_LINES:]
        if not lines:
            return f"It printed nothing ({self.log})."
        return "\n  ".join([f"The end of {self.log}:", *lines])

    def ask_to_stop(self) -> None:
        """Begin to end the server, without waiting for it: several can then end at the same time."""
        if self.guard is not None and self.guard.poll() is None:
            self.guard.terminate()

    def stop(self) -> None:
        """End the server and everything that it started."""
        self.ask_to_stop()
        if self.guard is not None:
            try:
                self.guard.wait(_EXIT_SECONDS + 5)
            except subprocess.TimeoutExpired:
                self.guard.kill()
                self.guard.wait()
        self._kill_remains()

    def _start(self) -> None:
        environment, argv = self._make_command()
        inherited = {name: value for name, value in os.environ.items() if name not in _HIDDEN_VARIABLES}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self.guard = subprocess.Popen(
                [sys.executable, "-P", __file__, str(os.getpid()), self._shared_folder, *argv],
                env=inherited | {"PYTHONSAFEPATH": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run, which continues to its next checkpoint
            )
        self.is_starting, self._started = True, time.monotonic()

    def _kill_remains(self) -> None:
        """Kill what is left of the guard's process group: nothing, unless the guard itself was killed."""
        if self.guard is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.guard.pid, signal.SIGKILL)
            self.guard = None

    def _read_lines(self) -> list[str]:
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 2 * _LOG_LINES * _LINE_WIDTH))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        lines = (line.rpartition("\r")[2].strip() for line in text.splitlines())
        return [line[:_LINE_WIDTH] for line in lines if line]


def find_free_port() -> int:
    """Return a port of this machine that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# The guard.


def guard(parent: int, shared_folder: str, argv: Sequence[str]) -> int:
    """Run a command, and end it and everything it started when it ends, on SIGTERM, or when the process `parent` is gone.

    Args:
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
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the server become the guard's children
    # runs in the server's process before its program starts
    die_with_guard = partial(_call_prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        server = subprocess.Popen(argv, preexec_fn=die_with_guard if sys.platform == "linux" else None)
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        return 127
    code: int | None = None
    deadline: float | None = None
    while code is None:
        code = _reap(server.pid)
        if deadline is None and (is_stopping or os.getppid() != parent):
            deadline = time.monotonic() + _EXIT_SECONDS
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGTERM)
        if code is None:
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
    _kill_descendants()
    if shared_folder and os.getppid() != parent:
        shutil.rmtree(shared_folder, ignore_errors=True)
    return 1 if code is None else code if code >= 0 else 128 - code


def _reap(server: int) -> int | None:
    """Wait for ended children, adopted ones too. Returns the server's exit code, or minus its signal; None while it runs."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == server:
                code = os.waitstatus_to_exitcode(status)
    return code


def _kill_descendants() -> None:
    """Kill all descendants of this process; elsewhere than on Linux, all other processes of its group."""
    if sys.platform != "linux":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpid(), signal.SIGTERM)
        return
    for _ in range(_MAX_ROUNDS):
        descendants = _list_descendants(os.getpid())
        if not descendants:
            return
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS / 10)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _list_descendants(pid: int) -> list[int]:
    pids = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, children.read_text().split()):
                pids += [child, *_list_descendants(child)]
    return pids


def _call_prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
