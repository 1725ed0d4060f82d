"""Rows by number, wherever they are: what a name of data stands for. Each is read when it is asked for."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from policygrad.errors import DataError
from policygrad.tasks.jsonl import JsonLines
from policygrad.tasks.spec import weighted

HUB = "hf:"
TABLES = (".parquet", ".arrow", ".feather")
Row = tuple[str, Mapping[str, Any]]
"""(where it stands, for messages; its columns)."""


class Source(Protocol):
    """Rows that stay where they are."""

    @property
    def held(self) -> bool:
        """Whether it is small enough for its rows to be kept in memory."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """A row. Raises DataError, with where it stands, for one that cannot be read."""
        ...


def is_source(name: str) -> bool:
    """Whether a name is one of data: a file or folder that is there, a hub id behind `hf:`, or what ends like such a file."""
    return name.startswith(HUB) or name.endswith((".jsonl", ".jsonl.gz", *TABLES)) or _there(name)


def mixture(name: str) -> tuple[tuple[float, str], ...]:
    """(weight, name) of the parts of a mix of data, `0.7*a.jsonl+0.3*b.jsonl`; () = it is none. A `+` in the name of a file that is
    there joins nothing.

    Raises:
        DataError: a weight that is not above 0, or a part that is no data.
    """
    pieces = name.split("+")
    if len(pieces) < 2 or _there(name):
        return ()
    parts, first = list[tuple[float, str]](), 0
    while first < len(pieces):
        joined = {end: weighted("+".join(pieces[first:end]), name) for end in range(len(pieces), first, -1)}
        end = next((end for end, (_, part) in joined.items() if _there(part.strip())), first + 1)
        parts.append((joined[end][0], joined[end][1].strip()))
        first = end
    if not any(is_source(part) or _turned(part) for _, part in parts):
        return ()
    for _, part in parts:
        _check_data(part, name)
    return tuple(parts)


def _turned(part: str) -> re.Match[str] | None:
    """`a.jsonl*0.7`, in which the weight stands behind."""
    found = re.fullmatch(r"(.+?)\s*\*\s*([\d.]+)", part)
    return found if found and is_source(found[1]) else None


def _check_data(part: str, whole: str) -> None:
    if is_source(part):
        return
    behind = _turned(part)
    hint = f"a weight stands before its part, {behind[2]}*{behind[1]}" if behind else "data is mixed with data"
    raise DataError(
        f"task {whole!r}: its part {part!r} is no data: {hint}; a part is a file (.jsonl, .parquet, .arrow), a folder of "
        "`datasets`, or hf:REPOSITORY"
    )


def open_source(name: str, example: str) -> Source:
    """The data of that name; `example` is a row as it should be.

    Raises:
        DataError: what is not there or cannot be read, or holds no rows.
    """
    if name.startswith(HUB) or _folder(name):
        from policygrad.tasks.hub import load

        return Table(load(name), name)
    if name.endswith(TABLES):
        from policygrad.tasks.arrow import read

        return Table(read(name), name)
    return JsonLines(name, example)


class Columns(Protocol):
    """Rows of a library's own, by the slice."""

    def __len__(self) -> int: ...

    def rows(self, start: int, end: int) -> list[dict[str, Any]]:
        """The rows from `start` up to `end`, as Python's own values."""
        ...


class Table:
    """Rows of a table on the disk, of which a block at a time is read."""

    held = False
    BLOCK = 64
    """Rows read together: in order, each block once."""

    def __init__(self, columns: Columns, name: str) -> None:
        if not len(columns):
            raise DataError(f"{name}: no rows")
        self.columns, self.name = columns, name
        self._block = lru_cache(maxsize=4)(self._read)

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, index: int) -> Row:
        block, place = divmod(index, self.BLOCK)
        return f"{self.name}, row {index + 1}", self._block(block)[place]

    def _read(self, block: int) -> list[dict[str, Any]]:
        start = block * self.BLOCK
        return self.columns.rows(start, min(start + self.BLOCK, len(self)))


def digest(name: object, within: str | None = None) -> str | None:
    """What tells whether data has changed: of a file or a folder its bytes', of a data set of the hub its fingerprint, of a mix
    those of its parts with their names; None of what is none of these. within: a folder from which on parts are called."""
    if not isinstance(name, str):
        return None
    if parts := mixture(name):
        above = os.path.join(Path(within).resolve(), "") if within is not None else ""
        said = "".join(f"{weight}\0{part.removeprefix(above)}\0{digest(part)}\n" for weight, part in parts)
        return hashlib.sha256(said.encode()).hexdigest()
    if name.startswith(HUB):
        from policygrad.tasks.hub import fingerprint

        return fingerprint(name)
    try:
        path = Path(name.partition(":")[0] if _folder(name) else name)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            said = "".join(f"{file.relative_to(path)}\0{_sha(file)}\n" for file in files)
            return hashlib.sha256(said.encode()).hexdigest()
        return _sha(path)
    except (OSError, ValueError):  # no file; too long for a file name, or a NUL in it
        return None


def _sha(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder(name: str) -> bool:
    """A folder that `datasets` has saved, perhaps with a split behind it."""
    try:
        path = Path(name.partition(":")[0])
        return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()
    except (OSError, ValueError):
        return False


def _there(name: str) -> bool:
    return _folder(name) or _is_file(name)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a file name, or a NUL in it
        return False
