"""Demonstrations as rows: {"messages": […]}, or {"prompt", "completion"}."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.preferences import parse_text, read
from policygrad.tasks.reading import Reading
from policygrad.tasks.rows import parse_message, parse_prompt
from policygrad.tasks.source import Row
from policygrad.tasks.types import Prompt

EXAMPLE = '{"prompt": "1+1=", "completion": "2"} or {"messages": [{"role": "user", "content": "1+1="}, …]}'


@dataclass(frozen=True)
class Demonstration:
    """What a model is shown, and what it is to say.

    `rest` is the completion of a text prompt, or the messages from the assistant's first turn to its last; `prompt` is what
    comes before.
    """

    prompt: Prompt
    rest: str | tuple[dict[str, str], ...]
    source: str = field(default="", compare=False)
    """Where it stands, e.g. `chats.jsonl:12`, for error messages."""


def read_demonstrations(path: str, reading: Reading | None = None) -> list[Demonstration]:
    """Every demonstration of a file; columns besides those are left alone.

    Raises DataError naming file and line for what is missing, of a wrong type, or has no turn of the assistant.
    """
    return read(path, _parse, EXAMPLE, reading)


def _parse(found: Row) -> Demonstration:
    where, row = found
    if "messages" in row and "completion" in row:
        raise DataError(f"{where}: both 'messages' and 'completion'; keep one of them")
    if "messages" in row:
        return _conversation(row["messages"], where)
    for name in ("prompt", "completion"):
        if name not in row:
            have = ", ".join(map(repr, row)) or "nothing"
            raise DataError(f"{where}: no column 'messages', and no {name!r} (it has {have}); a line is {EXAMPLE}")
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
