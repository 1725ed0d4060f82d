"""Preferences as rows: {"prompt", "chosen", "rejected"}, and the split that no prompt straddles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from policygrad.errors import DataError
from policygrad.tasks.base import Prompt, is_eval_prompt
from policygrad.tasks.rows import (
    MIN_ROWS_TO_SPLIT,
    RowOptions,
    open_rows,
    parse_message,
    parse_prompt,
    parse_rows,
    prompt_key,
)
from policygrad.tasks.sources import Row, open_source

PREFERENCE_EXAMPLE = '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}'


@dataclass(frozen=True)
class PreferencePair:
    """Two completions of one prompt, as texts; people (or a verifier) preferred `chosen`."""

    prompt: Prompt
    chosen: str
    rejected: str
    source: str = field(default="", compare=False)
    """Where it stands, e.g. `pairs.jsonl:12`, for error messages."""


class HasPrompt(Protocol):
    """What can be split by its prompt."""

    @property
    def prompt(self) -> Prompt: ...


AnyRow = TypeVar("AnyRow", bound=HasPrompt)
T = TypeVar("T")


def read_preferences(path: str, options: RowOptions | None = None) -> list[PreferencePair]:
    """Every pair of a file; columns besides the three are left alone.

    A side is text, or the assistant's message ({"role": "assistant", "content": …}, alone or as a list of one).
    Raises DataError naming file and line for a missing or empty side, two equal sides, or a wrong type.
    """
    return read_rows(path, _parse_preference, PREFERENCE_EXAMPLE, options)


def read_rows(path: str, parse: Callable[[Row], T], example: str, options: RowOptions | None) -> list[T]:
    """Every row of the data of that name, parsed. Raises DataError."""
    source = open_rows(path, example=example) or open_source(path, example)
    return [row for _, row in parse_rows(source, options or RowOptions(), parse, path)]


def _parse_preference(found: Row) -> PreferencePair:
    where, row = found
    for name in ("prompt", "chosen", "rejected"):
        if name not in row:
            have = ", ".join(map(repr, row)) or "nothing"
            raise DataError(f"{where}: no column {name!r} (it has {have}); a line is {PREFERENCE_EXAMPLE}")
    prompt = parse_prompt(row["prompt"], where)
    chosen, rejected = (_side(row[name], prompt, f"{where}: {name!r}") for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise DataError(f"{where}: 'chosen' and 'rejected' are equal, which says nothing; remove the line")
    return PreferencePair(prompt, chosen, rejected, where)


def _side(value: Any, prompt: Prompt, where: str) -> str:
    if isinstance(value, str):
        return parse_answer(value, where)
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise DataError(f"{where} must be text or the assistant's message, got {type(value).__name__}")
    if isinstance(prompt, str):
        raise DataError(f"{where} is a chat message and 'prompt' is text: give both as text, or both as messages")
    parsed = [parse_message(message, f"{where}: message {i + 1}") for i, message in enumerate(messages)]
    if len(parsed) != 1 or parsed[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in parsed) or "nothing"
        raise DataError(
            f"{where} must be one message of the assistant, got {roles}; the turns before it belong to 'prompt'"
        )
    return parse_answer(parsed[0]["content"], where)


def parse_answer(value: Any, where: str) -> str:
    """Text that says something. Raises DataError."""
    text = parse_text(value, where)
    if not text.strip():
        raise DataError(f"{where} is empty; give its text, or remove the line")
    return text


def parse_text(value: Any, where: str) -> str:
    """Text that can be encoded. Raises DataError."""
    if not isinstance(value, str):
        raise DataError(f"{where} must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise DataError(f"{where} holds half a surrogate pair (\\u{code:04x}), which is not text") from None
    return value


@dataclass(frozen=True)
class TrainEvalSplit:
    """Training and held-out rows, by places in `rows`; no prompt is in both."""

    train: tuple[int, ...]
    eval: tuple[int, ...]
    eval_on_train: bool
    """Too few prompts to hold any out: measured on the training rows."""


def split_by_prompt(rows: Sequence[HasPrompt]) -> TrainEvalSplit:
    """Held out are the rows whose prompt's hash says so (1 in 16); with fewer than 32 rows, or when the hash picks none or all
    of them, training uses every row and so does the measurement."""
    chosen = [is_eval_prompt(prompt_key(row.prompt)) for row in rows]
    everything = tuple(range(len(rows)))
    if len(rows) < MIN_ROWS_TO_SPLIT or not any(chosen) or all(chosen):
        return TrainEvalSplit(everything, everything, True)
    return TrainEvalSplit(
        tuple(i for i in everything if not chosen[i]),
        tuple(i for i in everything if chosen[i]),
        False,
    )


def exclude_eval_prompts(rows: Sequence[AnyRow], others: Sequence[HasPrompt], path: str, other: str) -> list[AnyRow]:
    """Training rows whose prompt is not measured on. Raises DataError when none is left."""
    measured = {prompt_key(row.prompt) for row in others}
    kept = [row for row in rows if prompt_key(row.prompt) not in measured]
    if not kept:
        raise DataError(f"{other}: holds every prompt of {path}, so none is left to train on; give another --eval-data")
    return kept


def group_by_prompt(rows: Sequence[HasPrompt], places: Sequence[int]) -> list[tuple[int, ...]]:
    """The places of the rows, those of one prompt together, in the order of the prompts' first rows."""
    found: dict[str, list[int]] = {}
    for place in places:
        found.setdefault(prompt_key(rows[place].prompt), []).append(place)
    return [tuple(group) for group in found.values()]


