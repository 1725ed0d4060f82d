"""The parent's handle on one worker process: start it, talk to it without blocking, kill it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from policygrad.rewards.wire import Inbox, frame

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from policygrad.rewards.worker import main; main(int(sys.argv[2]))"
)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_PIECE = 1 << 20  # bytes per read


class WorkerProcess:
    """A fresh interpreter with this one's import path, in a session of its own so that its children die with it."""

    def __init__(self, first_message: Any) -> None:
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), str(self.owner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, **_ONE_THREAD},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self._inbox = Inbox()
        self._outbox = memoryview(b"")
        self.send(first_message)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def writing(self) -> bool:
        """Whether `flush` still has bytes to write."""
        return len(self._outbox) > 0

    def send(self, message: Any) -> None:
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

    def receive(self) -> tuple[list[Any], bool]:
        """What has arrived, and whether the worker has ended."""
        messages: list[Any] = []
        try:
            while data := os.read(self.output, _PIECE):
                messages.extend(self._inbox.feed(data))
        except BlockingIOError:
            return messages, False
        return messages, True

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> str:
        """End the worker and what it started, at once. Returns how it had ended by itself, or "signal SIGKILL"."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
