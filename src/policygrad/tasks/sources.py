"""Rows by index from files, `datasets` folders and the hub, each read when it is requested; and how tasks of data are named.

JSONL is parsed here, not by `datasets`: its loader reports no line numbers, copies every file into a cache, and takes seconds
to import.
"""

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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import IO, Any, Protocol

from policygrad.errors import ConfigError, DataError, install_command
from policygrad.tasks.files import (
    CSV_SEPARATORS,
    DATA_SUFFIXES,
    TABLE_SUFFIXES,
    ParsedRow,
    is_data_folder,
    is_pattern,
    list_files,
    read_csv,
    read_json_array,
)
from policygrad.tasks.reasoning_gym import Component
from policygrad.utils.argv import split_outside_brackets
from policygrad.utils.filesystem import reject_constant, reject_duplicate_keys

HUB_PREFIX, HARBOR_PREFIX = "hf:", "harbor:"
MAX_LINE_BYTES = 16 * 2**20  # longer lines are refused: no model reads that much, and parsing them takes long
MAX_CACHED_BYTES = 64 * 2**20
"""Rows of JSONL files up to this size are kept in memory; those of larger files are read when requested."""
MAX_CACHED_FILES = 4  # with more files, all are read when requested: together they may be larger
Row = tuple[str, Mapping[str, Any]]  # (location for messages, columns)
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")  # little-endian UTF-32 begins like the first
_WEIGHT = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*\*")


