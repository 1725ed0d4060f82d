"""Parquet and Arrow files as rows; the one file that imports pyarrow."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError, DataError, install_command

BATCH = 4096
"""Rows that are unpacked at a time."""


class ArrowRows:
    """A table that is mapped into memory, of which a row costs nothing until it is read."""

    def __init__(self, table: Any, keep: Any = None) -> None:
        """keep: the file it is in, which must not be closed."""
        self._table, self._keep = table, keep

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def rows(self, start: int, end: int) -> list[dict[str, Any]]:
        return [plain(row) for row in self._table.slice(start, end - start).to_pylist()]


def read(path: str) -> ArrowRows:
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
            for batch in file.iter_batches(BATCH):
                out.write_batch(batch)
    return ArrowRows(_mapped(held.name), held)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """The row with chat messages as they were written: in a column of records, what one of them lacks is None in a table."""
    return {name: _messages(value) for name, value in row.items()}


def _messages(value: Any) -> Any:
    if not (isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value)):
        return value
    return [{key: said for key, said in item.items() if said is not None} for item in value]