# Demonstrations as rows: {"messages": […]}, or {"prompt", "completion"}.

DEMONSTRATION_EXAMPLE = (
    '{"prompt": "1+1=", "completion": "2"} or {"messages": [{"role": "user", "content": "1+1="}, …]}'
)


@dataclass(frozen=True)
class Demonstration:
    """What a model is shown, and what it is to say.

    `rest` is the completion of a text prompt, or the messages from the assistant's first turn to its last; `prompt` is what
    comes before.
    """

    prompt: Prompt
    completion: str | tuple[dict[str, str], ...]
    source: str = field(default="", compare=False)
    """Where it stands, e.g. `chats.jsonl:12`, for error messages."""


def read_demonstrations(path: str, options: RowOptions | None = None) -> list[Demonstration]:
    """Every demonstration of a file; columns besides those are left alone.

    Raises DataError naming file and line for what is missing, of a wrong type, or has no turn of the assistant.
    """
    return read_rows(path, _parse_demonstration, DEMONSTRATION_EXAMPLE, options)


def _parse_demonstration(found: Row) -> Demonstration:
    where, row = found
    if "messages" in row and "completion" in row:
        raise DataError(f"{where}: both 'messages' and 'completion'; keep one of them")
    if "messages" in row:
        return _conversation(row["messages"], where)
    for name in ("prompt", "completion"):
        if name not in row:
            have = ", ".join(map(repr, row)) or "nothing"
            raise DataError(
                f"{where}: no column 'messages', and no {name!r} (it has {have}); a line is {DEMONSTRATION_EXAMPLE}"
            )
    prompt = parse_prompt(row["prompt"], where)
    if isinstance(prompt, str):
        return Demonstration(prompt, parse_text(row["completion"], f"{where}: 'completion'"), where)
    answer = row["completion"]
    last = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    return _conversation([*prompt, *last], where)


def _conversation(value: Any, where: str) -> Demonstration:
    if not isinstance(value, list):
        raise DataError(f"{where}: 'messages' must be a list of chat messages, got {type(value).__name__}")
    messages = [parse_message(message, f"{where}: message {i + 1}") for i, message in enumerate(value)]
    for i, message in enumerate(messages):
        parse_text(message["content"], f"{where}: message {i + 1}")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages)) or "none"
        raise DataError(f"{where}: no turn of the assistant to learn from (roles: {roles}); add one")
    if turns[0] == 0:
        raise DataError(f"{where}: the conversation begins with the assistant; put what it answers before its turn")
    return Demonstration(tuple(messages[: turns[0]]), tuple(messages[turns[0] : turns[-1] + 1]), where)
