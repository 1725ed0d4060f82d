"""Rows in memory as a task: each has a `prompt`; every other column reaches the reward."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from random import Random
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.split import is_held_out
from policygrad.tasks.types import Example, Prompt

HOLD_OUT_FROM = 32  # rows; with fewer, training uses them all and evaluation repeats them
_RESERVED = ("prompts", "completions")  # what a reward function is given besides the columns


class RowsTask:
    """Rows in memory, shuffled anew each epoch by (seed, epoch).

    Held out are the rows whose prompt's hash says so (1 in 16), or those given as held out, whose prompts
    are then left out of training. With fewer than 32 rows, or when the hash picks none or all of them, training uses
    every row and `held_out_is_train` is True.
    """

    rewards: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    def __init__(self, name: str, train: Sequence[Example], held_out: Sequence[Example], *, seed: int = 0) -> None:
        self.name = name
        self.seed = seed
        self.held_out_is_train = not held_out
        self._train = tuple(train)
        self._held_out = tuple(
            sorted(held_out or train, key=lambda row: sha256(prompt_key(row.prompt).encode()).digest())
        )
        self.rows = (*self._train, *held_out)
        self._order = lru_cache(maxsize=2)(self._permutation)

    @classmethod
    def of(
        cls, name: str, rows: list[Example], seed: int, held_out: tuple[str, list[Example]] | None = None
    ) -> "RowsTask":
        """Splits the rows, or takes the held-out ones with their name. Raises DataError where columns or prompts do not fit."""
        if held_out is not None:
            other, others = held_out
            _same_columns(name, rows, other, others)
            return cls(name, _without(rows, others, name, other), others, seed=seed)
        chosen = [is_held_out(prompt_key(row.prompt)) for row in rows]
        if len(rows) < HOLD_OUT_FROM or not any(chosen) or all(chosen):
            return cls(name, rows, (), seed=seed)
        train = [row for row, out in zip(rows, chosen, strict=True) if not out]
        return cls(name, train, [row for row, out in zip(rows, chosen, strict=True) if out], seed=seed)

    def train(self, index: int) -> Example:
        if index < 0:
            raise IndexError(f"training examples are numbered from 0, got {index}")
        epoch, place = divmod(index, len(self._train))
        return self._train[self._order(epoch)[place]]

    def held_out(self, count: int) -> list[Example]:
        """At most `count` rows, in the fixed order of their prompts' hashes; all of them when there are fewer."""
        return list(self._held_out[: max(count, 0)])

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


def prompt_key(prompt: Prompt) -> str:
    """The text that decides whether a prompt is held out: itself, or its messages as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)


def to_examples(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Example]:
    """(where it stands, row) for every row, checked. Raises DataError that says where."""
    examples: list[Example] = []
    for where, row in rows:
        examples.append(_to_example(dict(row), where))
        _check_columns(examples[0], examples[-1])
    return examples


def read_rows(rows: Sequence[Any], name: str = "row") -> list[Example]:
    """Rows of Python's own: dicts with `prompt` and columns, or Examples, checked like those of a file.

    Raises:
        DataError: no rows, or one that cannot be used, as `row 12`, counted from 1.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []
    for number, row in enumerate(rows, start=1):
        where = f"{name} {number}"
        if isinstance(row, Example):
            if "prompt" in row.columns:
                raise DataError(f"{where}: a column may not be called 'prompt', the example has one; rename it")
            found.append((row.source or where, {"prompt": row.prompt, **row.columns}))
        elif isinstance(row, Mapping):
            found.append((where, row))
        else:
            raise DataError(f"{where}: a dict with 'prompt' or an Example is needed, got {type(row).__name__}")
    if not found:
        raise DataError(f"no {name}s: a task needs at least one prompt, as in [{{'prompt': '1+1=', 'answer': '2'}}]")
    return to_examples(found)


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
    file, _, line = first.source.rpartition(":")
    where, other = row.source, f"line {line}" if file else first.source
    for name in first.columns:
        if name not in row.columns:
            raise DataError(f"{where}: no column {name!r}, which {other} has; write null where there is no value")
    for name in row.columns:
        if name not in first.columns:
            raise DataError(f"{where}: column {name!r} is not in {other}; give every row the same columns")


def _same_columns(path: str, rows: list[Example], other: str, others: list[Example]) -> None:
    if missing := sorted(set(rows[0].columns) ^ set(others[0].columns)):
        raise DataError(
            f"{other}: its columns differ from those of {path} in {', '.join(missing)}; rewards need them all"
        )


def _without(rows: list[Example], others: list[Example], path: str, other: str) -> list[Example]:
    """Training rows whose prompt is not evaluated on."""
    evaluated = {prompt_key(row.prompt) for row in others}
    kept = [row for row in rows if prompt_key(row.prompt) not in evaluated]
    if not kept:
        raise DataError(
            f"{other}: holds every prompt of {path}, so none is left to train on; give another held_out file"
        )
    if len(kept) < len(rows):
        count = len(rows) - len(kept)
        warnings.warn(f"{path}: {count} rows left out of training, {other} evaluates their prompts", stacklevel=4)
    return kept
