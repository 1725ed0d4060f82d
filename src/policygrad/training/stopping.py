"""Ctrl-C and SIGTERM end a run after the step at hand; a second one ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Stopping:
    """A context in which the two signals set `asked`; `tell` hears the words for the user.

    Outside of the main thread it changes nothing: whoever runs us there keeps their handlers.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.asked = False
        self._tell = tell
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        try:
            self._before = {s: signal.signal(s, self._stop) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread
            self._before = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for s, handler in self._before.items():
            signal.signal(s, signal.SIG_DFL if handler is None else handler)  # None: set by other than Python

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._tell("stopping after this step, with a checkpoint (again: at once)")
