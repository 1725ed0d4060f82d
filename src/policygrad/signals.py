"""The signals that ask a process to end, and when a handler may raise."""

from __future__ import annotations

import signal
import sys
import threading
import time
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Ctrl-C, a scheduler's word, a terminal that has gone; as many of them as the system has."""
AGAIN = 0.5
"""Seconds in which signals are one: `timeout`, shells, terminals and torchrun send theirs to a process and to its group."""
_LOOKS = 0.01
"""Seconds between looks at whether an import is over."""

Handler = Callable[[int, FrameType | None], Any]


def after_imports(handler: Handler) -> Handler:
    """A handler that may raise, called when the import is over that a signal lands in, if it lands in one.

    What is raised in the midst of an import may be lost with the import's lock, be made into another error (of a class's
    descriptor, of a package that imports its parts when they are asked for) or leave half a module behind. An import that was
    under way when this was called does not count: a program that is itself imported can be stopped, too. An import may take long
    that runs somebody's program: the same signal once more is not kept waiting.
    """
    before = _imports(sys._getframe())
    waiting = dict[int, float]()

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if _imports(frame) <= before or now - waiting.get(number, now) > AGAIN:
            waiting.pop(number, None)
            handler(number, frame)
        elif number not in waiting:
            waiting[number] = now
            start_new_thread(wait, (number,))  # no Thread: its lock may be what was interrupted

    def wait(number: int) -> None:
        main = threading.main_thread().ident or 0
        while _imports(sys._current_frames().get(main)) > before:
            time.sleep(_LOOKS)
        if waiting.pop(number, None) is not None:  # None: it did not wait
            send(number)

    return handle


def _imports(frame: FrameType | None) -> int:
    """How many frames of Python's own importing are on this stack."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith("<frozen importlib._bootstrap")
        frame = frame.f_back
    return count


def send(number: int) -> None:
    """From any thread to the main one, which it wakes if it is waiting (not on Windows); nothing where nobody handles it."""
    main = threading.main_thread().ident
    if main is None or not callable(signal.getsignal(number)):
        return
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, number)
    else:
        interrupt_main(signal.Signals(number))
