"""Reads files that somebody else may have written: bounded in size, depth and range of numbers, and without waiting for anybody."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

LARGEST = 2**20
"""Bytes of a configuration: a hundred times a run's, and what is parsed in no time."""
LARGEST_LINE = 2**26
"""Bytes of one JSON line, a completion of millions of tokens among them."""
DEEPEST = 100
"""Brackets in brackets: a run's files have six, and Python's own parsers and writers fail near 1,000."""
_LONG_NUMBER = re.compile(rb"\d{100}|[eE]\+?\d{3}")
"""Without one of these a number is below 1e200; inside of text it means nothing, and the numbers are looked at one by one."""


class Unusable(ValueError):
    """A file that is well formed and cannot be used: nested too deeply, or with a number that no float holds."""


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be read, or is a pipe, a device or a folder, which might be waited for, or read, without an end.
    """
    descriptor = _open(path)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def text_of(path: Path, largest: int = LARGEST) -> str:
    """Read the text of a file, or of a pipe such as a shell's `<(…)`.

    Raises:
        OSError: it cannot be read, is larger than `largest`, as a device without an end is, or is a pipe that nobody writes to.
        UnicodeDecodeError: it is not UTF-8.
    """
    descriptor = _open(path)
    with os.fdopen(descriptor, "rb") as file:
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(descriptor, True)
        data = file.read(largest + 1)
        if len(data) > largest:
            raise OSError(errno.EFBIG, f"it is larger than {largest >> 20} MiB; is it the right file?")
        if not data and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise OSError(errno.EPIPE, "it is a pipe that nobody writes to")
    return data.decode("utf-8-sig")


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file. Raises OSError: it cannot be read, is no regular file, or see `lines_in`."""
    with open_regular(path) as file:
        yield from lines_in(file)


def lines_in(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines from here on. Raises OSError for a line of more than `LARGEST_LINE` bytes."""
    while line := file.readline(LARGEST_LINE + 1):
        if len(line) > LARGEST_LINE:
            raise OSError(errno.EFBIG, f"a line of it is longer than {LARGEST_LINE >> 20} MiB; is it the right file?")
        yield line


def read_json(path: Path, largest: int = LARGEST_LINE) -> Any:
    """Parse a file that holds one JSON value.

    Raises:
        OSError: as `text_of`.
        ValueError: it is not UTF-8 or no JSON. Unusable: see `parse_json`.
    """
    return parse_json(text_of(path, largest))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that other programs can hold too.

    Raises:
        ValueError: no JSON. Unusable: NaN, an infinity, a number that no float holds, or brackets nested deeper than `DEEPEST`.
    """
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    hooks: dict[str, Any] = {"parse_int": _integer, "parse_float": _number} if _LONG_NUMBER.search(data) else {}
    try:
        value = json.loads(text, parse_constant=_number, **hooks)
    except RecursionError:
        raise Unusable(f"brackets in brackets, deeper than {DEEPEST}") from None
    if data.count(b"[") + data.count(b"{") > DEEPEST:
        _check_depth(value)
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        OSError, UnicodeDecodeError: as `text_of`. tomllib.TOMLDecodeError: no TOML.
        ValueError: an integer of thousands of digits. Unusable: tables or brackets nested deeper than `DEEPEST`.
    """
    try:
        data = tomllib.loads(text_of(path))
    except RecursionError:
        raise Unusable("brackets in brackets, too deep") from None
    _check_depth(data)
    return data


def _open(path: Path) -> int:
    # a named pipe would be waited for until somebody writes to it
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name holds a NUL character") from error


def _integer(text: str) -> int:
    _number(text)
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        shown = text if len(text) <= 20 else f"{text[:20]}… ({len(text)} digits)"
        raise Unusable(f"{shown} is no finite number, or none that a float holds")
    return value


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > DEEPEST:
            raise Unusable(f"brackets in brackets, deeper than {DEEPEST}")
        level = [x for item in level for x in (item.values() if isinstance(item, dict) else item)]
