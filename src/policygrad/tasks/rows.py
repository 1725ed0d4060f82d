"""Rows of a task. Each has a `prompt`; its other columns reach the reward functions. Large data stays on disk."""

from __future__ import annotations

import re
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from random import Random
from typing import Any, Protocol, TypeVar, overload

from policygrad.errors import DataError
from policygrad.tasks.base import Example, Prompt, is_eval_prompt, prompt_key
from policygrad.tasks.messages import parse_prompt, parse_tools
from policygrad.tasks.pictures import PictureOptions, place_pictures
from policygrad.tasks.sources import Row, SeveralSources, Source, is_dataset, is_source, open_dataset, open_source
from policygrad.utils.message_parts import list_pictures

MIN_ROWS_TO_SPLIT = 32  # with fewer rows, training uses them all and evaluation repeats them
TEMPLATE_SHARE = 0.1
"""An n-gram in more than this share of the evaluation prompts, and in more than one, belongs to their template."""
EXAMPLE = '{"prompt": "1+1=", "answer": "2"}'
RowMap = Callable[[dict[str, Any]], Mapping[str, Any] | None]  # converts a row, or returns None to leave it out
T = TypeVar("T")
_WORD = re.compile(r"\w+|[-+*/^=<>%]")  # 3 + 4 is not 3 * 4


class HasPrompt(Protocol):
    """A row that can be split by its prompt."""

    @property
    def prompt(self) -> Prompt: ...


@dataclass(frozen=True)
class RowOptions:
    """Processing applied to the rows of data."""

    row_map: RowMap | None = None
    """Called with a row each time it is read, so it must be deterministic."""
    skip_bad_rows: bool = False
    """Leave out invalid rows, and count them, instead of refusing the data."""
    decontaminate: int = 0
    """Leave out training rows that share this many consecutive words with an evaluation prompt; 0 = equal prompts only."""
    fetch_images: bool = False
    """Download pictures that rows give by URL."""

    def read(self, source: Source, number: int) -> Row | None:
        """Return a row of a source, converted, with its pictures in its messages and with a column `answer` from verl's
        `reward_model`; or None when `row_map` leaves it out.

        Raises:
            DataError: `row_map` raised, or returned something other than a row; or a picture is not there.
        """
        if isinstance(source, SeveralSources):
            source, number = source.locate(number)
        where, columns = source[number]
        if self.row_map is not None:
            try:
                mapped = self.row_map(dict(columns))
            except Exception as error:  # user code may raise anything
                raise DataError(f"{where}: the row map raised {type(error).__name__}: {error}") from error
            if mapped is None:
                return None
            if not isinstance(mapped, Mapping):
                raise DataError(
                    f"{where}: the row map returned {type(mapped).__name__}: return a dict, or None to leave the row out"
                )
            columns = mapped
        scoring = columns.get("reward_model")  # verl's name for it
        if "answer" not in columns and isinstance(scoring, Mapping) and "ground_truth" in scoring:
            columns = {**columns, "answer": scoring["ground_truth"]}
        return where, place_pictures(columns, where, PictureOptions(source.folder, self.fetch_images))


# Views of rows, which may be larger than memory.


class LazyRows(Sequence[Example]):
    """`size` examples, each returned by `fetch` when its index is requested; a slice is a list."""

    def __init__(self, size: int, fetch: Callable[[int], Example]) -> None:
        self._size, self._fetch = size, fetch

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        numbers = range(self._size)[index]
        return self._fetch(numbers) if isinstance(numbers, int) else list(map(self._fetch, numbers))


def select_rows(rows: Sequence[Example], indices: Sequence[int]) -> LazyRows:
    return LazyRows(len(indices), lambda index: rows[indices[index]])


def concatenate(first: Sequence[Example], second: Sequence[Example]) -> LazyRows:
    size = len(first)
    return LazyRows(size + len(second), lambda index: first[index] if index < size else second[index - size])


