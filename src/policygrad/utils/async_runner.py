"""From code that calls to code that awaits: one event loop for many calls, also below somebody else's (a notebook's); and
threads that compute as the one that starts them.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
_LEFT = set[asyncio.Future[Any]]()
"""Tasks that did not end when they were cancelled: a loop has no strong reference to them."""


class OverdueError(TimeoutError):
    """Work that was not over within its seconds."""


class BlockedError(BaseException):
    """Raised by a signal inside of work that blocks the event loop; no `Exception`, so that no retry in there catches it."""


async def await_with_timeout(timeout: float, work: Awaitable[T]) -> T:
    """Await work in a task of its own, for so many seconds at most.

    The caller is never held up: work that ignores its cancellation is left behind, whether it is overdue or the caller itself was
    cancelled. A `CancelledError` or `SystemExit` that the work raises by itself becomes a RuntimeError, which ends nothing else.

    Raises:
        OverdueError: it was not over in time.
    """
    task = asyncio.ensure_future(contain_exit(work))
    try:
        await asyncio.wait({task}, timeout=timeout)
    finally:
        if not task.done():
            _LEFT.add(task)
            task.add_done_callback(_forget)
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # no warning at exit, as asyncio.gather does it
            task.cancel()
        else:
            _forget(task)
    if not task.done():
        raise OverdueError(f"not over within {timeout:g} seconds")
    if task.cancelled():
        raise RuntimeError("CancelledError")
    return task.result()


async def contain_exit(work: Awaitable[T]) -> T:
    """Await work that may raise anything, so that its `SystemExit` is an `Exception`.

    Raises:
        OverdueError: a signal has interrupted it, see `interrupts`.
    """
    try:
        return await work
    except SystemExit as error:  # which asyncio would carry out of the loop
        raise RuntimeError(repr(error)) from error
    except BlockedError as error:
        raise OverdueError("it blocked the event loop") from error


def is_inside_contained(frame: FrameType | None) -> bool:
    """Whether a signal that came at this frame came inside of work that `contained` awaits, where a BlockedError may be raised."""
    if frame is None or frame.f_code is contain_exit.__code__:
        return False
    while frame is not None and frame.f_code is not contain_exit.__code__:
        frame = frame.f_back
    return frame is not None


def _forget(task: asyncio.Future[Any]) -> None:
    _LEFT.discard(task)
    if not task.cancelled():
        task.exception()  # else asyncio reports that nobody has read it


class AsyncRunner:
    """Runs coroutines to their end in one loop, so that an engine's connections stay open between them. What several threads bring
    runs side by side: the loop is run by one of them, and when its own is over, by another whose is not.

    Ctrl-C acts at once, as it does in code that does not await: the loop leaves the signal to whoever handles it.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()
        self._host: object = None
        """The thread whose call the loop runs for; None = nothing is going on."""
        self._guests = list[Future[Any]]()

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; what it raises is raised here."""
        with self._changed:
            loop = self._loop = self._loop or asyncio.new_event_loop()
            guest = None
            if self._host in (None, threading.current_thread()):
                self._host = threading.current_thread()
            else:
                guest = asyncio.run_coroutine_threadsafe(work, loop)
                self._guests.append(guest)
                guest.add_done_callback(self._tell)
        if guest is not None:
            if not self._takes_over(guest):
                return guest.result()
            work = _brought(guest)
        return _beside(loop, lambda: self._complete(loop, work))

    def cancel(self) -> None:
        """Whoever waits for anything gets `asyncio.CancelledError`."""
        loop = self._loop
        if loop is not None and loop.is_running():
            _cancel_all(loop)

    def _takes_over(self, guest: Future[Any]) -> bool:
        """Waits until it is done, or nobody runs the loop any more: whether this thread has to."""
        try:
            with self._changed:
                while not guest.done() and self._host is not None:
                    self._changed.wait()
                if not guest.done():
                    self._host = threading.current_thread()
                    return True
        except KeyboardInterrupt:
            guest.cancel()
            raise
        return False

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
            with self._changed:
                self._guests = [guest for guest in self._guests if not guest.done()]
                self._host = None
                self._changed.notify_all()

    def _tell(self, done: object = None) -> None:
        """Those that wait look again."""
        with self._changed:
            self._changed.notify_all()

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


async def _brought(guest: Future[T]) -> T:
    """What another thread has put into this loop, for that thread to run the loop for."""
    return await asyncio.wrap_future(guest)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """From another thread. What there is now: the loop may be at its end, and what it runs next is nobody's to cancel."""
    tasks = asyncio.all_tasks(loop)

    def cancel() -> None:
        for task in tasks:
            task.cancel()

    loop.call_soon_threadsafe(cancel)


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

    thread = threading.Thread(target=with_torch_threads(target), daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        _cancel_all(loop)
        raise
    if raised:
        raise raised[0]
    return found[0]


def with_torch_threads(target: Callable[[], None]) -> Callable[[], None]:
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
