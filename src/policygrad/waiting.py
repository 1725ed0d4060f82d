"""From code that calls to code that awaits: one event loop for many calls, also below somebody else's (a notebook's); and
threads that compute as the one that starts them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Waiter:
    """Runs coroutines to their end, one after another, in one loop, so that an engine's connections stay open between them.

    Ctrl-C acts at once, as it does in code that does not await: the loop leaves the signal to whoever handles it.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; what it raises is raised here."""
        loop = self._loop = self._loop or asyncio.new_event_loop()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._complete(loop, work)
        return _in_thread(loop, work)  # this thread's own loop is busy with whoever called us

    def _complete(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
        """What an interrupted call has begun ends with it: the next one would go on with its questions."""
        task = loop.create_task(work)
        try:
            return loop.run_until_complete(task)
        except KeyboardInterrupt:
            if not task.done():
                task.cancel()
                loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise

    def close(self) -> None:
        """Ends the loop, unless an interrupted call is still in it; again is no error."""
        if self._loop is not None and not self._loop.is_running():
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
        self._loop = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _in_thread(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own; an interrupt of this one cancels it, so that it ends where it next awaits."""
    found: list[T] = []
    raised: list[BaseException] = []

    def target() -> None:
        try:
            found.append(loop.run_until_complete(work))
        except BaseException as error:
            raised.append(error)

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    thread = threading.Thread(target=computing(target), daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(cancel)
        raise
    if raised:
        raise raised[0]
    return found[0]


def computing(target: Callable[[], None]) -> Callable[[], None]:
    """`target` for a thread of its own, where torch is to compute with as many threads as in this one.

    OpenMP keeps that number per thread, and a new one begins with the machine's: its products would be summed in another order,
    and be in the way of what it runs beside.
    """
    torch = sys.modules.get("torch")  # a reward worker may do without
    if torch is None:
        return target
    threads = torch.get_num_threads()

    def with_threads() -> None:
        torch.set_num_threads(threads)
        target()

    return with_threads
