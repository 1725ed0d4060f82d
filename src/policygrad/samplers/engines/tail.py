"""How long servers stand half empty: the time from nine tenths of the requests that run together to the last of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUANTILE = 0.9


class RequestTail:
    """Adds up the seconds in which nine tenths of the requests that overlap had ended and others had not.

    Requests overlap from one that begins where none runs to the moment at which none runs any more, whoever sent them: all
    completions of a rollout at once, or each episode its own, as programs do.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._seconds, self._running, self._ends = clock, 0.0, 0, list[float]()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Enclose a request."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._ends.append(self._clock())
            if not self._running:
                self._seconds += self._ends[-1] - self._ends[int(_QUANTILE * (len(self._ends) - 1))]
                self._ends.clear()

    def pop(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
