"""JSONL: one JSON object per line, plain or packed by gzip."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import zlib
from array import array
from pathlib import Path
from threading import Lock
from typing import IO, Any

from policygrad.errors import DataError

_UTF8_BOM = b"\xef\xbb\xbf"
LONGEST = 16 * 2**20
"""Bytes of a line: more than any model reads, and what takes long to parse."""
HELD = 64 * 2**20
"""Bytes of a file whose rows are kept in memory; those of a larger one are read when they are asked for."""
_OTHER_BOMS = (b"\xff\xfe", b"\xfe\xff")  # UTF-16 in both orders; UTF-32 little-endian begins like the first


class JsonLines:
    """The lines of a file that are not blank, each parsed when it is asked for; where each begins is known (12 bytes a line)."""

    def __init__(self, path: str, example: str) -> None:
        """example: a line as it should be, for messages.

        Raises:
            DataError: no such file, one without rows, or one that is no text in UTF-8.
        """
        self.path, self._example = path, example
        self._begins, self._numbers = array("Q"), array("L")
        self._file, self._reading = _opened(path), Lock()  # a later rollout may be drawn beside an evaluation
        try:
            self._find()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        if not self._begins:
            raise DataError(f"{path}: no rows; write one JSON object per line, as in {example}")

    @property
    def held(self) -> bool:
        """Whether it is small enough for its rows to be kept in memory."""
        return self._size <= HELD

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> tuple[str, dict[str, Any]]:
        where = f"{self.path}:{self._numbers[index]}"
        with self._reading:
            self._file.seek(self._begins[index])
            line = self._file.readline(LONGEST + 2).removesuffix(b"\n")
        return where, _parse_object(line, where, self._example)

    def _find(self) -> None:
        """Where each line begins that is not blank. A line is never held whole beyond the longest that is read."""
        if self._file.read(2) in _OTHER_BOMS:
            raise DataError(
                f"{self.path}:1: this is UTF-16 text; JSONL is UTF-8: iconv -f UTF-16 -t UTF-8 {self.path} > new.jsonl"
            )
        self._file.seek(0)
        begin = len(_UTF8_BOM) if self._file.read(3) == _UTF8_BOM else 0
        self._file.seek(begin)
        number = 1
        while piece := self._file.readline(LONGEST + 2):
            blank, length = not piece.strip(), len(piece)
            while not piece.endswith(b"\n") and (piece := self._file.readline(LONGEST)):
                length += len(piece)
            if not blank:
                self._begins.append(begin)
                self._numbers.append(number)
            begin, number = begin + length, number + 1
        self._size = begin


def _opened(path: str) -> IO[bytes]:
    """The file; of a packed one what is in it, in a temporary file, as no line of it can be read without all before."""
    try:
        if Path(path).exists() and not (
            Path(path).is_file() or Path(path).is_dir()
        ):  # a pipe waits for its writer, a device may have no end
            raise DataError(f"{path} is no regular file, and rows are read more than once: write what it says into one")
        if not path.endswith(".gz"):
            return Path(path).open("rb")
        unpacked = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the rows are read
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, unpacked, 2**20)
        unpacked.seek(0)
        return unpacked
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a relative path starts at the current folder") from None
    except DataError:
        raise
    except ValueError as error:  # a NUL, half a surrogate pair
        raise DataError(f"{path!r} is a name that no file system takes ({error}): give another") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON; write null where there is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, in which JSON allows a key twice and the last one would win in silence."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice; keep one")
    return row


def _parse_object(line: bytes, where: str, example: str) -> dict[str, Any]:
    if len(line) > LONGEST:
        raise DataError(
            f"{where}: a line of {len(line) / 2**20:.0f} MiB, more than {LONGEST >> 20} MiB: is a line's end missing?"
        )
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise DataError(
            f"{where}: byte {error.start + 1} (0x{byte:02x}) is not UTF-8; save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        if line.strip() == b"[":
            raise DataError(
                f"{where}: a JSON array, not JSONL; one object per line: jq -c '.[]' in.json > out.jsonl"
            ) from None
        raise DataError(f"{where}: not JSON at column {error.colno}: {error.msg}; is the line cut off?") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, a thousand brackets
        raise DataError(f"{where}: cannot be read as JSON: {error}") from None
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise DataError(f"{where}: a JSON object is needed on every line, got a {kind}; write {example}")
    return row
