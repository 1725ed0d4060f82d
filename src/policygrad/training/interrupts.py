"""Ctrl-C, SIGTERM, SIGHUP and a time limit end a run resumably, in whatever phase it is; a second Ctrl-C or SIGTERM at once."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Self

from policygrad.errors import ConfigError
from policygrad.utils.signals import DUPLICATE_WINDOW_SECONDS, SignalHandlers

STOP_MESSAGE = "stopping after this step, with a checkpoint (again: at once)"
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")


class StopRequested(KeyboardInterrupt):
    """What is under way can be done again, and the run ends now. As Ctrl-C is, it is no `Exception`."""


class StopController:
    """A context in which the signals set `asked`, and end at once what is `breakable`. Its handler prints nothing through Python:
    whatever it interrupts may be printing.

    Outside of the main thread it changes nothing: whoever runs us there keeps their handlers. within: seconds after which the run
    is to be over, saved; None = any.
    """

    def __init__(self, within: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = False
        self.time_limit, self._clock, self._began = within, clock, clock()
        self._step, self._longest, self._first = self._began, 0.0, 0.0
        self._breakable, self._raised = False, False
        self._signals = SignalHandlers(self._stop)
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        self._signals.__enter__()
        if self.time_limit is not None and self._signals.active:
            left = max(0.0, self.time_limit - self._spent)
            self._timer = threading.Timer(min(left, threading.TIMEOUT_MAX), self._time_is_up)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._signals.__exit__(kind, error, at)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """What is done inside changes nothing that is kept: a request ends it at once, by `StopRequested`. A `StopRequested` that is lost on its way
        out (Python drops what is raised in a finaliser) ends it here, and so does what a library has made of it."""
        if self.requested:
            raise StopRequested
        self._breakable = True
        try:
            if self.requested:  # meanwhile
                raise StopRequested
            yield
            if self._raised:
                raise StopRequested
        except Exception as error:
            if self._raised:
                raise StopRequested from error
            raise
        finally:
            self._breakable = False

    def step_done(self) -> None:
        """A step is over: asks for the end where another as long as the longest so far would not be saved in time."""
        now = self._clock()
        self._longest, self._step = max(self._longest, now - self._step), now
        if self.time_limit is not None and self._spent + self._longest >= self.time_limit:
            self.requested = True

    def training_started(self) -> None:
        """What came before is no step."""
        self._step = self._clock()

    @property
    def _spent(self) -> float:
        return self._clock() - self._began

    def _time_is_up(self) -> None:
        if not self.requested:  # in the timer's thread; this has the main one do what it does for a signal
            self._signals.send(signal.SIGTERM)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested:
            if number == getattr(signal, "SIGHUP", None) or now - self._first < DUPLICATE_WINDOW_SECONDS:
                return
            raise KeyboardInterrupt
        self.requested, self._first = True, now
        if self._breakable:
            self._breakable, self._raised = False, True
            raise StopRequested
        with suppress(OSError):
            if os.isatty(2):  # past Python's own streams, which may be in use at this very moment
                os.write(2, f"\n{STOP_MESSAGE}\n".encode())


def parse_duration(text: str, option: str) -> float:
    """1d12h, 23h50m, 45m, 90s in seconds.

    Raises:
        ConfigError: anything else.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        raise ConfigError(f"{option} must be a time such as 23h50m, 45m, 90s or 1d12h, not {text!r}")
    days, hours, minutes, rest = (float(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
