"""Parsing tool calls in a model's output, in the format of its chat template."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from policygrad.errors import ModelError
from policygrad.models.control_tokens import replace_surrogates

_OPENING_TAG, _CLOSING_TAG = "<tool_call>", "</tool_call>"
_MISTRAL_MARK = "[TOOL_CALLS]"
_USAGE = 'a call is {"name": "…", "arguments": {…}}'
_LOOKS_LIKE_CALL = re.compile(r"\[?\s*\{\s*\"(name|type|function|parameters|arguments)\"")


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it, with lone surrogates replaced by U+FFFD."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()
    """Arguments without a name, which come first."""
    error: str = ""
    """Why the call cannot be parsed; "" = it can."""

    def __post_init__(self) -> None:
        for name in ("name", "arguments", "positional", "error"):
            object.__setattr__(self, name, replace_surrogates(getattr(self, name)))


ToolCallParser = Callable[[str], tuple[ToolCall, ...]]
"""Returns the calls in the text of a turn, in order; those that cannot be parsed carry an error. () = no calls."""


@dataclass(frozen=True)
class TaggedToolCallParser:
    """Parses `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the format of Hermes and Qwen.

    For models without a format, `f(1, b="x")` between the tags is accepted too: literals only, nothing is evaluated.
    """

    def __call__(self, text: str) -> tuple[ToolCall, ...]:
        calls, text = [], _strip_reasoning(text)
        while _OPENING_TAG in text:
            content, closed, text = text.partition(_OPENING_TAG)[2].partition(_CLOSING_TAG)
            content = content.strip()
            if not closed:
                calls.append(ToolCall(error=f"the call is not closed by {_CLOSING_TAG}"))
            elif not content.startswith("{"):
                calls.append(_parse_python_call(content))
            else:
                try:
                    calls.append(_parse_call(json.loads(content)))
                except (ValueError, RecursionError) as error:
                    calls.append(ToolCall(error=f"the call is no JSON: {error}"))
        return tuple(calls)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of calls with arguments by name."""
        texts = (_dump({"name": call.name, "arguments": dict(call.arguments)}) for call in calls)
        return "\n".join(f"{_OPENING_TAG}\n{text}\n{_CLOSING_TAG}" for text in texts)


@dataclass(frozen=True)
class JsonToolCallParser:
    """Parses a turn that consists of JSON: one object, several in a row or a list, the format of Llama 3.1 and Mistral.

    {"name": …, "parameters": {…}} or {"name": …, "arguments": {…}}; `mark` may precede it, if decoding keeps that token.
    """

    mark: str = ""

    def __call__(self, text: str) -> tuple[ToolCall, ...]:
        text = _strip_reasoning(text).strip()
        marked = bool(self.mark) and text.startswith(self.mark)
        text = text.removeprefix(self.mark).strip()
        if not marked and not _LOOKS_LIKE_CALL.match(text):
            return ()
        calls: list[ToolCall] = []
        while text:
            try:
                value, end = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError) as error:
                return (*calls, ToolCall(error=f"the call is no JSON: {error}"))
            calls += map(_parse_call, value if isinstance(value, list) else [value])
            text = text[end:].lstrip(" \n\t;,")
        return tuple(calls)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of calls with arguments by name: a list after Mistral's mark, or objects as Llama writes them."""
        if self.mark == _MISTRAL_MARK:
            return f"{self.mark} {_dump([{'name': call.name, 'arguments': dict(call.arguments)} for call in calls])}"
        return "; ".join(_dump({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)


@dataclass(frozen=True)
class UnsupportedToolCalls:
    """Raises for a model whose template has an unknown format for tool calls."""

    model: str

    def __call__(self, text: str) -> tuple[ToolCall, ...]:
        raise ModelError(
            f"the chat template of {self.model!r} has an unknown format for tool calls: give ToolUse(parser=…), a function from "
            "the text of a turn to policygrad.ToolCall objects, such as TaggedToolCallParser() and JsonToolCallParser() in "
            "policygrad.models.tool_calls"
        )


TAGGED_PARSER = TaggedToolCallParser()


def is_unfinished_thought(text: str, *, opened: bool) -> bool:
    """Return True when a turn has not ended its reasoning, so that it calls nothing. opened: the prompt begins the reasoning."""
    return opened and "</think>" not in text


def get_chat_template(hf: Any) -> str | None:
    """Return the chat template that a transformers tokenizer uses with tools."""
    template = getattr(hf, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use", template.get("default"))
    return template if isinstance(template, str) else None


@cache
def supports_tools(template: str | None) -> bool:
    """Return True when a chat template reads `tools`."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        return any((kind, word) == ("name", "tools") for _, kind, word in Environment().lex(template or ""))
    except TemplateSyntaxError:  # rendering reports it
        return False


@cache
def parser_for_template(template: str | None, model: str = "") -> ToolCallParser:
    """Return the parser for a model's chat template; tagged calls if it does not support tools, as `inline_tools` requests.

    Recognised by their content: Hermes 2 Pro, Qwen 2.5 and 3 (`<tool_call>` and JSON), Llama 3.1 to 3.3 (`ipython` and
    "parameters"), Mistral 7B 0.3 (`[TOOL_CALLS]` and a list).
    """
    if template is None or not supports_tools(template):
        return TAGGED_PARSER
    if _OPENING_TAG in template and "<arg_key>" not in template and "<function=" not in template:
        return TAGGED_PARSER
    if _MISTRAL_MARK in template and "[ARGS]" not in template:
        return JsonToolCallParser(_MISTRAL_MARK)
    if "ipython" in template and "parameters" in template:
        return JsonToolCallParser("<|python_tag|>")
    return UnsupportedToolCalls(model)


def _strip_reasoning(text: str) -> str:
    """Return the text after the reasoning; "" if the reasoning has not ended."""
    _, closed, answer = text.rpartition("</think>")
    return answer if closed or "<think>" not in text else ""


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parse_call(value: Any) -> ToolCall:
    """Parse a call in JSON; the arguments may be JSON in a string, as in OpenAI's format."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return ToolCall(error=_USAGE)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, error=f"the arguments of {name} are no JSON object")
    return ToolCall(name, arguments)


def _parse_python_call(text: str) -> ToolCall:
    try:
        node = ast.parse(text, mode="eval").body
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise ValueError(text)
        named = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
        return ToolCall(node.func.id, named, tuple(map(ast.literal_eval, node.args)))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ToolCall(error=_USAGE)