class Source(Protocol):
    """Rows by index."""

    fits_in_memory: bool  # whether the source is small enough to keep all rows in memory
    folder: str  # what relative paths in its rows start at

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Return a row. Raises DataError, with the location, for one that cannot be read."""


def is_source(name: str) -> bool:
    """Return True for the name of data: a file or folder that exists, a pattern of files, `hf:…`, `harbor:…`, a suffix of data."""
    is_named = name.startswith((HUB_PREFIX, HARBOR_PREFIX)) or name.endswith(DATA_SUFFIXES)
    return is_named or _path_exists(name) or is_data_folder(name) or (is_pattern(name) and bool(list_files(name)))


def open_source(name: str, example: str) -> Source:
    """Open the named data. example: a valid row, for messages.

    Raises:
        DataError: Data that does not exist, cannot be read or has no rows.
        ConfigError: A required library is not installed.
    """
    if name.startswith(HARBOR_PREFIX):
        from policygrad.tasks.harbor import HarborTasks

        return HarborTasks(name)
    if name.startswith(HUB_PREFIX) or _is_dataset_folder(name):
        return open_dataset(load_dataset(name), name)
    if is_data_folder(name) or is_pattern(name):
        if not (files := list_files(name)):
            raise DataError(f"{name}: no file matches; a relative path starts at the current folder")
        return SeveralSources([open_source(file, example) for file in files])
    if separator := CSV_SEPARATORS.get(os.path.splitext(name)[1]):
        return ParsedSource(name, read_csv(name, separator))
    if name.endswith(".json") and (rows := read_json_array(name)) is not None:
        return ParsedSource(name, rows)
    return open_arrow(name) if name.endswith(TABLE_SUFFIXES) else JsonLines(name, example)


def digest_data(name: object, relative_to: str | None = None) -> str | None:
    """Return a digest that changes with the data: of the bytes of a file or folder, of the parts of a mixture, or the hub's own.

    Args:
        relative_to: A folder to leave out of the names of a mixture's parts.

    Returns:
        None when `name` is not data.
    """
    if not isinstance(name, str):
        return None
    if parts := parse_data_mixture(name):
        folder = os.path.join(Path(relative_to).resolve(), "") if relative_to is not None else ""
        return _hash_text(f"{weight}\0{part.removeprefix(folder)}\0{digest_data(part)}\n" for weight, part in parts)
    if name.startswith(HUB_PREFIX):
        return str(load_dataset(name)._fingerprint)
    try:
        if not _is_dataset_folder(name) and (shards := list_files(name)):
            return _hash_text(f"{os.path.basename(shard)}\0{_hash_file(Path(shard))}\n" for shard in shards)
        name = name.removeprefix(HARBOR_PREFIX)
        path = Path(name.partition(":")[0] if _is_dataset_folder(name) else name)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            return _hash_text(f"{file.relative_to(path)}\0{_hash_file(file)}\n" for file in files)
        return _hash_file(path)
    except (OSError, ValueError):  # not a file, or a folder of no data; too long for a file name, or containing a NUL
        return None


def _hash_text(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_dataset_folder(name: str) -> bool:
    """Return True for a folder saved by `datasets`, optionally followed by `:SPLIT`."""
    folder = name.partition(":")[0]
    return any(os.path.isfile(os.path.join(folder, file)) for file in ("dataset_info.json", "dataset_dict.json"))


def _path_exists(name: str) -> bool:
    return _is_dataset_folder(name) or os.path.isfile(name)


# Mixtures: `gcd+2*chain_sum:min_terms=2,max_digits=1` of datasets, `0.7*a.jsonl+0.3*b.jsonl` of data.


def parse_components(text: str) -> tuple[Component, ...]:
    """Parse datasets joined by `+`, each `[weight*]name[:key=value,…]`. Raises DataError, quoting the invalid part."""
    components = []
    for part in split_outside_brackets(text, "+"):
        weight, part = split_weight(part, text)
        name, colon, settings = part.partition(":")
        if not name.strip():
            raise DataError(f"task {text!r}: a dataset's name is missing; write name[:key=value,...] joined by '+'")
        config: dict[str, Any] = {}
        for setting in split_outside_brackets(settings, ",") if colon else []:
            key, equals, value = (piece.strip() for piece in setting.partition("="))
            if not (equals and key and value):
                raise DataError(
                    f"task {text!r}: {setting.strip()!r} is not key=value "
                    "(as in chain_sum:max_digits=1,allow_negation=true)"
                )
            config[key] = _parse_value(value)
        components.append(Component(name.strip(), weight, config))
    return tuple(components)


def _parse_value(text: str) -> Any:
    """Parse a Python literal (number, list, quoted text) or true / false / none; other text is returned as it is."""
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def split_weight(part: str, task: str) -> tuple[float, str]:
    """Split `weight*rest` into (weight, rest); the default weight is 1. Raises DataError unless the weight is positive."""
    match = _WEIGHT.match(part)
    if not match:
        return 1.0, part
    weight = float(match.group(1))
    if not (weight > 0 and math.isfinite(weight)):
        raise DataError(f"task {task!r}: the weight {match.group(1)} must be positive; drop the dataset instead")
    return weight, part[match.end() :]


def parse_data_mixture(name: object) -> tuple[tuple[float, str], ...]:
    """Parse `0.7*a.jsonl+0.3*b.jsonl` into (weight, name) of its parts; () when the name is not a mixture of data.

    A `+` in the name of an existing file is part of the name.

    Raises:
        DataError: A weight that is not positive, or a part that is not data.
    """
    if not isinstance(name, str) or "+" not in name or _path_exists(name):
        return ()
    pieces = name.split("+")
    parts, first = list[tuple[float, str]](), 0
    while first < len(pieces):
        joined = {end: split_weight("+".join(pieces[first:end]), name) for end in range(len(pieces), first, -1)}
        end = next((end for end, (_, part) in joined.items() if _path_exists(part.strip())), first + 1)
        parts.append((joined[end][0], joined[end][1].strip()))
        first = end
    if not any(is_source(part) or _match_trailing_weight(part) for _, part in parts):
        return ()
    for _, part in parts:
        if not is_source(part):
            trailing = _match_trailing_weight(part)
            hint = (
                f"write the weight first, {trailing[2]}*{trailing[1]}"
                if trailing
                else "data can be mixed with data only"
            )
            raise DataError(
                f"task {name!r}: its part {part!r} is not data: {hint}; a part is a file (.jsonl, .parquet, .csv, …), a folder "
                "or a pattern of such files, or hf:REPOSITORY"
            )
    return tuple(parts)


def _match_trailing_weight(part: str) -> re.Match[str] | None:
    """Match `a.jsonl*0.7`, a common mistake."""
    match = re.fullmatch(r"(.+?)\s*\*\s*([\d.]+)", part)
    return match if match and is_source(match[1]) else None


# Several files as one, and files that were parsed whole.


class SeveralSources:
    """The rows of several files, one after the other, each with equal weight."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._ends = list(accumulate(map(len, sources)))
        self.fits_in_memory = all(source.fits_in_memory for source in sources) and len(sources) <= MAX_CACHED_FILES
        self.folder = sources[0].folder

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        source, index = self.locate(index)
        return source[index]

    def locate(self, index: int) -> tuple[Source, int]:
        """Return the file of a row, and the row's number there."""
        number = bisect_right(self._ends, index)
        return self._sources[number], index - (self._ends[number - 1] if number else 0)


