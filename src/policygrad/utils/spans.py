"""Spans: where the time of a run goes. `with span("rollout", step=3):` measures a block, and records it while a trace is on.

A `SpanRecorder` is on between `start_recording` and `stop_recording`; without one a span reads a clock twice and does nothing else.
Spans nest by context, so that those of threads and of asyncio tasks do not mix.
"""

from __future__ import annotations

import time
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from policygrad.utils.span_recorder import SpanRecorder, Track


class Span:
    """A measured block. `seconds` is its duration once it has ended, whether or not it is recorded."""

    __slots__ = ("_recorder", "_token", "attributes", "ended", "id", "lane", "name", "parent", "started", "track")

    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        self.name, self.attributes = name, attributes
        self.started = self.ended = self.id = 0
        self.parent: Span | None = None
        self.track: Track | None = None  # None = it is not recorded
        self.lane = 0

    @property
    def seconds(self) -> float:
        return (self.ended - self.started) / 1e9

    @property
    def root(self) -> Span:
        """The outermost span around this one, or itself."""
        at = self
        while at.parent is not None:
            at = at.parent
        return at

    def set(self, **attributes: Any) -> None:
        """Add attributes that are known only now."""
        self.attributes |= attributes

    def __enter__(self) -> Self:
        self._recorder = recorder = _recorder
        if recorder is None:
            self.started = time.perf_counter_ns()
            return self
        self.parent = _current.get()
        self._token: Token[Span | None] = _current.set(self)
        recorder.begin(self)
        # a viewer sorts by microseconds, and shows a span that begins in the same one as its parent outside of it
        earliest = 0 if self.parent is None else self.parent.started + 1000
        self.started = max(recorder.clock(), earliest)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        recorder = self._recorder
        self.ended = time.perf_counter_ns() if recorder is None else max(recorder.clock(), self.started)
        if recorder is not None:
            _current.reset(self._token)
            recorder.end(self, "" if error is None else f"{type(error).__name__}: {error}"[:500])


def span(name: str, **attributes: Any) -> Span:
    """Return a context manager that measures its block."""
    return Span(name, attributes)


def is_recording() -> bool:
    """Return whether spans are recorded, for callers whose attributes take work to compute."""
    return _recorder is not None


def start_recording(recorder: SpanRecorder) -> SpanRecorder:
    """Record the spans that begin from now on, of all threads."""
    global _recorder
    _recorder = recorder
    return recorder


def stop_recording() -> None:
    """Record no more spans; those that have begun are still recorded when they end."""
    global _recorder
    _recorder = None


def current_span() -> Span | None:
    """Return the innermost open span of this context, if spans are recorded."""
    return _current.get()


def current_recorder() -> SpanRecorder | None:
    """Return the recorder that is on."""
    return _recorder


_recorder: SpanRecorder | None = None
_current: ContextVar[Span | None] = ContextVar("span", default=None)
