"""Servers on this machine that are started here, restarted when they die, and gone when this process is, whatever ends it.

Each runs below a guard, `utils/processes.py`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from policygrad.utils.child_environment import explain_missing_variable, filter_environment
from policygrad.utils.processes import guard_command, kill_group, last_lines

_EXIT_SECONDS = 10.0  # seconds that a server has to exit after SIGTERM, before it is killed
_LOG_LINES, _LINE_WIDTH = 12, 300  # lines of the log, and characters of each, in an error message
# Of this process's Python, which may not be the server's.
_HIDDEN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")

LaunchCommand = tuple[Mapping[str, str], Sequence[str]]  # (environment variables, argv)


class ServerProcess:
    """One server on this machine, with its guard and its log."""

    def __init__(
        self,
        log: Path,
        make_command: Callable[[], LaunchCommand],
        variables: Sequence[str] = (),
        shared_folder: str = "",
    ) -> None:
        """
        Args:
            log: The file that its output is appended to.
            make_command: Called at every start: the command may name the newest weights.
            variables: Names and patterns of this process's environment variables that it gets besides the default ones
                (`filter_environment`).
            shared_folder: A folder in shared memory to remove if this process is killed; "" = none.
        """
        self.log, self._make_command, self._shared_folder = log, make_command, shared_folder
        self._variables = variables
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
                output = self._read_output().decode(errors="replace")
                missing = explain_missing_variable(output, self._variables, "servers", "--sampler.env")
                return f"it ended with exit code {code} before it answered{missing}. {self.read_log_end()}"
        self._start()
        return ""

    @property
    def seconds_since_start(self) -> float:
        """Seconds since it was last started."""
        return time.monotonic() - self._started

    def read_log_end(self) -> str:
        """Return the last lines of its log since it was started, below the log's name, for an error message."""
        lines = last_lines(self._read_output(), _LOG_LINES, _LINE_WIDTH)
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
        inherited = filter_environment(os.environ, self._variables)
        for name in _HIDDEN_VARIABLES:
            inherited.pop(name, None)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self.guard = subprocess.Popen(
                guard_command(argv, _EXIT_SECONDS, self._shared_folder),
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
            kill_group(self.guard.pid)
            self.guard = None

    def _read_output(self) -> bytes:
        """Return the end of its log since it was started."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 2 * _LOG_LINES * _LINE_WIDTH))
                return log.read()
        except OSError:
            return b""


def find_free_port() -> int:
    """Return a port of this machine that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
