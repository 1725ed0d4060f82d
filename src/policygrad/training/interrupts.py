"""Stop a run resumably, whatever it is doing, on Ctrl-C, SIGTERM, SIGHUP or a time limit. A second Ctrl-C or SIGTERM ends it at
once.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

from policygrad.errors import ConfigError
from policygrad.utils.signals import DUPLICATE_WINDOW_SECONDS, SignalHandlers

STOP_MESSAGE = "stopping after this step, with a checkpoint (again: at once)"
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")


class StopRequested(KeyboardInterrupt):
    """The run ends now; the interrupted work can be repeated. Like KeyboardInterrupt, this is no `Exception`."""


class StopController:
    """A context in which signals set `requested`, and end `interruptible` work at once.

    The handler never prints through Python, since it may interrupt a print. Outside the main thread the context leaves the
    process's signal handlers alone.

    Args:
        time_limit: Seconds after which the run must have stopped and be saved; None = no limit.
    """

    def __init__(self, time_limit: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = False
        self.announced = False  # whether the terminal shows that the run is stopping
        self.time_limit, self._clock, self._started = time_limit, clock, clock()
        self._step_started, self._longest_step, self._first_signal = self._started, 0.0, 0.0
        self._interruptible, self._raised = False, False
        self._signals = SignalHandlers(self._on_signal)
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        self._signals.__enter__()
        if self.time_limit is not None and self._signals.active:
            remaining = max(0.0, self.time_limit - self._elapsed)
            self._timer = threading.Timer(min(remaining, threading.TIMEOUT_MAX), self._on_deadline)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._signals.__exit__(None, None, None)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Surround work that changes no state: a request to stop ends it at once, by StopRequested.

        If that exception is lost on its way out (Python drops what a finaliser raises) or a library turns it into another, the
        context raises it at its end.
        """
        if self.requested:
            raise StopRequested
        self._interruptible = True
        try:
            if self.requested:  # a signal came between the two lines above
                raise StopRequested
            yield
            if self._raised:
                raise StopRequested
        except Exception as error:
            if self._raised:
                raise StopRequested from error
            raise
        finally:
            self._interruptible = False

    def training_started(self) -> None:
        """Start timing the first step."""
        self._step_started = self._clock()

    def step_done(self) -> None:
        """Request a stop if another step, as long as the longest so far, would not be saved in time."""
        now = self._clock()
        self._longest_step, self._step_started = max(self._longest_step, now - self._step_started), now
        if self.time_limit is not None and self._elapsed + self._longest_step >= self.time_limit:
            self.requested = True

    @property
    def _elapsed(self) -> float:
        return self._clock() - self._started

    def _on_deadline(self) -> None:
        if not self.requested:  # this runs in the timer's thread; a signal reaches the main one
            self._signals.send(signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested:
            if number == getattr(signal, "SIGHUP", None) or now - self._first_signal < DUPLICATE_WINDOW_SECONDS:
                return
            raise KeyboardInterrupt
        self.requested, self._first_signal = True, now
        if self._interruptible:
            self._interruptible, self._raised = False, True
            raise StopRequested
        with suppress(OSError):
            if os.isatty(2):  # written past Python's streams, which the signal may have interrupted
                os.write(2, f"\n{STOP_MESSAGE}\n".encode())
                self.announced = True


def parse_duration(text: str, option: str) -> float:
    """Return the seconds in 1d12h, 23h50m, 45m or 90s. Raises ConfigError if the text is no such duration."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise ConfigError(f"{option} must be a time such as 23h50m, 45m, 90s or 1d12h, not {text!r}")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
