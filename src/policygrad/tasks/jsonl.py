"""JSONL: one JSON object per line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.rows import to_examples
from policygrad.tasks.types import Example

_UTF8_BOM = b"\xef\xbb\xbf"
LONGEST = 16 * 2**20
"""Bytes of a line: more than any model reads, and what takes long to parse."""
_OTHER_BOMS = (b"\xff\xfe", b"\xfe\xff")  # UTF-16 in both orders; UTF-32 little-endian begins like the first


def read_jsonl(path: str) -> list[Example]:
    """Every row of a JSONL file. Blank lines are skipped; everything else that is not a row is a DataError with file and line."""
    return to_examples(read_objects(path, '{"prompt": "1+1=", "answer": "2"}'))


def read_objects(path: str, example: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) of every line of a JSONL file that is not blank; `example` is a line as it should be.

    Raises DataError naming file and line, a file without rows, or one that is not there.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a relative path starts at the current folder") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if data.startswith(_OTHER_BOMS):
        raise DataError(f"{path}:1: this is UTF-16 text; JSONL is UTF-8: iconv -f UTF-16 -t UTF-8 {path} > new.jsonl")
    empty = True
    for number, line in enumerate(data.removeprefix(_UTF8_BOM).split(b"\n"), start=1):
        if line.strip():
            empty = False
            yield f"{path}:{number}", _parse_object(line, f"{path}:{number}", example)
    if empty:
        raise DataError(f"{path}: no rows; write one JSON object per line, as in {example}")


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
