"""From code that calls to code that awaits: one event loop for many calls, also below somebody else's (a notebook's)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Waiter:
    """Runs coroutines to their end, one after another, in one loop, so that an engine's connections stay open between them."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; what it raises is raised here."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop().run(work)
        return in_thread(lambda: self._loop().run(work))  # this thread's loop is busy with whoever called us

    def _loop(self) -> asyncio.Runner:
        self._runner = self._runner or asyncio.Runner()
        return self._runner

    def close(self) -> None:
        """Ends the loop; again is no error."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def in_thread(work: Callable[[], T]) -> T:
    """What `work` returns, or raises, run in a thread of its own."""
    found: list[T] = []
    raised: list[BaseException] = []

    def target() -> None:
        try:
            found.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]