class ParsedSource:
    """Rows in memory."""

    fits_in_memory = True

    def __init__(self, path: str, rows: Sequence[ParsedRow]) -> None:
        if not rows:
            raise DataError(f"{path}: no rows")
        self._rows, self.folder = rows, os.path.dirname(path)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        where, columns = self._rows[index]
        if isinstance(columns, DataError):
            raise columns
        return where, columns


# JSONL: one JSON object per line, plain or gzipped.


class JsonLines:
    """The non-blank lines of a file, each parsed when requested; the line index takes 12 bytes per line."""

    def __init__(self, path: str, example: str) -> None:
        """Index the file's lines. example: a valid line, for messages.

        Raises:
            DataError: A file that does not exist, has no rows or is not UTF-8 text.
        """
        self.path, self._example, self.folder = path, example, os.path.dirname(path)
        self._offsets, self._line_numbers = array("Q"), array("L")
        self._lock = Lock()  # a later rollout may be sampled during an evaluation
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            # a pipe would wait for its writer, and a device may have no end
            raise DataError(f"{path} is not a regular file, and rows are read several times: copy it into one")
        try:
            if path.endswith(".gz"):  # unpacked into a temporary file, because gzip has no random access
                self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the rows are read
                with gzip.open(path) as packed:
                    shutil.copyfileobj(packed, self._file, 2**20)
                self._file.seek(0)
            else:
                self._file = open(path, "rb")  # noqa: SIM115
            is_utf16 = self._file.read(2) in _UTF16_BOMS
            self._file.seek(0)
            offset, number = len(_UTF8_BOM) if self._file.read(3) == _UTF8_BOM else 0, 1
            self._file.seek(offset)
            while piece := self._file.readline(MAX_LINE_BYTES + 2):  # never more of a line in memory
                blank, length = not piece.strip(), len(piece)
                while not piece.endswith(b"\n") and (piece := self._file.readline(MAX_LINE_BYTES)):
                    length += len(piece)
                if not blank:
                    self._offsets.append(offset)
                    self._line_numbers.append(number)
                offset, number = offset + length, number + 1
        except FileNotFoundError:
            raise _missing_file(path) from None
        except ValueError as error:  # a NUL, half a surrogate pair
            raise DataError(f"{path!r} is not a valid file name ({error}): give another") from error
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
        if is_utf16:
            raise DataError(
                f"{path}:1: this is UTF-16 text; JSONL is UTF-8: iconv -f UTF-16 -t UTF-8 {path} > new.jsonl"
            )
        if not self._offsets:
            raise DataError(f"{path}: no rows; write one JSON object per line, as in {example}")
        self.fits_in_memory = offset <= MAX_CACHED_BYTES

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        where = f"{self.path}:{self._line_numbers[index]}"
        with self._lock:
            self._file.seek(self._offsets[index])
            line = self._file.readline(MAX_LINE_BYTES + 2).removesuffix(b"\n")
        if len(line) > MAX_LINE_BYTES:
            size, limit = f"{len(line) / 2**20:.0f}", MAX_LINE_BYTES >> 20
            raise DataError(f"{where}: a line of {size} MiB, more than {limit} MiB: is a line break missing?")
        try:
            row = json.loads(line.decode(), parse_constant=reject_constant, object_pairs_hook=reject_duplicate_keys)
        except UnicodeDecodeError as error:
            place = f"byte {error.start + 1} (0x{line[error.start]:02x})"
            raise DataError(f"{where}: {place} is not UTF-8; save the file as UTF-8") from None
        except json.JSONDecodeError as error:
            if line.strip() == b"[":
                raise DataError(
                    f"{where}: a JSON array, not JSONL; one object per line: jq -c '.[]' in.json > out.jsonl"
                ) from None
            raise DataError(f"{where}: not JSON at column {error.colno}: {error.msg}; is the line cut off?") from None
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
            raise DataError(f"{where}: cannot be read as JSON: {error}") from None
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise DataError(f"{where}: every line must be a JSON object, got a {kind}; write {self._example}")
        return where, row


