"""Rows for supervised training: preference pairs and demonstrations, split so that no prompt is in both halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from policygrad.errors import DataError
from policygrad.models.chat.messages import MESSAGE_WEIGHT
from policygrad.tasks.base import Message, Prompt, prompt_key
from policygrad.tasks.messages import check_encodable, parse_message, parse_prompt, parse_tools
from policygrad.tasks.rows import HasPrompt, RowOptions, open_rows, parse_rows, split_indices
from policygrad.tasks.sources import Row, open_source
from policygrad.utils.message_parts import content_text

PREFERENCE_EXAMPLE = '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}'
DEMONSTRATION_EXAMPLE = (
    '{"prompt": "1+1=", "completion": "2"} or {"messages": [{"role": "user", "content": "1+1="}, …]}'
)
PromptRow = TypeVar("PromptRow", bound=HasPrompt)
T = TypeVar("T")


@dataclass(frozen=True)
class PreferencePair:
    """Two completions of one prompt, as text; `chosen` was preferred by people or by a verifier."""

    prompt: Prompt
    chosen: str
    rejected: str
    source: str = field(default="", compare=False)  # Location, e.g. `pairs.jsonl:12`, for error messages.

    @classmethod
    def from_row(cls, row: Row) -> PreferencePair:
        """Parse a row. Raises DataError."""
        where, columns = row
        _require_columns(row, ("prompt", "chosen", "rejected"), "no column {name}", PREFERENCE_EXAMPLE)
        prompt, responses = parse_prompt(columns["prompt"], where), list[str]()
        for name in ("chosen", "rejected"):
            value, place = columns[name], f"{where}: {name!r}"
            if not isinstance(value, str):
                messages = [value] if isinstance(value, dict) else value
                if not isinstance(messages, list):
                    raise DataError(f"{place} must be text or an assistant message, got {type(value).__name__}")
                if isinstance(prompt, str):
                    raise DataError(f"{place} is a chat message and 'prompt' is text: give both in one form")
                parsed = [parse_message(message, f"{place}: message {i}") for i, message in enumerate(messages, 1)]
                if len(parsed) != 1 or parsed[0]["role"] != "assistant":
                    roles = ", ".join(message["role"] for message in parsed) or "nothing"
                    raise DataError(
                        f"{place} must be one assistant message, not {roles}; put earlier turns in 'prompt'"
                    )
                value = content_text(parsed[0]["content"])
            check_encodable(value, place)
            if not value.strip():
                raise DataError(f"{place} is empty; give its text, or remove the line")
            responses.append(value)
        chosen, rejected = responses
        if chosen == rejected:
            raise DataError(f"{where}: 'chosen' and 'rejected' are equal, which is no preference; remove the line")
        return cls(prompt, chosen, rejected, where)


def read_preferences(path: str, options: RowOptions | None = None) -> list[PreferencePair]:
    """Read the preference pairs of a file; further columns are ignored.

    A response is text, or one assistant message ({"role": "assistant", "content": …}, alone or in a list).

    Raises:
        DataError: A response that is missing, empty or of a wrong type, or two equal ones, with file and line.
    """
    return _read_rows(path, PreferencePair.from_row, PREFERENCE_EXAMPLE, options)


def _read_rows(path: str, parse: Callable[[Row], T], example: str, options: RowOptions | None) -> list[T]:
    source = open_rows(path, example=example) or open_source(path, example)
    return [row for _, row in parse_rows(source, options or RowOptions(), parse, path)]


def _require_columns(row: Row, names: Sequence[str], missing: str, example: str) -> None:
    """Raise DataError for the first missing column. missing: the message's wording, with {name}."""
    where, columns = row
    for name in names:
        if name not in columns:
            present = ", ".join(map(repr, columns)) or "nothing"
            raise DataError(f"{where}: {missing.format(name=repr(name))} (it has {present}); a line is {example}")


