"""Rows as a task: each has a `prompt`; every other column reaches the reward. They may stay where they are."""

from __future__ import annotations

import json
import re
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from random import Random
from typing import Any, TypeVar, overload

from policygrad.errors import DataError
from policygrad.tasks.base import Example, Prompt, is_eval_prompt
from policygrad.tasks.sources import DatasetRows, Row, Source, TableSource, is_dataset, is_source, open_source

# Training prompts that say what a held-out prompt says: the same words, or n of them in a row.

_WORD = re.compile(r"\w+|[-+*/^=<>%]")  # 3 + 4 is not 3 * 4
TEMPLATE_SHARE = 0.1
"""What more than this share of the held-out prompts have in common, and more than one, is how they ask and not what."""


@dataclass(frozen=True)
class NgramOverlap:
    """What held-out prompts say. Case, punctuation but signs of arithmetic, and system messages do not count.

    n-grams of words are what Brown et al. 2020 (GPT-3, arXiv:2005.14165, app. C) look for between training data and benchmarks,
    with n from 8 to 13; what the prompts share as a template is left out here, since every training prompt may have it too.
    """

    n: int
    ngrams: frozenset[str]
    exact_prompts: frozenset[str]

    @classmethod
    def from_prompts(cls, prompts: Iterable[Prompt], n: int) -> NgramOverlap:
        """Of these held-out prompts."""
        said = [_words(prompt) for prompt in prompts]
        often = Counter(gram for words in said for gram in set(_grams(words, n)))
        most = max(1.0, TEMPLATE_SHARE * len(said))
        return cls(
            n,
            frozenset(gram for gram, count in often.items() if count <= most),
            frozenset(map(" ".join, filter(None, said))),
        )

    def __contains__(self, prompt: Prompt) -> bool:
        """Whether a prompt has the words of a held-out one, or n of them in a row."""
        words = _words(prompt)
        return " ".join(words) in self.exact_prompts or any(gram in self.ngrams for gram in _grams(words, self.n))


def _words(prompt: Prompt) -> list[str]:
    said = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if m["role"] != "system"]
    return _WORD.findall(" ".join(said).casefold())


def _grams(words: list[str], n: int) -> Iterator[str]:
    return (" ".join(words[i : i + n]) for i in range(len(words) - n + 1))


MIN_ROWS_TO_SPLIT = 32  # rows; with fewer, training uses them all and evaluation repeats them
_RESERVED = ("prompts", "completions")  # what a reward function is given besides the columns


class Subset(Sequence[Example]):
    """Some of other rows, by their numbers, each fetched when it is asked for."""

    def __init__(self, rows: Sequence[Example], places: Sequence[int]) -> None:
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Subset: ...
    def __getitem__(self, index: int | slice) -> Example | Subset:
        if isinstance(index, slice):
            return Subset(self._rows, self._places[index])
        return self._rows[self._places[index]]


class Concatenated(Sequence[Example]):
    """One sequence of rows behind another."""

    def __init__(self, first: Sequence[Example], second: Sequence[Example]) -> None:
        self._parts = first, second

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        first, second = self._parts
        index = range(len(self))[index]
        return first[index] if index < len(first) else second[index - len(first)]


class ShuffledEpochs:
    """Rows by number, without end, shuffled anew each epoch by (seed, epoch)."""

    def __init__(self, rows: Sequence[Example], seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, index: int) -> Example:
        if index < 0:
            raise IndexError(f"training examples are numbered from 0, got {index}")
        epoch, place = divmod(index, len(self._rows))
        return self._rows[self._order(epoch)[place]]

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


class RowsTask:
    """Rows shuffled anew each epoch by (seed, epoch).

    Held out are the rows whose prompt's hash says so (1 in 16), or those given as held out, whose prompts
    are then left out of training. With fewer than 32 rows, or when the hash picks none or all of them, training uses
    every row and `held_out_is_train` is True.
    """

    rewards: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    def __init__(self, name: str, train: Sequence[Example], held_out: Sequence[Example], *, seed: int = 0) -> None:
        self.name = name
        self.seed = seed
        self.eval_on_train = not held_out
        self._train = ShuffledEpochs(train, seed)
        self._held_out = sort_by_hash(held_out or train)
        self.rows: Sequence[Example] = Concatenated(train, held_out)

    @classmethod
    def from_rows(
        cls,
        name: str,
        rows: Sequence[Example],
        seed: int,
        eval_data: tuple[str, Sequence[Example]] | None = None,
        decontaminate: int = 0,
    ) -> RowsTask:
        """Splits the rows, or takes the held-out ones with their name. Raises DataError where columns or prompts do not fit.

        apart: leave out training rows with so many words in a row of a held-out prompt's (`overlap.py`); 0 = only equal prompts.
        """
        if eval_data is not None:
            other, others = eval_data
            _same_columns(name, rows, other, others)
            kept = _apart(_without(rows, others, name, other), others, name, decontaminate)
            return cls(name, kept, others, seed=seed)
        kept, others = split_train_eval(rows)
        return cls(name, _apart(kept, others, name, decontaminate) if others else kept, others, seed=seed)

    def train_example(self, index: int) -> Example:
        return self._train[index]

    def eval_examples(self, count: int) -> list[Example]:
        """At most `count` rows, in the fixed order of their prompts' hashes; all of them when there are fewer."""
        return list(self._held_out[: max(count, 0)])


