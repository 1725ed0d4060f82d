"""From code that calls to code that awaits: one event loop for many calls, also below somebody else's (a notebook's); and
threads that compute as the one that starts them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Waiter:
    """Runs coroutines to their end, one after another, in one loop, so that an engine's connections stay open between them. One
    that another thread brings meanwhile is run beside the one that is going on.

    Ctrl-C acts at once, as it does in code that does not await: the loop leaves the signal to whoever handles it.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._host: object = None
        """The thread whose call the loop runs for; None = nothing is going on."""
        self._guests = list[Future[Any]]()

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; what it raises is raised here."""
        with self._lock:
            loop = self._loop = self._loop or asyncio.new_event_loop()
            guest = None
            if self._host not in (None, threading.current_thread()):
                guest = asyncio.run_coroutine_threadsafe(work, loop)
                self._guests.append(guest)
            else:
                self._host = threading.current_thread()
        if guest is not None:
            return _result(guest)
        return _beside(loop, lambda: self._complete(loop, work))

    def _complete(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
        """What an interrupted call has begun ends with it: the next one would go on with its questions."""
        task = loop.create_task(work)
        try:
            return loop.run_until_complete(task)
        except KeyboardInterrupt:
            if not task.done():
                task.cancel()
                loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            for guest in self._guests:
                guest.cancel()
            raise
        finally:
            self._see_off(loop)

    def _see_off(self, loop: asyncio.AbstractEventLoop) -> None:
        """Waits for what other threads have brought, and takes nothing more."""
        while True:
            with self._lock:
                self._guests = [guest for guest in self._guests if not guest.done()]
                if not self._guests:
                    self._host = None
                    return
                guest = asyncio.wrap_future(self._guests[0], loop=loop)
            loop.run_until_complete(asyncio.wait([guest]))

    def close(self) -> None:
        """Ends the loop, unless an interrupted call is still in it; again is no error."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_running():
            _beside(loop, lambda: loop.run_until_complete(loop.shutdown_asyncgens()))
            loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _result(guest: Future[T]) -> T:
    """What another thread's loop comes to; an interrupt of this one cancels it."""
    try:
        return guest.result()
    except KeyboardInterrupt:
        guest.cancel()
        raise


def _beside(loop: asyncio.AbstractEventLoop, complete: Callable[[], T]) -> T:
    """In this thread, or in one of its own where this thread's loop is busy with whoever called us, a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return complete()
    return _in_thread(loop, complete)


def _in_thread(loop: asyncio.AbstractEventLoop, complete: Callable[[], T]) -> T:
    """In a thread of its own; an interrupt of this one cancels it, so that it ends where it next awaits."""
    found: list[T] = []
    raised: list[BaseException] = []

    def target() -> None:
        try:
            found.append(complete())
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