def _missing_file(path: str) -> DataError:
    return DataError(f"{path}: no such file; a relative path starts at the current folder")


# Parquet, Arrow, and everything of `datasets`. pyarrow and datasets are imported here alone, when such data is opened.


class TableSource:
    """Rows of a table on disk, read a block at a time."""

    fits_in_memory = False
    BLOCK = 64  # rows read together: reading in order reads each block once

    def __init__(
        self, name: str, size: int, read: Callable[[int, int], list[dict[str, Any]]], folder: str = ""
    ) -> None:
        """read: returns the rows from a start up to an end, as Python values."""
        if not size:
            raise DataError(f"{name}: no rows")
        self.folder = folder
        self._name, self._size, self._read = name, size, lru_cache(maxsize=4)(read)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Row:
        start = index - index % self.BLOCK
        row = dict(self._read(start, min(start + self.BLOCK, self._size))[index - start])
        for name, value in row.items():
            # restore messages and tools as written: in a table, every object has all keys, with None for those it lacks
            is_chat = isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)
            if is_chat or name == "tools":
                row[name] = _drop_nulls(value)
        return f"{self._name}, row {index + 1}", row


def _drop_nulls(value: Any) -> Any:
    """Return a value without the None that its objects have, at any depth."""
    if isinstance(value, dict):
        return {key: _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def open_arrow(path: str) -> TableSource:
    """Open a `.parquet`, `.arrow` (file or stream) or `.feather` file, mapped into memory.

    Parquet has no random access, so it is unpacked once into a temporary file.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: A file that does not exist or has another format.
    """
    if find_spec("pyarrow") is None:
        raise ConfigError(f"{path} needs pyarrow, which is not installed: {install_command('data')}")
    import pyarrow as pa

    if not Path(path).is_file():
        raise _missing_file(path)
    unpacked = None
    try:
        if path.endswith(".parquet"):
            import pyarrow.parquet as pq

            unpacked = tempfile.NamedTemporaryFile(suffix=".arrow")  # noqa: SIM115  # open as long as the rows are read
            with pq.ParquetFile(path) as file, pa.ipc.new_file(unpacked.name, file.schema_arrow) as out:
                for batch in file.iter_batches(4096):
                    out.write_batch(batch)
        mapped = unpacked.name if unpacked else path
        try:
            table = pa.ipc.open_file(pa.memory_map(mapped)).read_all()
        except pa.ArrowInvalid:  # `datasets` writes a stream, which has no table of contents
            table = pa.ipc.open_stream(pa.memory_map(mapped)).read_all()
    except (pa.ArrowException, OSError) as error:
        kind = "Parquet" if path.endswith(".parquet") else "Arrow"
        raise DataError(f"{path}: cannot be read as {kind}: {str(error).splitlines()[0]}") from error

    def read(start: int, end: int, _keep_open: Any = unpacked) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = table.slice(start, end - start).to_pylist()
        return rows

    return TableSource(path, int(table.num_rows), read, os.path.dirname(path))


def open_dataset(data: Any, name: str) -> TableSource:
    """Open a `datasets.Dataset`. name: for messages."""
    plain, pictures = _split_pictures(data)

    def read(start: int, end: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [{} for _ in range(end - start)]
        for name, values in plain[start:end].items() if plain is not None else ():
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        for row, files in zip(rows, pictures[start:end].to_pylist() if pictures is not None else (), strict=False):
            row.update(files)
        return rows

    return TableSource(name, len(data), read)


def _split_pictures(data: Any) -> tuple[Any, Any]:
    """Split a dataset into (columns without pictures, columns with pictures, as Arrow); None for a half without columns.

    Arrow has the pictures' files, which are decoded when a model reads them. `cast_column(…, Image(decode=False))` would copy
    a data set with lists of pictures into a file beside it, and so change the digest of its folder.
    """
    features: Mapping[str, Any] = getattr(data, "features", None) or {}
    pictures = [name for name, feature in features.items() if _has_image(feature)]
    if not pictures or data.format["type"] == "custom":  # a transform may read every column
        return data, None
    columns = data.format["columns"]
    pictures = [name for name in columns if name in pictures]
    plain = [name for name in columns if name not in pictures]
    return (
        data.select_columns(plain) if plain else None,
        data.select_columns(pictures).with_format("arrow") if pictures else None,
    )


def _has_image(feature: Any) -> bool:
    """Return True for `datasets`' Image, and for lists and objects with one."""
    if type(feature).__name__ == "Image":
        return True
    if isinstance(feature, Mapping):
        return any(map(_has_image, feature.values()))
    items = feature if isinstance(feature, (list, tuple)) else [getattr(feature, "feature", None)]
    return any(_has_image(item) for item in items if item is not None)


def is_dataset(data: object) -> bool:
    """Return True for a `datasets.Dataset`, without importing the library."""
    return all(hasattr(data, name) for name in ("column_names", "features", "_fingerprint", "__getitem__"))


@lru_cache(maxsize=4)
def load_dataset(name: str) -> Any:
    """Load `hf:REPOSITORY[@REVISION][:CONFIG[:SPLIT]]` from the hub or its cache, or `FOLDER[:SPLIT]` written by `save_to_disk`.

    The default split is train, and the default revision the repository's latest.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: The dataset or split does not exist; the message lists the splits.
    """
    if find_spec("datasets") is None:
        raise ConfigError(f"{name} needs datasets, which is not installed: {install_command('data')}")
    import datasets

    location, *rest = name.removeprefix(HUB_PREFIX).split(":")
    if name.startswith(HUB_PREFIX) and (len(rest) > 2 or not location):
        raise DataError(f"{name}: a hub dataset is hf:REPOSITORY, hf:REPOSITORY:CONFIG or hf:REPOSITORY:CONFIG:SPLIT")
    try:
        if name.startswith(HUB_PREFIX):
            config, split = [*rest, "", ""][:2]
            repository, _, revision = location.partition("@")
            data = datasets.load_dataset(repository, config or None, **({"revision": revision} if revision else {}))
        else:
            location, _, split = name.partition(":")
            data = datasets.load_from_disk(location)
    except Exception as error:  # the class depends on what is wrong: the network, a name, a file
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name}: cannot be loaded: {message}") from error
    if is_dataset(data):
        if split:
            raise DataError(f"{name}: it has no splits: leave {split!r} out")
        return data
    if (split := split or "train") not in data:
        raise DataError(f"{name}: no split {split!r}; it has {', '.join(map(str, data))}")
    return data[split]