def split_train_eval(rows: Sequence[Example]) -> tuple[Sequence[Example], Sequence[Example]]:
    """(rows to train on, held-out ones) by the prompt's hash; all and none where they are few, or it takes none or all."""
    chosen = [is_eval_prompt(prompt_key(row.prompt)) for row in rows]
    if len(rows) < MIN_ROWS_TO_SPLIT or not any(chosen) or all(chosen):
        return rows, ()
    places = [[i for i, out in enumerate(chosen) if out is side] for side in (False, True)]
    return Subset(rows, places[0]), Subset(rows, places[1])


def sort_by_hash(rows: Sequence[Example]) -> Subset:
    """In the order of their prompts' hashes, the same for every seed."""
    keys = [sha256(prompt_key(row.prompt).encode()).digest() for row in rows]
    return Subset(rows, sorted(range(len(keys)), key=keys.__getitem__))


def prompt_key(prompt: Prompt) -> str:
    """The text that decides whether a prompt is held out: itself, or its messages as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)


def to_example(row: Mapping[str, Any], where: str, first: Example | None = None) -> Example:
    """A row, checked, against the first one too: all have the same columns. Raises DataError that says where."""
    example = _to_example(dict(row), where)
    _check_columns(first or example, example)
    return example


def _to_example(row: dict[str, Any], where: str) -> Example:
    if "prompt" not in row:
        have = ", ".join(map(repr, row)) or "nothing"
        raise DataError(f"{where}: no column 'prompt' (it has {have}); rename the column that holds the question")
    for name in _RESERVED:
        if name in row:
            raise DataError(f"{where}: a column may not be called {name!r}, reward functions get that name; rename it")
    prompt = parse_prompt(row.pop("prompt"), where)
    return Example(prompt, row, where)


def parse_prompt(value: Any, where: str) -> Prompt:
    """A prompt as text or as chat messages. Raises DataError for anything else, or an empty one."""
    if isinstance(value, str):
        prompt: Prompt = value
    elif isinstance(value, (list, tuple)):
        prompt = tuple(
            parse_message(message, f"{where}: message {i + 1} of 'prompt'") for i, message in enumerate(value)
        )
    else:
        kind = type(value).__name__
        raise DataError(f"{where}: 'prompt' must be text or a list of chat messages, got {kind}")
    if not prompt:
        raise DataError(f"{where}: 'prompt' is empty; a model needs at least one token to continue")
    try:
        prompt_key(prompt).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise DataError(f"{where}: 'prompt' holds half a surrogate pair (\\u{code:04x}), which is not text") from None
    return prompt


def parse_message(message: Any, where: str) -> dict[str, str]:
    """A chat message: role, content, and whatever else is text. Raises DataError."""
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise DataError(f'{where} must be an object like {{"role": "user", "content": "..."}}, got {str(message)[:60]}')
    for key, value in message.items():
        if not isinstance(value, str):
            raise DataError(f"{where}: {key!r} must be text, got {type(value).__name__}")
    return message


def _check_columns(first: Example, row: Example) -> None:
    """All rows have the same columns, since each column reaches the reward as one list."""
    line = re.search(r":(\d+)$", first.source)
    where, other = row.source, f"line {line[1]}" if line else first.source
    for name in first.columns:
        if name not in row.columns:
            raise DataError(f"{where}: no column {name!r}, which {other} has; write null where there is no value")
    for name in row.columns:
        if name not in first.columns:
            raise DataError(f"{where}: column {name!r} is not in {other}; give every row the same columns")


def _same_columns(path: str, rows: Sequence[Example], other: str, others: Sequence[Example]) -> None:
    if missing := sorted(set(rows[0].columns) ^ set(others[0].columns)):
        raise DataError(
            f"{other}: its columns differ from those of {path} in {', '.join(missing)}; rewards need them all"
        )


def _without(rows: Sequence[Example], others: Sequence[Example], path: str, other: str) -> Sequence[Example]:
    """Training rows whose prompt is not evaluated on."""
    evaluated = {prompt_key(row.prompt) for row in others}
    kept = [i for i, row in enumerate(rows) if prompt_key(row.prompt) not in evaluated]
    if not kept:
        raise DataError(
            f"{other}: holds every prompt of {path}, so none is left to train on; give another held_out file"
        )
    if len(kept) < len(rows):
        count = len(rows) - len(kept)
        warnings.warn(f"{path}: {count} rows left out of training, {other} evaluates their prompts", stacklevel=4)
    return Subset(rows, kept)


def _apart(rows: Sequence[Example], others: Sequence[Example], path: str, n: int) -> Sequence[Example]:
    """Training rows whose prompts do not overlap with what is evaluated."""
    if not n:
        return rows
    held_out = NgramOverlap.from_prompts((row.prompt for row in others), n)
    kept = [i for i, row in enumerate(rows) if row.prompt not in held_out]
    if not kept:
        raise DataError(
            f"{path}: every training prompt has {n} words in a row of a held-out one: ask for more words, or take other rows"
        )
    if len(kept) < len(rows):
        count = len(rows) - len(kept)
        said = f"{path}: {count} of {len(rows)} rows left out of training, which have {n} words in a row of a held-out prompt"
        warnings.warn(said, stacklevel=4)
    return Subset(rows, kept)


# From a source to what is read of it: rows are mapped, checked once, refused or left out, and kept or fetched again.

EXAMPLE = '{"prompt": "1+1=", "answer": "2"}'
RowMap = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""From a row to the row as it is used, or None for a row that is left out."""
T = TypeVar("T")


