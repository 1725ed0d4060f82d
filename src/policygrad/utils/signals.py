"""The signals that ask a process to stop, and their handlers."""

from __future__ import annotations

import signal
import sys
import threading
import time
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Ctrl-C, the signal of a scheduler, and that of a closed terminal, as far as the system has them."""
DUPLICATE_WINDOW_SECONDS = 0.5
"""Signals within this time count as one: `timeout`, shells, terminals and torchrun signal both a process and its group."""
_POLL_SECONDS = 0.01


class SignalHandlers:
    """A context manager in which `handler`, which may raise, handles these signals in the main thread; in other threads it changes
    nothing. Previous handlers are restored at the end. An ignored SIGHUP (nohup) stays ignored.

    A signal during an import is delivered after it: an exception inside one may be lost with the import lock, be replaced by
    another error (by a class's descriptor, or a package that imports its parts lazily), or leave a half-imported module. Imports
    that were running when the context started do not count, so that a program that is itself imported can be stopped. As an
    import that runs a user's program may take long, a second signal is delivered at once.
    """

    def __init__(
        self, handler: Callable[[int, FrameType | None], Any], numbers: Sequence[signal.Signals] = SIGNALS
    ) -> None:
        self._handler, self._numbers = handler, numbers
        self._previous: dict[signal.Signals, Any] = {}
        self._imports = 0
        self._deferred: dict[int, float] = {}  # signals that wait for an import, and since when
        # so that no signal is sent after the handlers are restored, which would kill the process
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._imports = _count_imports(sys._getframe())
        sighup = getattr(signal, "SIGHUP", None)
        with suppress(ValueError):  # not the main thread
            for number in self._numbers:
                if number != sighup or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            while self._previous:
                number, handler = self._previous.popitem()
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python

    @property
    def active(self) -> bool:
        """True if it handles any signal."""
        return bool(self._previous)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the main thread and wake it if it waits (not on Windows). Does nothing outside of the context."""
        main = threading.main_thread().ident
        with self._lock:
            if number not in self._previous or main is None:
                return
            if hasattr(signal, "pthread_kill"):
                signal.pthread_kill(main, number)
            else:
                interrupt_main(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_repeated = now - self._deferred.get(number, now) > DUPLICATE_WINDOW_SECONDS
        if _count_imports(frame) <= self._imports or is_repeated:
            self._deferred.pop(number, None)
            self._handler(number, frame)
        elif number not in self._deferred:
            self._deferred[number] = now
            # no threading.Thread: the interrupted code may hold its lock
            start_new_thread(self._deliver_after_import, (signal.Signals(number),))

    def _deliver_after_import(self, number: signal.Signals) -> None:
        main = threading.main_thread().ident or 0
        while number in self._deferred and self.active:
            time.sleep(_POLL_SECONDS)
            if _count_imports(sys._current_frames().get(main)) <= self._imports:
                # again and again: one that comes just before the thread begins to wait does not wake it
                self.send(number)


def _count_imports(frame: FrameType | None) -> int:
    """Count the frames of Python's import system on a stack."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith("<frozen importlib._bootstrap")
        frame = frame.f_back
    return count


@contextmanager
def defer_signals() -> Iterator[None]:
    """Deliver signals after the context, for a collective operation of several processes that must not be left halfway. A second
    signal, unless it is a duplicate, raises KeyboardInterrupt at once. Only the main thread is affected."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, float]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if received and time.monotonic() - received[0][1] > DUPLICATE_WINDOW_SECONDS:
            raise KeyboardInterrupt
        received.append((number, time.monotonic()))

    previous = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    try:
        for number in previous:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0][0])


def ignore_signals() -> None:
    """Ignore the signals from now on, in a process that another one stops: terminals and torchrun signal all of them."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
