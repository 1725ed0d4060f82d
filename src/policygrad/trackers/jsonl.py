"""A run's JSON lines: `metrics.jsonl`, one object per step, `completions.jsonl`, one per completion, and `notes.jsonl`, one for
each step at which the run noted something.

Each step is flushed to the operating system, so that a killed process loses at most the line it was writing. `sync` waits for the
disk: call it before saving a checkpoint, so that after a power cut the files have every step of the checkpoint. Non-finite
numbers are written as null, since JSON has none.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from policygrad.errors import RunError
from policygrad.trackers.base import Tracker
from policygrad.utils.filesystem import (
    UnusableDataError,
    iter_lines_backwards,
    open_regular,
    parse_json,
    read_lines,
)

METRICS, COMPLETIONS, NOTES = "metrics.jsonl", "completions.jsonl", "notes.jsonl"
THUMBNAILS = "pictures"  # folder of small copies of the prompts' pictures, by digest


class JsonlTracker(Tracker):
    """Appends to the three files in a run's folder, from one process at a time. Opening repairs an incomplete last line."""

    essential = True

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        with convert_write_errors(self.folder, self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files = {name: _open(self.folder / name) for name in (METRICS, COMPLETIONS, NOTES)}
        self._noted: dict[str, int] = {}
        """Kind of a note -> the last step that has one."""

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self.append_metrics(step, metrics)
        self.append_completions(step, completions)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.append_metrics(step, metrics)

    def append_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append `{"step": step, "reward": ...}`. Raises TypeError for values JSON cannot hold, RunError if writing fails."""
        self._append(METRICS, [format_row(step, values, METRICS)])

    def append_completions(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append one object per completion: prompt, completion, reward, parts, advantage, truncated and so on."""
        self._append(COMPLETIONS, [format_row(step, row, COMPLETIONS) for row in rows])

    def append_note(self, step: int, text: str, kind: str, once: bool = False) -> None:
        """Append `{"step": step, "kind": kind, "text": text}`: of each kind one for a step.

        once: Only the run's first note of this kind, as for what is noted whenever a process starts.
        """
        kind = name_kind(kind)
        if step > self._noted.get(kind, -1) and not (once and kind in self._noted):
            self._noted[kind] = step
            self._append(NOTES, [format_row(step, {"kind": kind, "text": _NAMED_STEP.sub("", text)}, NOTES)])

    def truncate_after(self, step: int) -> int:
        """Drop the lines of later steps, so that a resumed run's files equal those of an uninterrupted run.

        Lines of metrics and notes that cannot be read are dropped too, and these files are replaced atomically. Completions,
        which may be hundreds of megabytes, are read from their end, up to the last line that stays. Returns the number of lines
        dropped. Raises RunError.
        """
        with convert_write_errors(self.folder, self.folder):
            dropped = self._drop_rows(METRICS, step) + self._drop_rows(NOTES, step) + self._drop_completions(step)
        rows = (row for _, row in read_rows(self.folder / NOTES) if row is not None)
        self._noted = {str(row.get("kind")): row["step"] for row in rows}
        return dropped

    def _drop_rows(self, name: str, step: int) -> int:
        path, temporary = self.folder / name, self.folder / f".{name}.tmp"
        dropped = sum(1 for _, row in read_rows(path) if row is None or row["step"] > step)
        if dropped:
            with temporary.open("wb") as file:
                file.writelines(line for line, row in read_rows(path) if row is not None and row["step"] <= step)
                file.flush()
                os.fsync(file.fileno())
            self._files[name].close()
            os.replace(temporary, path)
            self._files[name] = path.open("ab", buffering=0)
        return dropped

    def _drop_completions(self, step: int) -> int:
        path, dropped = self.folder / COMPLETIONS, 0
        with open_regular(path) as file:
            end = file.seek(0, os.SEEK_END)
            for offset, line in iter_lines_backwards(file):
                row = _usable(line, path, f", the line at byte {offset}")
                if row is not None and row["step"] <= step:
                    break
                end, dropped = offset, dropped + 1
        if dropped:
            self._files[COMPLETIONS].truncate(end)
            os.fsync(self._files[COMPLETIONS].fileno())
        return dropped

    def history(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of one metric, for the steps that have it."""
        rows = (row for _, row in read_rows(self.folder / METRICS) if row is not None)
        return [(row["step"], float(row[name])) for row in rows if isinstance(row.get(name), int | float)]

    def sync(self) -> None:
        """Wait until everything is written to disk."""
        with convert_write_errors(self.folder, self.folder):
            for file in self._files.values():
                os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _append(self, name: str, lines: list[bytes]) -> None:
        with convert_write_errors(self.folder / name, self.folder):
            unwritten = memoryview(b"".join(lines))
            while unwritten:  # an unbuffered file may accept only part of it
                unwritten = unwritten[self._files[name].write(unwritten) :]


_NAMED_STEP = re.compile(r"^step \d+: ")
_NUMBER = re.compile(r"\d[\d.,]*(e[+-]?\d+)?")


def name_kind(text: str) -> str:
    """Return the kind of a note: notes that differ in their numbers alone are of one."""
    return _NUMBER.sub("#", _NAMED_STEP.sub("", text))


@dataclass(frozen=True)
class RunNote:
    """What a run noted, once or at several steps."""

    text: str
    """As it was noted last."""
    count: int
    """Number of steps with a note of this kind."""
    last_step: int
    """0 = before the first step."""

    def describe(self) -> str:
        """Return the note with how often there was one and the last step."""
        place = f"at step {self.last_step}" if self.last_step else "before the first step"
        return f"{self.text} ({place if self.count == 1 else f'{self.count} times, last {place}'})"


def summarise_notes(rows: Iterable[Mapping[str, Any]]) -> tuple[RunNote, ...]:
    """Return one note of each kind in rows of `notes.jsonl`, the most frequent first."""
    by_kind: dict[str, RunNote] = {}
    for row in rows:
        kind, text = str(row.get("kind", "")), str(row.get("text", ""))
        before = by_kind.get(kind)
        by_kind[kind] = RunNote(text, 1 if before is None else before.count + 1, int(row["step"]))
    return tuple(sorted(by_kind.values(), key=lambda note: (-note.count, -note.last_step)))


@contextmanager
def convert_write_errors(path: Path, run: Path) -> Iterator[None]:
    """Convert an OSError into a RunError that names the file."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}; fix this, then continue with --resume {run}"
        raise RunError(f"{error.filename or path} cannot be written: {reason}") from error


def _open(path: Path) -> FileIO:
    """Open for appending, after removing an incomplete last line, or adding its missing newline."""
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        start, tail = end, b""
        while start > 0 and b"\n" not in tail:  # from the end, for the file may be large
            start = max(0, start - 65536)
            file.seek(start)
            tail = file.read(end - start)
        last = tail[tail.rfind(b"\n") + 1 :]
        if last and _usable(last, path) is None:
            file.truncate(end - len(last))
        elif last:
            file.write(b"\n")
    return path.open("ab", buffering=0)  # unbuffered: closing must not retry a write that a full disk rejected


def read_rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line and its object, or None for a line that is not an object with a step, such as one being written.

    Raises:
        OSError: The file cannot be read, is not a regular file, or has a line without an end.
        RunError: A line is valid JSON but cannot be used; the message has its number.
    """
    for number, line in enumerate(read_lines(path), 1):
        yield line, _usable(line, path, f", line {number}")


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse an object with a step; return None for anything else. Raises Unusable for numbers or nesting beyond all limits."""
    try:
        row = parse_json(line)
    except UnusableDataError:
        raise
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _usable(line: bytes, path: Path, place: str = "") -> dict[str, Any] | None:
    try:
        return parse_row(line)
    except UnusableDataError as error:
        raise RunError(f"{path}{place}: {error}: delete the line, or put a copy of the file back") from error


def format_row(step: int, values: Mapping[str, Any], name: str) -> bytes:
    """Return one line of a log, with a newline. Raises TypeError for values JSON cannot hold."""
    row = {"step": step} | {str(key): _plain(value, f"{name}: {key!r}") for key, value in values.items()}
    try:
        return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot encode
        return (json.dumps(row, allow_nan=False) + "\n").encode()


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if getattr(value, "ndim", None) == 0:  # a number of torch's or numpy's
        return _plain(value.item(), where)
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold: pass plain numbers or strings")