class ShuffledEpochs:
    """Rows by number without end, shuffled anew each epoch by (seed, epoch)."""

    def __init__(self, rows: Sequence[Example], seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._order = lru_cache(maxsize=2)(self._permute)

    def __getitem__(self, index: int) -> Example:
        epoch, place = divmod(index, len(self._rows))
        return self._rows[self._order(epoch)[place]]

    def _permute(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


# Separating training from evaluation.


def split_indices(rows: Sequence[HasPrompt]) -> tuple[list[int], list[int]]:
    """Split row numbers into (training, evaluation) by a hash of the prompts, 1 in 16 for evaluation.

    Evaluation gets none when rows are few, or when the hash selects none or all of them.
    """
    chosen = [is_eval_prompt(prompt_key(row.prompt)) for row in rows]
    if len(rows) < MIN_ROWS_TO_SPLIT or all(chosen):
        chosen = [False] * len(rows)
    return [i for i, out in enumerate(chosen) if not out], [i for i, out in enumerate(chosen) if out]


def split_train_eval(rows: Sequence[Example]) -> tuple[Sequence[Example], Sequence[Example]]:
    """Split rows into (training, evaluation) by `split_indices`."""
    train, evaluated = split_indices(rows)
    return (select_rows(rows, train), select_rows(rows, evaluated)) if evaluated else (rows, ())


def sort_by_hash(rows: Sequence[Example]) -> LazyRows:
    """Order rows by the hash of their prompts, which is the same for every seed."""
    keys = [sha256(prompt_key(row.prompt).encode()).digest() for row in rows]
    return select_rows(rows, sorted(range(len(keys)), key=keys.__getitem__))


class EvalPrompts:
    """The evaluation prompts that training leaves out, with whatever shares n consecutive words with one of them.

    Case, punctuation other than arithmetic signs, and system messages do not count. Brown et al. 2020 (GPT-3,
    arXiv:2005.14165, app. C) compare training data and benchmarks by n-grams of words, with n from 8 to 13. Unlike there,
    n-grams that the evaluation prompts share as a template are ignored, since every training prompt may contain them too.
    The words of prompts with pictures count where the two show an equal picture: one question is put about many pictures.
    """

    def __init__(self, prompts: Iterable[Prompt], n: int) -> None:
        """n: consecutive words; 0 = only equal prompts are left out."""
        prompts = list(prompts)
        self.n, self.keys = n, frozenset(map(prompt_key, prompts))
        texts, counts = set[str](), Counter[str]()
        for prompt in prompts if n else ():
            words, pictures = _split_words(prompt), _list_digests(prompt)
            texts |= {picture + " ".join(words) for picture in pictures if words}
            counts.update({picture + gram for picture in pictures for gram in _make_ngrams(words, n)})
        self.texts = frozenset(texts)  # which may have fewer than n words
        limit = max(1.0, TEMPLATE_SHARE * len(prompts))
        self.ngrams = frozenset(gram for gram, count in counts.items() if count <= limit)

    def __contains__(self, prompt: Prompt) -> bool:
        if prompt_key(prompt) in self.keys:
            return True
        if not self.n:
            return False
        words = _split_words(prompt)
        return any(
            picture + " ".join(words) in self.texts
            or any(picture + gram in self.ngrams for gram in _make_ngrams(words, self.n))
            for picture in _list_digests(prompt)
        )

    def exclude_from(self, rows: Sequence[Example], name: str, stacklevel: int) -> Sequence[Example]:
        """Return the training rows whose prompts are not evaluated, and warn about the number left out.

        Raises:
            DataError: No row is left.
        """
        retained = [i for i, row in enumerate(rows) if row.prompt not in self]
        overlap = f" or share {self.n} consecutive words with one" if self.n else ""
        if not retained:
            raise DataError(
                f"{name}: all prompts are evaluation prompts{overlap}, so none is left to train on; give other evaluation rows, "
                "or leave this data out"
            )
        if len(retained) == len(rows):
            return rows
        excluded = len(rows) - len(retained)
        warnings.warn(
            f"{name}: {excluded} of {len(rows)} rows left out of training: they are evaluation prompts{overlap}",
            stacklevel=stacklevel,
        )
        return select_rows(rows, retained)


def _split_words(prompt: Prompt) -> list[str]:
    texts = (
        [prompt] if isinstance(prompt, str) else [_join_words(m["content"]) for m in prompt if m["role"] != "system"]
    )
    return _WORD.findall(" ".join(texts).casefold())


def _join_words(content: str | Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a message, without its pictures."""
    return content if isinstance(content, str) else " ".join(part["text"] for part in content if part["type"] == "text")


def _list_digests(prompt: Prompt) -> list[str]:
    """Return the digests of a prompt's pictures, or "" alone for text."""
    return list({picture.digest for picture in list_pictures(prompt)}) or [""]


def _make_ngrams(words: list[str], n: int) -> Iterator[str]:
    return (" ".join(words[i : i + n]) for i in range(len(words) - n + 1))


# From a source to examples: rows are converted, checked once, and kept in memory or read again each time.


class InMemoryRows:
    """Rows in memory: dicts with `prompt` and other columns, or Examples."""

    fits_in_memory = True
    folder = ""

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
                raise DataError(f"{where}: an Example has its own prompt: rename the column 'prompt'")
            tools = {"tools": row.tools} if row.tools else {}
            return row.source or where, {"prompt": row.prompt, **tools, **row.columns}
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: expected a dict with 'prompt' or an Example, got {type(row).__name__}")
        return where, row


def open_rows(data: Any, name: str = "row", example: str = EXAMPLE) -> Source | None:
    """Open rows given by name or as an object (a list, a table or a `datasets.Dataset`); None for anything else."""
    if isinstance(data, str):
        return open_source(data, example) if is_source(data) else None
    data = table_to_rows(data)
    if is_dataset(data):
        return open_dataset(data, name)
    return InMemoryRows(data, name) if isinstance(data, Sequence) else None


def table_to_rows(data: Any) -> Any:
    """Return the rows of a table of pandas, Polars or pyarrow as dicts, missing values as None; anything else unchanged."""
    if hasattr(data, "to_dicts"):  # Polars
        return data.to_dicts()
    if hasattr(data, "to_pylist") and hasattr(data, "column_names"):  # pyarrow
        return data.to_pylist()
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # pandas
        rows = data.to_dict("records")
        return [{name: None if _is_missing(value) else value for name, value in row.items()} for row in rows]
    return data


def _is_missing(value: Any) -> bool:
    """Return True for pandas' NaN, NaT and NA, which are unequal to themselves or of no type of ours."""
    return type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)


def explain_data(data: Any) -> str:
    """Return how to give data of a kind that is not read as rows; "" for other objects."""
    kind = type(data).__name__
    if isinstance(data, str):
        return ""
    if isinstance(data, Mapping) and data and all(is_dataset(part) for part in data.values()):
        return f"{kind} has splits: give one, data[{next(iter(data))!r}]"
    if isinstance(data, Mapping):
        return f"{kind} is no list of rows: give a list with a dict for each row"
    if hasattr(data, "__iter__") or hasattr(data, "__next__"):
        remedy = "list(data.take(10_000))" if hasattr(data, "take") else "list(data)"
        return f"rows are read several times, in a shuffled order, and {kind} is read once: give {remedy}"
    return ""


def load_examples(source: Source, options: RowOptions, name: str) -> Sequence[Example]:
    """Parse all rows into examples: a list if they fit in memory, else a lazy sequence.

    Raises:
        DataError: See `parse_rows`.
    """
    first: Example | None = None

    def parse(row: Row) -> Example:
        nonlocal first
        example = to_example(row[1], row[0], first)
        first = first or example
        return example

    parsed = parse_rows(source, options, parse, name)
    if source.fits_in_memory:
        return [example for _, example in parsed]
    numbers = array("L", (number for number, _ in parsed))

    def read_again(index: int) -> Example:
        row = options.read(source, numbers[index])
        if row is None:
            raise DataError("the row map leaves out a row that it kept before: make it deterministic")
        return to_example(row[1], row[0])

    return LazyRows(len(numbers), read_again)


def parse_rows(source: Source, options: RowOptions, parse: Callable[[Row], T], name: str) -> Iterator[tuple[int, T]]:
    """Yield (number in the source, parsed row) for all valid rows, and warn about the number of skipped ones.

    Raises:
        DataError: A row is invalid and `skip_bad_rows` is off, or no row is left.
    """
    invalid, used, first_error = 0, 0, ""
    for number in range(len(source)):
        try:
            row = options.read(source, number)
            parsed = None if row is None else parse(row)
        except DataError as error:
            if not options.skip_bad_rows:
                raise
            invalid, first_error = invalid + 1, first_error or str(error)
            continue
        if parsed is not None:
            used += 1
            yield number, parsed
    if invalid:
        warn_of_skipped(name, invalid, len(source), first_error)
    if not used:
        left_out = f"the row map left out {len(source) - invalid}, and {invalid} are invalid"
        raise DataError(f"{name}: no row is left of {len(source)}: {left_out}")


def warn_of_skipped(name: str, count: int, size: int, first_error: str) -> None:
    """Warn about `count` of `size` rows that were left out."""
    warnings.warn(f"{name}: {count} of {size} rows skipped, the first: {first_error}", stacklevel=3)


def to_example(row: Mapping[str, Any], where: str, first: Example | None = None) -> Example:
    """Check a row and convert it to an example; it must have the same columns as `first`.

    Raises:
        DataError: An invalid row, with its location.
    """
    columns = dict(row)
    if "prompt" not in columns:
        names = ", ".join(map(repr, columns)) or "nothing"
        raise DataError(
            f"{where}: no column 'prompt' (it has {names}); rename the column that holds the question, or map "
            "each row with --row-map FILE:NAME"
        )
    for name in ("prompts", "completions", "self"):
        if name in columns:
            raise DataError(f"{where}: rename the column {name!r}: reward functions have an argument of that name")
    if odd := [name for name in columns if not isinstance(name, str)]:
        raise DataError(f"{where}: a column's name must be text, as a reward's argument has; rename {odd[0]!r}")
    prompt = parse_prompt(columns.pop("prompt"), where)
    tools = () if isinstance(prompt, str) else parse_tools(columns.get("tools"), where)
    example = Example(prompt, columns, where, tools=tools)
    # each column reaches the reward functions as one list
    first = first or example
    line = re.search(r":(\d+)$", first.source)
    other = f"line {line[1]}" if line else first.source
    for name in first.columns:
        if name not in columns:
            raise DataError(f"{where}: no column {name!r}, which {other} has; write null where there is no value")
    for name in columns:
        if name not in first.columns:
            raise DataError(f"{where}: column {name!r} is not in {other}; give every row the same columns")
    return example
