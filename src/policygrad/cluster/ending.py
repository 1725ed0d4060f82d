"""What asks a run on a cluster to end, at the command that has begun it."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Self

from policygrad.signals import AGAIN, Handling


class Ending:
    """A context in which Ctrl-C, SIGTERM (`ray job stop`) and SIGHUP set `asked`; a second Ctrl-C or SIGTERM ends the command at
    once, and so does the first as long as nothing has `begun`. Signals within half a second are one, as they are to a run on one
    machine. A SIGHUP that is ignored (nohup) stays ignored, and outside of the main thread nothing changes."""

    def __init__(self) -> None:
        self.asked, self.begun = False, False
        self._first = 0.0
        self._signals = Handling(self._come)

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._signals.__exit__(kind, error, at)

    def _come(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and (number == getattr(signal, "SIGHUP", None) or now - self._first < AGAIN):
            return
        if self.asked or not self.begun:
            raise KeyboardInterrupt
        self.asked, self._first = True, now
