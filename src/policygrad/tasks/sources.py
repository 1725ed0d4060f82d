"""Rows by number, wherever they are: what a name of data stands for. Each is read when it is asked for."""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import IO, Any, Protocol

from policygrad.errors import ConfigError, DataError, install_command
from policygrad.tasks.reasoning_gym import Component

# JSONL: one JSON object per line, plain or packed by gzip.

_UTF8_BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 16 * 2**20
"""Bytes of a line: more than any model reads, and what takes long to parse."""
MAX_CACHED_BYTES = 64 * 2**20
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
    def fits_in_memory(self) -> bool:
        """Whether it is small enough for its rows to be kept in memory."""
        return self._size <= MAX_CACHED_BYTES

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> tuple[str, dict[str, Any]]:
        where = f"{self.path}:{self._numbers[index]}"
        with self._reading:
            self._file.seek(self._begins[index])
            line = self._file.readline(MAX_LINE_BYTES + 2).removesuffix(b"\n")
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
        while piece := self._file.readline(MAX_LINE_BYTES + 2):
            blank, length = not piece.strip(), len(piece)
            while not piece.endswith(b"\n") and (piece := self._file.readline(MAX_LINE_BYTES)):
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
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"{where}: a line of {len(line) / 2**20:.0f} MiB, more than {MAX_LINE_BYTES >> 20} MiB: is a line's end missing?"
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


# The spelling of a mix: `gcd+2*chain_sum:min_terms=2,max_digits=1`.

_OPEN, _CLOSE, _QUOTES = "([{", ")]}", "'\""
_WEIGHT = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*\*")
_LITERALS = {"true": True, "false": False, "none": None}


def parse_components(text: str) -> tuple[Component, ...]:
    """Read datasets joined by `+`, each `[weight*]name[:key=value,...]`. Raises DataError that quotes the bad part."""
    return tuple(_parse_component(part, text) for part in _split_top_level(text, "+"))


def _parse_component(part: str, whole: str) -> Component:
    weight, part = split_weight(part, whole)
    name, colon, settings = part.partition(":")
    name = name.strip()
    if not name:
        raise DataError(f"task {whole!r}: a dataset's name is missing; write name[:key=value,...] joined by '+'")
    config: dict[str, Any] = {}
    for setting in _split_top_level(settings, ",") if colon else []:
        key, equals, value = setting.partition("=")
        if not (equals and key.strip() and value.strip()):
            raise DataError(
                f"task {whole!r}: {setting.strip()!r} is not key=value (as in chain_sum:max_digits=1,allow_negation=true)"
            )
        config[key.strip()] = _value(value.strip())
    return Component(name, weight, config)


def split_weight(part: str, whole: str) -> tuple[float, str]:
    """(weight, the rest) of one part of a mix; 1 where none is said. Raises DataError for one that is not above 0."""
    found = _WEIGHT.match(part)
    if not found:
        return 1.0, part
    weight = float(found.group(1))
    if not (weight > 0 and math.isfinite(weight)):
        raise DataError(f"task {whole!r}: the weight {found.group(1)} must be positive; drop the dataset instead")
    return weight, part[found.end() :]


def _value(text: str) -> Any:
    """A Python literal (number, list, quoted text), true / false / none, or else the text itself."""
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _split_top_level(text: str, separator: str) -> list[str]:
    """Split outside of brackets and quotes, so that a value may be a list. `1e+3` is one number, not a mix."""
    parts, depth, quote, start = [], 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in _QUOTES:
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char == separator and depth == 0 and not re.search(r"[\d.][eE]$", text[:i]):
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


HUB_PREFIX = "hf:"
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
Row = tuple[str, Mapping[str, Any]]
"""(where it stands, for messages; its columns)."""


class Source(Protocol):
    """Rows that stay where they are."""

    @property
    def fits_in_memory(self) -> bool:
        """Whether it is small enough for its rows to be kept in memory."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """A row. Raises DataError, with where it stands, for one that cannot be read."""
        ...


def is_source(name: str) -> bool:
    """Whether a name is one of data: a file or folder that is there, a hub id behind `hf:`, or what ends like such a file."""
    return name.startswith(HUB_PREFIX) or name.endswith((".jsonl", ".jsonl.gz", *TABLE_SUFFIXES)) or _there(name)


def parse_data_mixture(name: str) -> tuple[tuple[float, str], ...]:
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
        joined = {end: split_weight("+".join(pieces[first:end]), name) for end in range(len(pieces), first, -1)}
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
    if name.startswith(HUB_PREFIX) or _folder(name):
        return TableSource(load_dataset(name), name)
    if name.endswith(TABLE_SUFFIXES):
        return TableSource(open_arrow(name), name)
    return JsonLines(name, example)


class ColumnReader(Protocol):
    """Rows of a library's own, by the slice."""

    def __len__(self) -> int: ...

    def rows(self, start: int, end: int) -> list[dict[str, Any]]:
        """The rows from `start` up to `end`, as Python's own values."""
        ...


class TableSource:
    """Rows of a table on the disk, of which a block at a time is read."""

    fits_in_memory = False
    BLOCK = 64
    """Rows read together: in order, each block once."""

    def __init__(self, columns: ColumnReader, name: str) -> None:
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


