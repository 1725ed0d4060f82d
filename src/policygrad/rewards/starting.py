"""Workers are started by a thread that lives as long as the pool: on Linux a worker ends with the thread that started it
(PR_SET_PDEATHSIG, see prctl(2)), and whoever scores may be a thread that is soon over.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from policygrad.errors import RewardError
from policygrad.rewards.subprocess import WorkerProcess
from policygrad.rewards.wire import WorkerStart

_Asked = SimpleQueue[tuple[Future[WorkerProcess], WorkerStart, Sequence[str]] | None]


class Starter:
    """Called as `WorkerProcess` is, from any thread."""

    def __init__(self) -> None:
        self._asked: _Asked = SimpleQueue()
        self._lock = threading.Lock()
        self._over = False
        threading.Thread(target=_serve, args=(self._asked,), daemon=True, name="reward workers").start()

    def __call__(self, start: WorkerStart, variables: Sequence[str] = ()) -> WorkerProcess:
        """Raises RewardError after `close`, and what starting a process raises."""
        future: Future[WorkerProcess] = Future()
        with self._lock:
            if self._over:
                raise RewardError("this RewardPool is closed; score inside its `with` block")
            self._asked.put((future, start, variables))
        return future.result()

    def close(self) -> None:
        """No worker is started any more, and those that are left end."""
        with self._lock:
            self._over = True
            self._asked.put(None)


def _serve(asked: _Asked) -> None:
    while (task := asked.get()) is not None:
        future, start, variables = task
        try:
            future.set_result(WorkerProcess(start, variables))
        except BaseException as error:  # told to whoever asked
            future.set_exception(error)
        del task, future  # the worker is its slot's alone