@dataclass(frozen=True)
class Demonstration:
    """A prompt, and the completion to learn.

    `completion` continues a text prompt, or holds the messages from the first assistant turn that is learned to the last.
    """

    prompt: Prompt
    completion: str | tuple[Message, ...]
    source: str = field(default="", compare=False)  # Location, e.g. `chats.jsonl:12`, for error messages.
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions' schemas that the chat template shows."""

    @classmethod
    def from_row(cls, row: Row) -> Demonstration:
        """Parse a row. Raises DataError."""
        where, columns = row
        if columns.get("messages") is not None and columns.get("completion") is not None:
            raise DataError(f"{where}: both 'messages' and 'completion'; keep one of them")
        if columns.get("messages") is not None or ("messages" in columns and "completion" not in columns):
            tools = parse_tools(columns.get("tools"), where)
            return cls.from_messages(_list_messages(columns["messages"], "messages", where), (), where, tools)
        missing = "no column 'messages', and no {name}"
        _require_columns(row, ("prompt", "completion"), missing, DEMONSTRATION_EXAMPLE)
        prompt, completion = parse_prompt(columns["prompt"], where), columns["completion"]
        if not isinstance(prompt, str):
            tools = parse_tools(columns.get("tools"), where)
            turns = [completion] if isinstance(completion, Mapping) else completion
            if not isinstance(turns, list):
                turns = [{"role": "assistant", "content": completion}]
            return cls.from_messages(_list_messages(turns, "completion", where), prompt, where, tools)
        if columns.get("tools"):
            raise DataError(
                f"{where}: 'tools' are shown by the chat template, and 'prompt' is text: give the prompt as messages, or write the "
                "tools into the text and rename the column"
            )
        if not isinstance(completion, str):
            raise DataError(f"{where}: 'completion' must be text, got {type(completion).__name__}")
        check_encodable(completion, f"{where}: 'completion'")
        return cls(prompt, completion, where)

    @classmethod
    def from_messages(
        cls, messages: Sequence[Message], prompt: Sequence[Message], where: str, tools: tuple[Mapping[str, Any], ...]
    ) -> Demonstration:
        """Split messages, which follow a prompt, at their first assistant turn that is learned. Raises DataError."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [i for i in turns if messages[i].get(MESSAGE_WEIGHT, 1)]
        if not learned:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages)) or "none"
            reason = f"all have the {MESSAGE_WEIGHT} 0" if turns else f"roles: {roles}"
            raise DataError(f"{where}: no assistant turn to learn from ({reason}); add one")
        if not prompt and turns[0] == 0:
            raise DataError(f"{where}: the conversation begins with the assistant; put what it answers before its turn")
        before = ({k: v for k, v in message.items() if k != MESSAGE_WEIGHT} for message in messages[: learned[0]])
        return cls((*prompt, *before), tuple(messages[learned[0] : learned[-1] + 1]), where, tools)


def _list_messages(value: Any, name: str, where: str) -> list[Message]:
    """Parse the messages of a column. Raises DataError."""
    if not isinstance(value, list):
        raise DataError(f"{where}: {name!r} must be a list of chat messages, got {type(value).__name__}")
    place = where if name == "messages" else f"{where}: {name!r}"
    messages = [parse_message(message, f"{place}: message {i}") for i, message in enumerate(value, 1)]
    for i, message in enumerate(messages, 1):
        check_encodable(message, f"{place}: message {i}")
    return messages


def read_demonstrations(path: str, options: RowOptions | None = None) -> list[Demonstration]:
    """Read the demonstrations of a file; further columns are ignored.

    Raises:
        DataError: A column that is missing or of a wrong type, or no assistant turn, with file and line.
    """
    return _read_rows(path, Demonstration.from_row, DEMONSTRATION_EXAMPLE, options)


# Splitting by prompt.


@dataclass(frozen=True)
class TrainEvalSplit:
    """Indices of the training and evaluation rows; no prompt is in both."""

    train: tuple[int, ...]
    eval: tuple[int, ...]
    eval_on_train: bool
    """True when there are too few prompts to hold any out, so that evaluation uses the training rows."""


def split_by_prompt(rows: Sequence[HasPrompt]) -> TrainEvalSplit:
    """Split rows by a hash of their prompt (1 in 16 for evaluation).

    With fewer than 32 rows, or when the hash selects none or all of them, both halves are all rows.
    """
    train, evaluated = split_indices(rows)
    return TrainEvalSplit(tuple(train), tuple(evaluated or train), not evaluated)


def exclude_eval_prompts(
    rows: Sequence[PromptRow], eval_rows: Sequence[HasPrompt], path: str, eval_path: str
) -> list[PromptRow]:
    """Return the training rows whose prompts are not evaluated.

    Raises:
        DataError: No row is left.
    """
    evaluated = {prompt_key(row.prompt) for row in eval_rows}
    train = [row for row in rows if prompt_key(row.prompt) not in evaluated]
    if not train:
        raise DataError(
            f"{eval_path}: contains every prompt of {path}, so none is left to train on; give another --eval-data"
        )
    return train


def group_by_prompt(rows: Sequence[HasPrompt], indices: Sequence[int]) -> list[tuple[int, ...]]:
    """Group the indices of rows with the same prompt, in the order in which the prompts first occur."""
    groups: dict[str, list[int]] = {}
    for index in indices:
        groups.setdefault(prompt_key(rows[index].prompt), []).append(index)
    return [tuple(group) for group in groups.values()]
