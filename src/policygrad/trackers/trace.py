"""`--track trace`: the spans of a run as a file that https://ui.perfetto.dev and chrome://tracing show.

The Trace Event Format's "JSON Array Format": an array with an event on each line, whose closing bracket may be missing, so that the
file of a killed run is shown too (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). A resumed run
goes on in the same file.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

from policygrad.errors import RunError
from policygrad.trackers.base import RunInfo, Tracker
from policygrad.trackers.registry import DEFAULT_TRACE_MIB
from policygrad.utils.filesystem import parse_json, read_lines
from policygrad.utils.span_recorder import MAX_LANES, SpanRecord, SpanRecorder
from policygrad.utils.spans import current_recorder

TRACE_FILE = "trace.json"
NUM_PARTS = 4
"""Parts that share the disk of a trace: the first, which shows the run's start, and the newest."""
MAX_ATTRIBUTE = 1000  # characters of a text
TRAINER = "trainer"  # the process of the training loop, which is rank 0 of several


class SpanTracker(Tracker):
    """Base class of trackers that receive a run's spans: while a run has one, spans are recorded. Override `write`."""

    records_spans: ClassVar[bool] = True
    _recorder: SpanRecorder | None = None

    def start(self, info: RunInfo) -> None:
        self._recorder = recorder = current_recorder()
        if recorder is not None:
            recorder.attach(self.write)

    def write(self, records: list[SpanRecord]) -> None:
        """Receive finished spans, from the thread in which the last of them ended."""

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Pass the step's spans on, and raise the error of an earlier `write`."""
        if self._recorder is not None:
            self._recorder.flush()
            self._recorder.raise_failure(self.write)

    def close(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.detach(self.write)
            recorder.raise_failure(self.write)


class TraceFile(SpanTracker):
    """Writes `trace.json` into the run's folder.

    A part of `mib`/4 that is full becomes `trace-1.json`, `trace-2.json` and so on. The first and the newest parts are kept; those
    between them are deleted, and the newest part says how many.
    """

    def __init__(self, mib: int = DEFAULT_TRACE_MIB) -> None:
        self._part_bytes = mib * 2**20 // NUM_PARTS
        self._file: FileIO | None = None

    def start(self, info: RunInfo) -> None:
        if info.folder is None:
            return
        self._path = info.folder / TRACE_FILE
        self._open()
        super().start(info)

    def write(self, records: list[SpanRecord]) -> None:
        events = list[dict[str, Any]]()
        for record in records:
            events += self._name_row(record)
            events.append(_span_event(record))
        self._append(events)

    def note(self, text: str) -> None:
        if self._file is not None:
            self._append([_instant_event(text)])

    def close(self) -> None:
        recorder = self._recorder
        super().close()
        if self._file is not None:
            if recorder is not None and recorder.num_dropped:
                text = f"{recorder.num_dropped} spans were not recorded, of more than {MAX_LANES} at the same time"
                self._append([_instant_event(text)])
            self._close_part()

    def _open(self) -> None:
        """Open a new file, or an earlier process's to go on in it."""
        self._named = {(1, 0)}  # processes and rows that were named
        size = _repair(self._path)
        self._file = self._path.open("ab", buffering=0)
        self._size = size
        if not size:
            self._write(b"[\n" + _encode(_metadata("process_name", 1, 0, name=TRAINER)))

    def _name_row(self, record: SpanRecord) -> list[dict[str, Any]]:
        """Return the events that name a span's process and row, unless they are named."""
        pid, tid = _row(record)
        events = []
        if (pid, 0) not in self._named:
            events.append(_metadata("process_name", pid, 0, name=record.process))
        if (pid, tid) not in self._named:
            name = record.track if not record.lane else f"{record.track} ({record.lane + 1})"
            events.append(_metadata("thread_name", pid, tid, name=name))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
        self._named |= {(pid, 0), (pid, tid)}
        return events

    def _append(self, events: Sequence[Mapping[str, Any]]) -> None:
        self._write(b"".join(b",\n" + _encode(event) for event in events))
        if self._size >= self._part_bytes:
            self._close_part()
            number = max((n for n, _ in _list_parts(self._path.parent)), default=0) + 1
            os.replace(self._path, self._path.with_name(f"trace-{number}.json"))
            middle = _list_parts(self._path.parent)[1 : 1 - (NUM_PARTS - 1)]
            for _, path in middle:
                path.unlink()
            self._open()
            if number > NUM_PARTS - 1:
                text = f"{number - NUM_PARTS + 1} parts of the trace after trace-1.json were deleted (--trace-mib)"
                self._write(b",\n" + _encode(_instant_event(text)))

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._size += len(data)
        unwritten = memoryview(data)
        while unwritten:  # an unbuffered file may accept only part of it
            unwritten = unwritten[self._file.write(unwritten) :]

    def _close_part(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.write(b"\n]\n")


def trace_files(folder: Path) -> list[Path]:
    """Return a run's trace files, oldest first; none if it was not traced."""
    newest = folder / TRACE_FILE
    return [path for _, path in _list_parts(folder)] + ([newest] if newest.is_file() else [])


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace file, without one that a killed process has written in part.

    Raises:
        RunError: The file cannot be read.
    """
    try:
        for line in read_lines(path):
            if (event := _parse_line(line)) is not None:
                yield event
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror or error}; delete it, or restore it from a copy"
        ) from error


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        event = parse_json(line.strip().removesuffix(b","))
    except ValueError:  # a bracket, a line that is not complete, or what no run has written
        return None
    return event if isinstance(event, dict) else None


def _list_parts(folder: Path) -> list[tuple[int, Path]]:
    """Return the number and path of the full parts, oldest first."""
    numbered = ((re.fullmatch(r"trace-(\d+)\.json", path.name), path) for path in folder.glob("trace-*.json"))
    return sorted((int(match[1]), path) for match, path in numbered if match)


def _repair(path: Path) -> int:
    """Remove the closing bracket and an incomplete last event, so that events can be appended; return the remaining bytes."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        end = start = file.seek(0, os.SEEK_END)
        tail = b""
        while start > 0:  # from the end, for the file may be large
            start = max(0, start - 65536)
            file.seek(start)
            tail = file.read(end - start)
            lines = tail.splitlines(keepends=True)[1 if start else 0 :]  # the first may be the end of a longer one
            if good := [line for line in lines if _parse_line(line) is not None]:
                at = tail.rindex(good[-1]) + len(good[-1].rstrip().removesuffix(b","))
                file.truncate(start + at)
                return start + at
        file.truncate(0)
    return 0


def _row(record: SpanRecord) -> tuple[int, int]:
    """Return the numbers of a span's process and row, which are the same in every process and after a resume."""
    rank = record.process.removeprefix("rank ")
    pid = 1 if record.process == TRAINER else 1 + int(rank) if rank.isdigit() else 1000 + _hash(record.process)
    return pid, (0 if record.track == "main" else (1 + _hash(record.track)) * MAX_LANES) + record.lane + 1


def _hash(text: str) -> int:
    return zlib.crc32(text.encode()) & 0xFFFFFF


def _span_event(record: SpanRecord) -> dict[str, Any]:
    pid, tid = _row(record)
    start, end = record.start // 1000, record.end // 1000  # both rounded down, so that a span stays within its parent
    event: dict[str, Any] = {"name": record.name, "cat": record.track, "ph": "X", "ts": start, "dur": end - start}
    event |= {"pid": pid, "tid": tid}
    if record.error:
        event["cname"] = "terrible"  # one of the format's reserved colours, red
    if arguments := dict(record.attributes) | ({"error": record.error} if record.error else {}):
        event["args"] = {name: _plain(value) for name, value in arguments.items()}
    return event


def _instant_event(text: str) -> dict[str, Any]:
    return {
        "name": text[:MAX_ATTRIBUTE],
        "cat": "note",
        "ph": "i",
        "s": "g",
        "ts": time.time_ns() // 1000,
        "pid": 1,
        "tid": 1,
    }


def _metadata(kind: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float) else str(value)[:MAX_ATTRIBUTE]


def _encode(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()
