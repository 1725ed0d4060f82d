"""The parent's handle on one worker process: start it, talk to it without blocking, kill it."""

import os
import secrets
import select
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace

from policygrad.rewards import family, walled
from policygrad.rewards.answers import NONCE, Inbox, plain
from policygrad.rewards.variables import chosen
from policygrad.rewards.wire import Chunk, WorkerStart, frame

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from policygrad.rewards.walled import enter; "
    "enter(sys.argv[3]); from policygrad.rewards.worker import main; main(int(sys.argv[2]))"
)
_PIECE = 1 << 20  # bytes per read
_KEPT, _LINES, _WIDTH = (
    4096,
    3,
    200,
)  # of what a worker prints: bytes, and of an error message lines and their characters


class Output:
    """Keeps the last of what a worker prints. A thread reads it as it comes, so that a print never waits for room in the pipe."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe, self._lock, self._open = pipe, threading.Lock(), True
        self._bytes = b""
        threading.Thread(target=self._follow, daemon=True, name="reward output").start()

    def last_lines(self) -> str:
        """Return the last lines that were printed, as one line; "" where nothing was."""
        self._read()
        lines = [line.strip()[:_WIDTH] for line in self._bytes.decode(errors="replace").splitlines() if line.strip()]
        return plain(" / ".join(lines[-_LINES:]))

    def forget(self) -> None:
        """Drop what has been printed so far."""
        self._read()
        self._bytes = b""

    def _follow(self) -> None:
        waits = select.poll()
        waits.register(self._pipe, select.POLLIN)
        while self._open:
            waits.poll()
            self._read()
        os.close(self._pipe)

    def _read(self) -> None:
        with self._lock:
            if not self._open:
                return
            try:
                data = os.read(self._pipe, _PIECE)
            except BlockingIOError:
                return
            self._bytes = (self._bytes + data)[-_KEPT:]
            self._open = bool(data)


class WorkerProcess:
    """A fresh interpreter with this one's import path, in a session of its own so that its children die with it.

    variables: names of environment variables that it gets besides those in `variables.py`.
    """

    def __init__(self, start: WorkerStart, variables: Sequence[str] = ()) -> None:
        self._token, nonce = secrets.token_hex(16), secrets.token_bytes(NONCE)
        environment = {**chosen(os.environ, variables), family.TOKEN: self._token}
        self._place = walled.start(start.sandbox, _BOOT, environment)
        self._process = subprocess.Popen(
            self._place.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if start.show_output else subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=self._place.environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.printed = None if self._process.stderr is None else Output(os.dup(self._process.stderr.fileno()))
        if self._process.stderr is not None:
            self._process.stderr.close()
        self.inbox = Inbox(nonce)
        self._outbox = memoryview(b"")
        self.send(replace(start, nonce=nonce))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def writing(self) -> bool:
        """Whether `flush` still has bytes to write."""
        return len(self._outbox) > 0

    def send(self, message: WorkerStart | Chunk) -> None:
        """Queue a message, and write what the pipe takes now."""
        self._outbox = memoryview(bytes(self._outbox) + frame(message))
        self.flush()

    def flush(self) -> None:
        try:
            while self._outbox:
                self._outbox = self._outbox[os.write(self.input, self._outbox) :]
        except BlockingIOError:
            pass
        except OSError:  # the worker is gone; reading from it says so
            self._outbox = memoryview(b"")

    def receive(self) -> bool:
        """Put into `inbox` what has arrived, a piece at most: who writes without end does not hold up the others. True when the
        worker has ended."""
        try:
            data = os.read(self.output, _PIECE)
        except BlockingIOError:
            return False
        self.inbox.feed(data)
        return not data

    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def kin(self) -> family.Family:
        """It, with what it has started."""
        return family.Family(self.pid, self._token, running=self._process.poll() is None)

    def kill(self) -> str:
        """End the worker and what it started, at once. Returns how it had ended by itself, or "signal SIGKILL"."""
        (how,) = kill([self])
        return how

    def collect(self) -> str:
        """What has ended is put away; how it ended."""
        code = self._process.wait()
        self._place.clear()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"


def kill(workers: Sequence[WorkerProcess]) -> list[str]:
    """End these workers and what they started, at once, and together: a machine may have thousands of processes to look through.
    Returns how each had ended by itself, or "signal SIGKILL"."""
    family.end([worker.kin for worker in workers])
    return [worker.collect() for worker in workers]
