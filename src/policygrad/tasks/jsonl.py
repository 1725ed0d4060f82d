"""A JSONL file as a task: one JSON object per line with `prompt`; every other column reaches the reward."""

import json
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.split import is_held_out
from policygrad.tasks.types import Example, Prompt

HOLD_OUT_FROM = 32  # rows; with fewer, training uses them all and evaluation repeats them
_RESERVED = ("prompts", "completions")  # what a reward function is given besides the columns
_UTF8_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = (b"\xff\xfe", b"\xfe\xff")  # UTF-16 in both orders; UTF-32 little-endian begins like the first


class JsonlTask:
    """The rows of a file, shuffled anew each epoch by (seed, epoch).

    Held out are the rows whose prompt's hash says so (1 in 16), or those of another file (`held_out`), whose prompts
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
    def load(cls, path: str, *, seed: int = 0, held_out: str | None = None) -> "JsonlTask":
        """Read and check the whole file. Raises DataError naming file and line."""
        rows = read_jsonl(path)
        if held_out is not None:
            others = read_jsonl(held_out)
            _same_columns(path, rows, held_out, others)
            return cls(path, _without(rows, others, path, held_out), others, seed=seed)
        chosen = [is_held_out(prompt_key(row.prompt)) for row in rows]
        if len(rows) < HOLD_OUT_FROM or not any(chosen) or all(chosen):
            return cls(path, rows, (), seed=seed)
        train = [row for row, out in zip(rows, chosen, strict=True) if not out]
        return cls(path, train, [row for row, out in zip(rows, chosen, strict=True) if out], seed=seed)

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


def read_jsonl(path: str) -> list[Example]:
    """Every row of a JSONL file. Blank lines are skipped; everything else that is not a row is an error."""
    rows: list[Example] = []
    for where, row in read_objects(path, '{"prompt": "1+1=", "answer": "2"}'):
        rows.append(_parse_row(row, where))
        _check_columns(rows[0], rows[-1], where, rows[0].source.rpartition(":")[2])
    return rows


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


def _parse_object(line: bytes, where: str, example: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
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


def _parse_row(row: dict[str, Any], where: str) -> Example:
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
    elif isinstance(value, list):
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


def _check_columns(first: Example, row: Example, where: str, first_line: str) -> None:
    """All rows have the same columns, since each column reaches the reward as one list."""
    for name in first.columns:
        if name not in row.columns:
            raise DataError(
                f"{where}: no column {name!r}, which line {first_line} has; write null where there is no value"
            )
    for name in row.columns:
        if name not in first.columns:
            raise DataError(f"{where}: column {name!r} is not in line {first_line}; give every row the same columns")


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
