"""Formats that a `response_template` describes, as tokenizers of today's models carry it and transformers reads it.

https://huggingface.co/docs/transformers/main/en/chat_response_parsing
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from policygrad.models.chat.messages import Tools
from policygrad.models.chat.turns import END_OF_THOUGHT, THOUGHT, AssistantMessage, ToolCall

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Keys that templates use for what the model thinks."""


@dataclass(frozen=True)
class DeclaredFormat:
    """A format in the words of a response template: fields, and what opens and closes each."""

    name: str
    response_template: Mapping[str, Any]
    has_plain_arguments: bool = False
    """Arguments are written without quotes: `3` is a number or a text as the tool's schema says, or else what it is in JSON."""

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def _loaded(self) -> Any:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        return load_response_template(dict(self.response_template))

    def find_fault(self) -> str:
        """Return why the description cannot be read, "" if it can."""
        try:
            self._loaded  # noqa: B018
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return str(error)
        return ""

    def parse(self, text: str, opening: str = "", tools: Tools = ()) -> AssistantMessage:
        from transformers.utils.chat_parsing import parse_response

        if END_OF_THOUGHT in text and THOUGHT not in opening + text.partition(END_OF_THOUGHT)[0]:
            opening += THOUGHT  # as `Tokenizer.parse_turn` gives it; a text alone may lack what came before it
        try:
            parsed = parse_response(text, self._loaded, prefix=opening, tools=[dict(tool) for tool in tools] or None)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return AssistantMessage(text, calls=(ToolCall(error=f"the call cannot be read: {_shorten(error)}"),))
        reasoning = next((parsed[key] for key in REASONING_FIELDS if isinstance(parsed.get(key), str)), "")
        content = parsed.get("content") or ""
        calls = [self._read_call(item, tools) for item in _flatten(parsed.get("tool_calls"))]
        if calls and not self._is_closed(text):
            calls[-1] = ToolCall(calls[-1].name, error="the call is not closed")
        is_thinking = THOUGHT in opening and END_OF_THOUGHT not in opening + text
        if not (content or reasoning or calls):
            content = text
        return AssistantMessage(str(content), reasoning, tuple(calls), is_thinking)

    def find_opening(self, context: str) -> str:
        opening = self._loaded.truncate_past_last_anchor(context)
        if opening == context:  # it is a text without turns, or begins within one
            return THOUGHT if context.rstrip().endswith(THOUGHT) else ""
        return str(opening)

    def _is_closed(self, text: str) -> bool:
        field = self._loaded.fields["tool_calls"]
        if field.open_re is None or field.close_re is None:
            return True
        last = max((match.end() for match in field.open_re.finditer(text)), default=0)
        return field.close_re.search(text, last) is not None

    def _read_call(self, value: Any, tools: Tools) -> ToolCall:
        function = value.get("function") if isinstance(value, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            return ToolCall(error="the call is no JSON object with a name and arguments")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                return ToolCall(name, error=f"the arguments of {name} are no JSON: {_shorten(error)}")
        if not isinstance(arguments, Mapping):
            return ToolCall(name, error=f"the arguments of {name} are no JSON object")
        if self.has_plain_arguments:
            known = _list_typed(name, tools)
            arguments = {key: item if key in known else _guess(item) for key, item in arguments.items()}
        return ToolCall(name, arguments)


def _flatten(value: Any) -> list[Any]:
    """Return calls, of which a field that is a list itself gives several."""
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    return [inner for item in items for inner in (item if isinstance(item, list) else [item])]


def _list_typed(name: str, tools: Tools) -> frozenset[str]:
    """Return the parameters of a tool whose type is known."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return frozenset(key for key, schema in properties.items() if isinstance(schema, Mapping) and schema)
    return frozenset()


def _guess(value: Any) -> Any:
    """Return a text's value if it is JSON, else the text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _shorten(error: Exception) -> str:
    text = str(error).partition("\nContent:")[0].partition("\nOriginal:")[0]
    return text if len(text) < 200 else f"{text[:199]}…"
