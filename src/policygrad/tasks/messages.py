"""Chat messages and tools in rows: checked once, and written as every chat template reads them.

Logs of agents hold what OpenAI's API sends: calls as a list, arguments as JSON text, `content` null, and null for whatever a
message lacks. A message leaves here with a content, calls of the form {"type": "function", "function": {"name", "arguments"}},
arguments as an object, and without keys that are null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.errors import DataError
from policygrad.models.chat.messages import MESSAGE_WEIGHT
from policygrad.tasks.base import Message, Prompt
from policygrad.tasks.pictures import parse_text_parts


def parse_prompt(value: Any, where: str) -> Prompt:
    """Parse a prompt: non-empty text or chat messages. Raises DataError."""
    if isinstance(value, str):
        prompt: Prompt = value
    elif isinstance(value, (list, tuple)):
        messages = (parse_message(m, f"{where}: message {i} of 'prompt'") for i, m in enumerate(value, 1))
        prompt = tuple({k: v for k, v in message.items() if k != MESSAGE_WEIGHT} for message in messages)
    else:
        kind = type(value).__name__
        raise DataError(f"{where}: 'prompt' must be text or a list of chat messages, got {kind}")
    if not prompt:
        raise DataError(f"{where}: 'prompt' is empty; a model needs at least one token to continue")
    check_encodable(prompt, f"{where}: 'prompt'")
    return prompt


def parse_message(message: Any, where: str) -> Message:
    """Check a chat message: a role, a content that only an assistant's calls or a tool may lack, and what else its template reads.

    `place_pictures` has made the parts of prompts tuples; a list is a completion's, and becomes text.

    Raises:
        DataError: Something is missing or has a wrong type.
    """
    example = '{"role": "user", "content": "..."}'
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"{where} must be an object like {example}, got {str(message)[:60]}")
    parsed = {key: value for key, value in message.items() if value is not None}
    calls = parsed.pop("tool_calls", None)
    if legacy := parsed.pop("function_call", None):  # OpenAI's form before tool_calls
        calls = calls or [legacy]
    if calls:
        parsed["tool_calls"] = _parse_calls(calls, f"{where}: 'tool_calls'")
    content = parsed.get("content", "" if calls or parsed["role"] == "tool" else None)
    if content is None and "content" in message:
        raise DataError(f"{where}: 'content' must be text, got NoneType")
    if content is None:
        raise DataError(f"{where} must be an object like {example}, got {str(message)[:60]}")
    if isinstance(content, list):
        content = parse_text_parts(content, where)
    if not isinstance(content, (str, tuple)):
        raise DataError(f"{where}: 'content' must be text, got {type(content).__name__}")
    if parsed.get(MESSAGE_WEIGHT, 1) not in (0, 1):
        value = str(parsed[MESSAGE_WEIGHT])[:60]
        raise DataError(f"{where}: {MESSAGE_WEIGHT!r} must be 0 (not learned from) or 1, got {value}")
    return parsed | {"content": content}


def _parse_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Parse a message's tool calls. Raises DataError."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where} must be a list of calls, got {type(value).__name__}")
    parsed = []
    for number, call in enumerate(value, 1):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f'{where}: call {number} must be an object like {{"type": "function", "function": {{"name": "f", "arguments": '
                f'{{"x": 1}}}}}}, got {str(call)[:60]}'
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: the arguments of call {number} are no JSON: {error}") from error
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            raise DataError(
                f"{where}: the arguments of call {number} must be an object, or one as JSON text, not "
                f"{type(arguments).__name__} {str(arguments)[:60]}"
            )
        others = {k: v for k, v in call.items() if v is not None and k not in ("function", "name", "arguments")}
        parsed.append(
            {"type": "function"} | others | {"function": {"name": function["name"], "arguments": dict(arguments)}}
        )
    return parsed


def parse_tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Parse a row's `tools`, JSON schemas of functions or the JSON text of their list; () = none.

    Raises:
        DataError: Something else.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: 'tools' is text that is no JSON: {error}") from error
    if not value:
        return ()
    items: list[Any] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [None]
    tools = [json.loads(item) if _is_json_object(item) else item for item in items]
    for number, tool in enumerate(tools, 1):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where}: 'tools' must be a list of functions' schemas, as in "
                '[{"type": "function", "function": {"name": "f", "parameters": {}}}], which the chat template shows; entry '
                f"{number} is {str(items[number - 1] if items != [None] else value)[:60]}. Rename a column of something else"
            )
    check_encodable(tools, f"{where}: 'tools'")
    return tuple(tool if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools)


def _is_json_object(value: Any) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False


def check_encodable(value: Any, where: str) -> None:
    """Raise DataError when a text, or one inside of messages, contains a lone surrogate, which UTF-8 cannot encode."""
    for text in _list_texts(value):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            raise DataError(f"{where} contains half a surrogate pair (\\u{code:04x}), which is not text") from None


def _list_texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for inner in pair for text in _list_texts(inner)]
    return [text for inner in value for text in _list_texts(inner)] if isinstance(value, (list, tuple)) else []
