"""Run coroutines from synchronous code on one event loop, also inside a running loop (Jupyter)."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import cache
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class AsyncRunner:
    """Runs coroutines to completion in one loop, so that connections stay open between calls. Coroutines of several threads run
    concurrently: one of the threads runs the loop, and when its own coroutine is done, another one takes over.

    Ctrl-C acts at once, as in synchronous code: the loop leaves the signal to its handler.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()
        self._owner: threading.Thread | None = None  # the thread that runs the loop; None if none does
        self._pending = list[Future[Any]]()
        """Coroutines of other threads than the one that ran the loop when they were submitted."""

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, or raise its error."""
        with self._changed:
            loop = self._loop = self._loop or asyncio.new_event_loop()
            future: Future[T] | None = None
            if self._owner in (None, threading.current_thread()):
                self._owner = threading.current_thread()
            else:
                future = asyncio.run_coroutine_threadsafe(work, loop)
                self._pending.append(future)
                future.add_done_callback(self._notify)
        if future is not None:
            try:  # wait until it is done, or until no thread runs the loop and this one must
                with self._changed:
                    while not future.done() and self._owner is not None:
                        self._changed.wait()
                    if must_run := not future.done():
                        self._owner = threading.current_thread()
            except KeyboardInterrupt:
                future.cancel()
                raise
            if not must_run:
                return future.result()
            submitted = future

            async def await_submitted() -> T:
                return await asyncio.wrap_future(submitted)

            work = await_submitted()
        return _run_outside_loop(loop, lambda: self._complete(loop, work))

    def cancel(self) -> None:
        """Cancel all running coroutines: their callers get `asyncio.CancelledError`."""
        loop = self._loop
        if loop is not None and loop.is_running():
            _cancel_all(loop)

    def close(self) -> None:
        """Close the loop, unless an interrupted call is still in it. Closing twice is no error."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_running():
            _run_outside_loop(loop, lambda: loop.run_until_complete(loop.shutdown_asyncgens()))
            loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _complete(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
        """Run the loop until `work` is done. An interrupted call is cancelled, or it would continue during the next one."""
        task = loop.create_task(work)
        try:
            return loop.run_until_complete(task)
        except KeyboardInterrupt:
            if not task.done():
                task.cancel()
                loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            for future in self._pending:
                future.cancel()
            raise
        finally:
            with self._changed:
                self._pending = [future for future in self._pending if not future.done()]
                self._owner = None
                self._changed.notify_all()

    def _notify(self, done: object) -> None:
        with self._changed:
            self._changed.notify_all()


def _run_outside_loop(loop: asyncio.AbstractEventLoop, complete: Callable[[], T]) -> T:
    """Run the loop in this thread, or, if this thread already runs a loop (a notebook's), in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return complete()
    outcome, thread = start_thread(complete)
    try:
        thread.join()
    except KeyboardInterrupt:  # ends the work at its next await
        _cancel_all(loop)
        raise
    return outcome.result()


def start_thread(work: Callable[[], T], name: str | None = None) -> tuple[Future[T], threading.Thread]:
    """Start work in a daemon thread with as many threads of torch as this one; return its outcome and the thread."""
    outcome = Future[T]()
    outcome.set_running_or_notify_cancel()  # a cancelled caller does not cancel it

    def target() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=with_torch_threads(target), name=name, daemon=True)
    thread.start()
    return outcome, thread


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the current tasks from another thread; tasks that start later are not touched."""
    tasks = asyncio.all_tasks(loop)

    def cancel() -> None:
        for task in tasks:
            task.cancel()

    loop.call_soon_threadsafe(cancel)


def with_torch_threads(target: Callable[[], None]) -> Callable[[], None]:
    """Wrap the target of a new thread so that torch uses as many threads in it as in this one.

    OpenMP keeps that number per thread, and a new thread starts with the machine's: its products would be summed in another
    order, and would compete with concurrent work.
    """
    torch = sys.modules.get("torch")  # a reward worker may not have imported it
    if torch is None:
        return target
    threads = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(threads)
        target()

    return run


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results; the first error cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run blocking work in a thread that, once abandoned, prevents neither the loop nor the process from ending."""
    return asyncio.wrap_future(start_thread(work)[0])


# Connections that outlive the loop that uses them, and must be served while that loop does something else.


async def run_on_background_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop of all connections, and return its result; cancelling the caller cancels it."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, background_loop()))


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    """Start the loop of all connections, in a thread that runs as long as the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="connections").start()
    return loop


# Work that may raise anything, or never end.

_ABANDONED = set[asyncio.Future[Any]]()
"""Tasks that did not end when they were cancelled: a loop keeps no strong reference to them."""


class OverdueError(TimeoutError):
    """Work exceeded its time limit."""


class BlockedError(BaseException):
    """Raised by a signal handler inside work that blocks the event loop. No `Exception`, so that no retry catches it."""


async def await_with_timeout(timeout: float, work: Awaitable[T]) -> T:
    """Await work in its own task, for at most `timeout` seconds. Raises OverdueError if the work was not done in time.

    The caller is never blocked: work that ignores its cancellation is abandoned, whether it is overdue or the caller itself was
    cancelled. A `CancelledError` or `SystemExit` raised by the work becomes a RuntimeError, which ends nothing else."""
    task = asyncio.ensure_future(contain_exit(work))
    try:
        await asyncio.wait({task}, timeout=timeout)
    finally:
        if not task.done():
            _ABANDONED.add(task)
            task.add_done_callback(_discard)
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # no warning at exit, as in asyncio.gather
            task.cancel()
        else:
            _discard(task)
    if not task.done():
        raise OverdueError(f"not done within {timeout:g} seconds")
    if task.cancelled():
        raise RuntimeError("CancelledError")
    return task.result()


def _discard(task: asyncio.Future[Any]) -> None:
    _ABANDONED.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, or asyncio would report it


async def contain_exit(work: Awaitable[T]) -> T:
    """Await work, and turn its `SystemExit` into an `Exception`. Raises OverdueError if a signal has interrupted it,
    see `is_inside_contained`."""
    try:
        return await work
    except SystemExit as error:  # would leave the event loop
        raise RuntimeError(repr(error)) from error
    except BlockedError as error:
        raise OverdueError("it blocked the event loop") from error


def is_inside_contained(frame: FrameType | None) -> bool:
    """Return True if a signal at this frame arrived inside work that `contain_exit` awaits, where a BlockedError may be raised."""
    if frame is None or frame.f_code is contain_exit.__code__:
        return False
    while frame is not None and frame.f_code is not contain_exit.__code__:
        frame = frame.f_back
    return frame is not None
