"""From a source to what is read of it: rows are mapped, checked once, refused or left out, and kept or fetched again."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from policygrad.errors import DataError
from policygrad.tasks.hub import DatasetRows, is_dataset
from policygrad.tasks.rows import to_example
from policygrad.tasks.source import Row, Source, Table, is_source, open_source
from policygrad.tasks.types import Example

EXAMPLE = '{"prompt": "1+1=", "answer": "2"}'
Map = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""From a row to the row as it is used, or None for a row that is left out."""
T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """How rows are read."""

    map: Map | None = None
    """Called with every row whenever it is read, so that it has to say the same each time."""
    skip_bad: bool = False
    """Leave out, and count, what would be refused."""
    apart: int = 0
    """Leave out of training, and count, what has so many words in a row of a held-out prompt; 0 = equal prompts only."""

    def prepared(self, row: Row) -> Row | None:
        """The row that is used; None for one that the map leaves out. Raises DataError where the map does."""
        where, columns = row
        if self.map is not None:
            try:
                mapped = self.map(dict(columns))
            except Exception as error:  # whatever somebody's function may raise
                raise DataError(f"{where}: the map raised {type(error).__name__}: {error}") from error
            if mapped is None:
                return None
            if not isinstance(mapped, Mapping):
                raise DataError(
                    f"{where}: the map returned {type(mapped).__name__}: return a row, a dict, or None to leave it out"
                )
            columns = mapped
        return where, with_answer(columns)


def with_answer(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """verl keeps what is right in `reward_model.ground_truth`: it is the column `answer` too, where there is none."""
    found = row.get("reward_model")
    if "answer" in row or not isinstance(found, Mapping) or "ground_truth" not in found:
        return row
    return {**row, "answer": found["ground_truth"]}


class Given:
    """Rows that are in memory already: dicts with `prompt` and columns, or Examples."""

    held = True

    def __init__(self, rows: Sequence[Any], name: str) -> None:
        if not len(rows):
            raise DataError(
                f"no {name}s: a task needs at least one prompt, as in [{{'prompt': '1+1=', 'answer': '2'}}]"
            )
        self._rows, self._name = rows, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row, where = self._rows[index], f"{self._name} {index + 1}"
        if isinstance(row, Example):
            if "prompt" in row.columns:
                raise DataError(f"{where}: a column may not be called 'prompt', the example has one; rename it")
            return row.source or where, {"prompt": row.prompt, **row.columns}
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: a dict with 'prompt' or an Example is needed, got {type(row).__name__}")
        return where, row


def source_of(given: Any, name: str = "row", example: str = EXAMPLE) -> Source | None:
    """The rows that were given, by name or as an object: a list, or a `datasets.Dataset`; None of anything else."""
    if isinstance(given, str):
        return open_source(given, example) if is_source(given) else None
    if is_dataset(given):
        return Table(DatasetRows(given), name)
    return Given(given, name) if isinstance(given, Sequence) else None


def parsed(source: Source, reading: Reading, parse: Callable[[Row], T], name: str) -> Iterator[tuple[int, T]]:
    """(number in the source, row) of all rows that can be used; those that cannot are counted, where that is asked for.

    Raises:
        DataError: a row that cannot be used; none that can.
    """
    bad, left_out, used, first = 0, 0, 0, ""
    for index in range(len(source)):
        try:
            row = reading.prepared(source[index])
            found = None if row is None else parse(row)
        except DataError as error:
            if not reading.skip_bad:
                raise
            bad, first = bad + 1, first or str(error)
            continue
        if found is None:
            left_out += 1
            continue
        used += 1
        yield index, found
    if bad:
        warnings.warn(f"{name}: {bad} of {len(source)} rows skipped, the first: {first}", stacklevel=2)
    if not used:
        raise DataError(
            f"{name}: none of its {len(source)} rows is left: {left_out} by the map, {bad} that cannot be used"
        )


def examples(source: Source, reading: Reading, name: str) -> Sequence[Example]:
    """The rows as examples: kept, or of large data fetched again each time.

    Raises:
        DataError: as `parsed`.
    """
    first: list[Example] = []

    def parse(row: Row) -> Example:
        found = to_example(row[1], row[0], first[0] if first else None)
        first[:] = first or [found]
        return found

    found = parsed(source, reading, parse, name)
    if source.held:
        return [example for _, example in found]
    return Fetched(source, reading, array("L", (index for index, _ in found)))


def read_examples(name: str, reading: Reading | None = None) -> Sequence[Example]:
    """The examples of a file. Raises DataError."""
    return examples(open_source(name, EXAMPLE), reading or Reading(), name)


class Fetched(Sequence[Example]):
    """Rows that are read anew each time they are asked for: in memory are their numbers."""

    def __init__(self, source: Source, reading: Reading, places: Sequence[int]) -> None:
        self._source, self._reading, self._places = source, reading, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._reading.prepared(self._source[self._places[index]])
        if row is None:
            raise DataError("the map leaves out a row that it did not leave out before: let it say the same each time")
        return to_example(row[1], row[0])
