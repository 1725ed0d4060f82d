"""The signals that ask a process to end, and who handles them."""

from __future__ import annotations

import signal
import sys
import threading
import time
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Ctrl-C, a scheduler's word, a terminal that has gone; as many of them as the system has."""
DUPLICATE_WINDOW_SECONDS = 0.5
"""Seconds in which signals are one: `timeout`, shells, terminals and torchrun send theirs to a process and to its group."""
_LOOKS = 0.01
"""Seconds between looks at whether an import is over."""


class SignalHandlers:
    """A context in which these signals call `handler`, which may raise, in the main thread; outside of that it changes nothing.
    What handled them before does so again afterwards. A SIGHUP that is ignored (nohup) stays ignored.

    A signal that lands in an import waits until that is over: what is raised in the midst of one may be lost with its lock, be made
    into another error (of a class's descriptor, of a package that imports its parts when they are asked for) or leave half a module
    behind. Imports that were under way at the beginning do not count: a program that is itself imported can be stopped, too. And an
    import may take long that runs somebody's program: the same signal once more is not kept waiting.
    """

    def __init__(
        self, handler: Callable[[int, FrameType | None], Any], numbers: Sequence[signal.Signals] = SIGNALS
    ) -> None:
        self._handler, self._numbers = handler, numbers
        self._before: dict[signal.Signals, Any] = {}
        self._imports = 0
        self._waiting: dict[int, float] = {}
        """Since when, of signals that wait for an import."""
        self._lock = threading.Lock()  # so that none is sent to who no longer handles it, which would end the process

    def __enter__(self) -> Self:
        self._imports = _imports(sys._getframe())
        hung_up = getattr(signal, "SIGHUP", None)
        with suppress(ValueError):  # not the main thread
            for number in self._numbers:
                if number != hung_up or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._come)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            while self._before:
                number, handler = self._before.popitem()
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set by other than Python

    @property
    def active(self) -> bool:
        """Whether it handles anything."""
        return bool(self._before)

    def send(self, number: signal.Signals) -> None:
        """From any thread to the main one, which it wakes if that is waiting (not on Windows); nothing once the context is over."""
        main = threading.main_thread().ident
        with self._lock:
            if number not in self._before or main is None:
                return
            if hasattr(signal, "pthread_kill"):
                signal.pthread_kill(main, number)
            else:
                interrupt_main(number)

    def _come(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if _imports(frame) <= self._imports or now - self._waiting.get(number, now) > DUPLICATE_WINDOW_SECONDS:
            self._waiting.pop(number, None)
            self._handler(number, frame)
        elif number not in self._waiting:
            self._waiting[number] = now
            start_new_thread(self._wait, (signal.Signals(number),))  # no Thread: its lock may be what was interrupted

    def _wait(self, number: signal.Signals) -> None:
        main = threading.main_thread().ident or 0
        while _imports(sys._current_frames().get(main)) > self._imports:
            time.sleep(_LOOKS)
        if self._waiting.pop(number, None) is not None:  # None: it did not wait
            self.send(number)


def _imports(frame: FrameType | None) -> int:
    """How many frames of Python's own importing are on this stack."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith("<frozen importlib._bootstrap")
        frame = frame.f_back
    return count