@dataclass(frozen=True)
class RowOptions:
    """How rows are read."""

    row_map: RowMap | None = None
    """Called with every row whenever it is read, so that it has to say the same each time."""
    skip_bad_rows: bool = False
    """Leave out, and count, what would be refused."""
    decontaminate: int = 0
    """Leave out of training, and count, what has so many words in a row of a held-out prompt; 0 = equal prompts only."""

    def apply(self, row: Row) -> Row | None:
        """The row that is used; None for one that the map leaves out. Raises DataError where the map does."""
        where, columns = row
        if self.row_map is not None:
            try:
                mapped = self.row_map(dict(columns))
            except Exception as error:  # whatever somebody's function may raise
                raise DataError(f"{where}: the map raised {type(error).__name__}: {error}") from error
            if mapped is None:
                return None
            if not isinstance(mapped, Mapping):
                raise DataError(
                    f"{where}: the map returned {type(mapped).__name__}: return a row, a dict, or None to leave it out"
                )
            columns = mapped
        return where, add_answer_column(columns)


def add_answer_column(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """verl keeps what is right in `reward_model.ground_truth`: it is the column `answer` too, where there is none."""
    found = row.get("reward_model")
    if "answer" in row or not isinstance(found, Mapping) or "ground_truth" not in found:
        return row
    return {**row, "answer": found["ground_truth"]}


class InMemoryRows:
    """Rows that are in memory already: dicts with `prompt` and columns, or Examples."""

    fits_in_memory = True

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


def open_rows(given: Any, name: str = "row", example: str = EXAMPLE) -> Source | None:
    """The rows that were given, by name or as an object: a list, or a `datasets.Dataset`; None of anything else."""
    if isinstance(given, str):
        return open_source(given, example) if is_source(given) else None
    if is_dataset(given):
        return TableSource(DatasetRows(given), name)
    return InMemoryRows(given, name) if isinstance(given, Sequence) else None


def parse_rows(source: Source, options: RowOptions, parse: Callable[[Row], T], name: str) -> Iterator[tuple[int, T]]:
    """(number in the source, row) of all rows that can be used; those that cannot are counted, where that is asked for.

    Raises:
        DataError: a row that cannot be used; none that can.
    """
    bad, left_out, used, first = 0, 0, 0, ""
    for index in range(len(source)):
        try:
            row = options.apply(source[index])
            found = None if row is None else parse(row)
        except DataError as error:
            if not options.skip_bad_rows:
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


def load_examples(source: Source, options: RowOptions, name: str) -> Sequence[Example]:
    """The rows as examples: kept, or of large data fetched again each time.

    Raises:
        DataError: as `parsed`.
    """
    first: list[Example] = []

    def parse(row: Row) -> Example:
        found = to_example(row[1], row[0], first[0] if first else None)
        first[:] = first or [found]
        return found

    found = parse_rows(source, options, parse, name)
    if source.fits_in_memory:
        return [example for _, example in found]
    return LazyExamples(source, options, array("L", (index for index, _ in found)))


def read_examples(name: str, options: RowOptions | None = None) -> Sequence[Example]:
    """The examples of a file. Raises DataError."""
    return load_examples(open_source(name, EXAMPLE), options or RowOptions(), name)


class LazyExamples(Sequence[Example]):
    """Rows that are read anew each time they are asked for: in memory are their numbers."""

    def __init__(self, source: Source, reading: RowOptions, places: Sequence[int]) -> None:
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
        row = self._reading.apply(self._source[self._places[index]])
        if row is None:
            raise DataError("the map leaves out a row that it did not leave out before: let it say the same each time")
        return to_example(row[1], row[0])
