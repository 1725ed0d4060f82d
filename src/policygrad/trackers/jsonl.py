"""A run's JSON lines: `metrics.jsonl`, one object per step, and `completions.jsonl`, one object per completion.

Each step is flushed to the operating system, so a killed process loses at most the line it was writing; `sync` waits for
the disk. Call it before a checkpoint is saved, so that after a power cut the files hold every step the checkpoint has.
Non-finite numbers are written as null: JSON has none, and a strict reader would refuse the whole line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from policygrad.errors import RunError
from policygrad.trackers.base import Tracker
from policygrad.utils.filesystem import UnusableDataError, parse_json, read_lines

METRICS, COMPLETIONS = "metrics.jsonl", "completions.jsonl"


class JsonlTracker(Tracker):
    """Appends to the two files of one run's folder; one process at a time. A torn last line is repaired on opening."""

    essential = True

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        with convert_write_errors(self.folder, self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files = {name: _open(self.folder / name) for name in (METRICS, COMPLETIONS)}

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self.append_metrics(step, metrics)
        self.append_completions(step, completions)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.append_metrics(step, metrics)

    def append_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append `{"step": step, "reward": ...}`. Raises TypeError for what JSON lacks, RunError when it cannot write."""
        self._append(METRICS, [_line(step, values, METRICS)])

    def append_completions(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append one object per completion: prompt, completion, reward, parts, advantage, truncated and so on."""
        self._append(COMPLETIONS, [_line(step, row, COMPLETIONS) for row in rows])

    def truncate_after(self, step: int) -> int:
        """Drop the lines of later steps, and unreadable ones, so that a resumed run's files equal an unbroken run's.

        Each file is replaced at once or not at all. Returns how many lines went. Raises RunError.
        """
        with convert_write_errors(self.folder, self.folder):
            return sum(self._rewrite(name, step) for name in self._files)

    def history(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric so far, without the steps that lack it; a tracker draws its curve from this."""
        rows = (row for _, row in read_rows(self.folder / METRICS) if row is not None)
        return [(row["step"], float(row[name])) for row in rows if isinstance(row.get(name), int | float)]

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        with convert_write_errors(self.folder, self.folder):
            for file in self._files.values():
                os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _append(self, name: str, lines: list[bytes]) -> None:
        with convert_write_errors(self.folder / name, self.folder):
            left = memoryview(b"".join(lines))
            while left:  # a file without a buffer may take a part of it
                left = left[self._files[name].write(left) :]

    def _rewrite(self, name: str, step: int) -> int:
        path, temporary = self.folder / name, self.folder / f".{name}.tmp"
        dropped = sum(1 for _, row in read_rows(path) if row is None or row["step"] > step)
        if not dropped:
            return 0
        with temporary.open("wb") as file:
            file.writelines(line for line, row in read_rows(path) if row is not None and row["step"] <= step)
            file.flush()
            os.fsync(file.fileno())
        self._files[name].close()
        os.replace(temporary, path)
        self._files[name] = path.open("ab", buffering=0)
        return dropped


@contextmanager
def convert_write_errors(path: Path, run: Path) -> Iterator[None]:
    """What the operating system refuses of a file or folder of a run is a RunError that names it."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}; see to it, then --resume {run} goes on"
        raise RunError(f"{error.filename or path} cannot be written: {reason}") from error


def _open(path: Path) -> FileIO:
    """Open to append, after a torn last line is cut off, or ended when only its newline is missing."""
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
    return path.open("ab", buffering=0)  # what a full disk has refused is not tried again when it is closed


def read_rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line and its object; None for a line that is not an object with a step, such as one that is being written.

    Raises:
        OSError: the file cannot be read, is no regular file, or has a line without an end.
        RunError: a line that is well formed and cannot be used; with its number.
    """
    for number, line in enumerate(read_lines(path), 1):
        yield line, _usable(line, path, f", line {number}")


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse an object with a step; None for anything else. Raises Unusable for numbers or nesting that no reader can hold."""
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


def _line(step: int, values: Mapping[str, Any], name: str) -> bytes:
    row = {"step": step} | {str(key): _plain(value, f"{name}: {key!r}") for key, value in values.items()}
    try:
        return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 has no bytes for
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
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a JSON line cannot hold: pass plain numbers or strings"
    )
