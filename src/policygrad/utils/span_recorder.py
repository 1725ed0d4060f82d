"""Recording of spans: the finished ones of a process, with the thread and the row that each belongs to.

Viewers require that the spans of one row nest (https://perfetto.dev/docs/faq, "overlapping events"): concurrent ones of a track get
rows, called lanes here, of their own.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from policygrad.utils.spans import Span, current_span

MAX_LANES = 64
"""Concurrent spans of one track that are recorded; a thousand environments at work tell no more than 64 do."""
FLUSH_SECONDS = 1.0
"""A killed process loses at most the spans that ended within so many seconds, and those that had not ended."""
MAX_BUFFERED = 100_000
"""Finished spans that wait for a sink, or for rank 0; beyond it the newest are dropped, and counted."""


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One finished span."""

    name: str
    id: int  # 64 bits, unique
    parent: int  # id of the enclosing span; 0 = none
    root: int  # id of the outermost enclosing span, itself included
    start: int  # nanoseconds since 1970
    end: int
    process: str  # such as `trainer` or `rank 1`
    track: str  # name of the thread in which the outermost span began
    lane: int  # row of the track, from 0
    attributes: Mapping[str, Any]
    error: str = ""  # the exception that ended it, as `ValueError: text`


Sink = Callable[[list[SpanRecord]], None]
"""Receives finished spans, in the order in which they ended."""


class SpanRecorder:
    """Collects a process's finished spans and passes them on about once a second.

    Args:
        process: Name of this process in the trace.
        clock: Nanoseconds from any origin, ascending. Times are written as those of the wall clock, so that they can be compared
            between processes, but follow this clock after the start, so that a corrected wall clock turns no span around.
        wall: Nanoseconds since 1970.
    """

    def __init__(
        self,
        process: str = "trainer",
        clock: Callable[[], int] = time.perf_counter_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self.process, self.clock = process, clock
        self._offset = wall() - clock()
        self._lock = threading.RLock()  # a signal's handler may end spans while this thread holds it
        self._tracks = dict[str, Track]()
        self._finished = list[SpanRecord]()
        self._sinks = list[Sink]()
        self._failures = dict[Sink, Exception]()
        self._flushed = clock()
        self.num_dropped = 0
        """Spans that were not recorded: see `MAX_LANES` and `MAX_BUFFERED`."""

    def begin(self, span: Span) -> None:
        """Give a span its id, its track and its lane."""
        span.id = next(_ids) & _ID_MASK or 1
        with self._lock:
            if span.parent is None:
                name = threading.current_thread().name
                track = self._tracks.setdefault(name, Track("main" if name == "MainThread" else name))
            elif span.parent.track is None:
                return  # the spans within one that is not recorded are not either
            else:
                track = span.parent.track
            if (lane := track.choose_lane(span.parent)) is None:
                self.num_dropped += 1
                return
            track.lanes[lane].append(span)
            span.track, span.lane = track, lane

    def end(self, span: Span, error: str) -> None:
        """Record a span that has ended."""
        if (track := span.track) is None:
            return
        with self._lock:
            track.lanes[span.lane].remove(span)
            if len(self._finished) >= MAX_BUFFERED:
                self.num_dropped += 1
                return
            start, end = span.started + self._offset, span.ended + self._offset
            parent, root = 0 if span.parent is None else span.parent.id, span.root.id
            record = SpanRecord(
                *(span.name, span.id, parent, root, start, end, self.process, track.name, span.lane),
                *(span.attributes, error),
            )
            self._finished.append(record)
            if self._sinks and self.clock() - self._flushed >= FLUSH_SECONDS * 1e9:
                self.flush()

    def add(self, records: Iterable[SpanRecord]) -> None:
        """Add the spans of other processes, which belong to the current span of this one."""
        within = current_span()
        with self._lock:
            for record in records:
                if within is not None and within.id:
                    root, parent = within.root.id, record.parent or within.id
                    record = replace(record, root=root, parent=parent)
                self._finished.append(record)

    def take(self) -> list[SpanRecord]:
        """Return the finished spans that no sink has received, and forget them."""
        with self._lock:
            records, self._finished = self._finished, []
            return records

    def attach(self, sink: Sink) -> None:
        """Pass finished spans to a sink, with those that ended before there was any."""
        with self._lock:
            self._sinks.append(sink)
            self.flush()

    def detach(self, sink: Sink) -> None:
        """Pass what is left to a sink for the last time."""
        with self._lock:
            self.flush()
            self._sinks = [other for other in self._sinks if other != sink]

    def flush(self) -> None:
        """Pass finished spans on. A sink that raises an error gets no more; `raise_failure` raises the error."""
        with self._lock:
            self._flushed, records = self.clock(), self.take()
            for sink in tuple(self._sinks) if records else ():
                try:
                    sink(records)
                except Exception as error:  # the code that ends a span must not fail because of a full disk
                    self._failures[sink] = error
                    self._sinks.remove(sink)

    def raise_failure(self, sink: Sink) -> None:
        """Raise the error that a sink has raised, once."""
        if (error := self._failures.pop(sink, None)) is not None:
            raise error


@dataclass(eq=False)
class Track:
    """The rows of one thread: the open spans of each, outermost first."""

    name: str
    lanes: list[list[Span]] = field(default_factory=list)

    def choose_lane(self, parent: Span | None) -> int | None:
        """Return the lane for a span: its parent's if that has no other span open in it, else a free one; None if there is none."""
        if parent is not None and self.lanes[parent.lane] and self.lanes[parent.lane][-1] is parent:
            return parent.lane
        for number, open_spans in enumerate(self.lanes):
            if not open_spans:
                return number
        if len(self.lanes) == MAX_LANES:
            return None
        self.lanes.append([])
        return len(self.lanes) - 1


_ID_MASK = 2**64 - 1
_ids = itertools.count(secrets.randbits(64), 0x9E3779B97F4A7C15)  # spread over 64 bits: neighbours share no prefix


def _restart_ids() -> None:
    global _ids
    _ids = itertools.count(secrets.randbits(64), 0x9E3779B97F4A7C15)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_ids)
