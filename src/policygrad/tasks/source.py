"""Rows by number, wherever they are: what a name of data stands for. Each is read when it is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from policygrad.errors import DataError
from policygrad.tasks.jsonl import JsonLines

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
    return name.startswith(HUB) or name.endswith((".jsonl", ".jsonl.gz", *TABLES)) or _folder(name) or _is_file(name)


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


def digest(name: object) -> str | None:
    """What tells whether data has changed: of a file or a folder its bytes', of a data set of the hub its fingerprint; None of
    what is none of these."""
    if not isinstance(name, str):
        return None
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


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a file name, or a NUL in it
        return False
