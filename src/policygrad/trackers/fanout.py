"""Several trackers as one: what a run talks to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from policygrad.errors import ConfigError
from policygrad.trackers.base import RunInfo, Tracker


class Trackers(Tracker):
    """Calls each tracker in the order given: first those whose word must be on the disk before others show it.

    One that raises is closed and dropped, with a warning through the others and Python's `warnings`; the run goes on. What an
    essential one raises goes through, as do Ctrl-C and exit. `with Trackers(...)` closes all.

    Raises:
        ConfigError: something that is no tracker, such as a class in the place of an instance.
    """

    essential = True  # what it raises itself was raised by an essential one

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = list(trackers)
        for tracker in self._trackers:
            if not isinstance(tracker, Tracker):
                raise ConfigError(f"{tracker!r} is no tracker: pass instances of subclasses of policygrad.Tracker")

    def add(self, tracker: Tracker) -> None:
        """Puts it before all others: what it is told is on the disk when others show it."""
        self._trackers.insert(0, tracker)

    def start(self, info: RunInfo) -> None:
        self._each("start", lambda tracker: tracker.start(info))

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self._each("log", lambda tracker: tracker.log(step, metrics, completions))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each("log_evaluation", lambda tracker: tracker.log_evaluation(step, metrics))

    def note(self, text: str) -> None:
        self._each("note", lambda tracker: tracker.note(text))

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        self._each("phase", lambda tracker: tracker.phase(text, done, total))

    def finish(self, summary: Mapping[str, str]) -> None:
        self._each("finish", lambda tracker: tracker.finish(summary))

    def close(self) -> None:
        """Closes all, the last first, whatever one of them raises; an essential one's error is raised at the end."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(self._call, tracker, "close", lambda tracker: tracker.close())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(
                f"afterwards, closing what follows the run failed: {_said(failure)}"
            )  # the first error says more

    def _each(self, method: str, call: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            if any(tracker is other for other in self._trackers):  # not dropped meanwhile, by a note that failed
                self._call(tracker, method, call)

    def _call(self, tracker: Tracker, method: str, call: Callable[[Tracker], None]) -> None:
        try:
            call(tracker)
        except Exception as error:
            if tracker.essential:
                raise
            self._drop(tracker, f"{type(tracker).__name__}.{method} failed ({_said(error)})", closing=method == "close")

    def _drop(self, tracker: Tracker, failure: str, *, closing: bool) -> None:
        self._trackers = [other for other in self._trackers if other is not tracker]
        said = f"{failure}; the run goes on without this tracker"
        if not closing:
            try:
                tracker.close()
            except Exception as error:
                said += f", and closing it failed too ({_said(error)})"
        self.note(said)
        warnings.warn(said, stacklevel=2)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