def digest_data(name: object, relative_to: str | None = None) -> str | None:
    """What tells whether data has changed: of a file or a folder its bytes', of a data set of the hub its fingerprint, of a mix
    those of its parts with their names; None of what is none of these. within: a folder from which on parts are called."""
    if not isinstance(name, str):
        return None
    if parts := parse_data_mixture(name):
        above = os.path.join(Path(relative_to).resolve(), "") if relative_to is not None else ""
        said = "".join(f"{weight}\0{part.removeprefix(above)}\0{digest_data(part)}\n" for weight, part in parts)
        return hashlib.sha256(said.encode()).hexdigest()
    if name.startswith(HUB_PREFIX):
        return dataset_fingerprint(name)
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


# Parquet and Arrow files as rows; the one file that imports pyarrow.

UNPACK_BATCH = 4096
"""Rows that are unpacked at a time."""


class ArrowRows:
    """A table that is mapped into memory, of which a row costs nothing until it is read."""

    def __init__(self, table: Any, keep: Any = None) -> None:
        """keep: the file it is in, which must not be closed."""
        self._table, self._keep = table, keep

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def rows(self, start: int, end: int) -> list[dict[str, Any]]:
        return [drop_missing_keys(row) for row in self._table.slice(start, end - start).to_pylist()]


def open_arrow(path: str) -> ArrowRows:
    """A `.parquet`, `.arrow` (file or stream) or `.feather` file. Parquet is unpacked once, beside what else is temporary: its rows
    cannot be read one by one.

    Raises:
        ConfigError: no pyarrow; DataError: no such file, or one that is none of these.
    """
    if find_spec("pyarrow") is None:
        raise ConfigError(f"{path} needs pyarrow, which is not installed: {install_command('data')}")
    import pyarrow as pa

    if not Path(path).is_file():
        raise DataError(f"{path}: no such file; a relative path starts at the current folder")
    try:
        return _unpacked(path) if path.endswith(".parquet") else ArrowRows(_mapped(path))
    except (pa.ArrowException, OSError) as error:
        kind = "Parquet" if path.endswith(".parquet") else "Arrow"
        raise DataError(f"{path}: cannot be read as {kind}: {str(error).splitlines()[0]}") from error


def _mapped(path: str) -> Any:
    import pyarrow as pa

    source = pa.memory_map(path)
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:  # which `datasets` writes: a stream, without a table of contents behind it
        return pa.ipc.open_stream(pa.memory_map(path)).read_all()


def _unpacked(path: str) -> ArrowRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        held = tempfile.NamedTemporaryFile(suffix=".arrow")  # noqa: SIM115  # as long as the rows are read
        with pa.ipc.new_file(held.name, file.schema_arrow) as out:
            for batch in file.iter_batches(UNPACK_BATCH):
                out.write_batch(batch)
    return ArrowRows(_mapped(held.name), held)


def drop_missing_keys(row: dict[str, Any]) -> dict[str, Any]:
    """The row with chat messages as they were written: in a column of records, what one of them lacks is None in a table."""
    return {name: _messages(value) for name, value in row.items()}


def _messages(value: Any) -> Any:
    if not (isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value)):
        return value
    return [{key: said for key, said in item.items() if said is not None} for item in value]


# Data sets of the hub, and folders and objects of the `datasets` library, as rows; the one file that imports it.

DEFAULT_SPLIT = "train"


class DatasetRows:
    """A `datasets.Dataset`, whose rows are on the disk."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def rows(self, start: int, end: int) -> list[dict[str, Any]]:
        columns = self._data[start:end]
        return [drop_missing_keys({name: values[i] for name, values in columns.items()}) for i in range(end - start)]


def is_dataset(data: object) -> bool:
    """Whether an object is a `datasets.Dataset`, without importing anything."""
    return all(hasattr(data, name) for name in ("column_names", "features", "_fingerprint", "__getitem__"))


def load_dataset(name: str) -> DatasetRows:
    """`hf:REPOSITORY[:CONFIG[:SPLIT]]` from the hub or its cache, `FOLDER[:SPLIT]` that `save_to_disk` wrote; the split is train
    where none is named.

    Raises:
        ConfigError: no `datasets`; DataError: what is not there, with what there is.
    """
    return DatasetRows(_loaded(name))


def dataset_fingerprint(name: str) -> str:
    """Of the data set, as the library computes it from files, configuration and split."""
    return str(_loaded(name)._fingerprint)


@lru_cache(maxsize=4)
def _loaded(name: str) -> Any:
    if find_spec("datasets") is None:
        raise ConfigError(f"{name} needs datasets, which is not installed: {install_command('data')}")
    import datasets

    try:
        if not name.startswith("hf:"):
            folder, _, split = name.partition(":")
            return _select_split(datasets.load_from_disk(folder), split, name)
        repository, config, split = _parts(name)
        return _select_split(datasets.load_dataset(repository, config or None), split, name)
    except (DataError, ConfigError):
        raise
    except Exception as error:  # of which class depends on what is wrong: the network, a name, a file
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name}: cannot be loaded: {said}") from error


def _parts(name: str) -> tuple[str, str, str]:
    words = name.removeprefix("hf:").split(":")
    if len(words) > 3 or not words[0]:
        raise DataError(
            f"{name}: a data set of the hub is hf:REPOSITORY, hf:REPOSITORY:CONFIG or hf:REPOSITORY:CONFIG:SPLIT"
        )
    repository, config, split = [*words, "", ""][:3]
    return repository, config, split


def _select_split(found: Any, split: str, name: str) -> Any:
    if is_dataset(found):
        if split:
            raise DataError(f"{name}: it has no splits: leave {split!r} out")
        return found
    wanted = split or DEFAULT_SPLIT
    if wanted not in found:
        raise DataError(f"{name}: no split {wanted!r}; it has {', '.join(map(str, found))}")
    return found[wanted]
