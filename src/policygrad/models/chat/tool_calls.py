"""Parsing tool calls in JSON or in Python's syntax, as Hermes, Llama, Mistral, LFM and Olmo write them between their marks."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from policygrad.models.chat.turns import END_OF_THOUGHT, THOUGHT, ToolCall

_OPENING_TAG, _CLOSING_TAG = "<tool_call>", "</tool_call>"
MISTRAL_MARK = "[TOOL_CALLS]"
_USAGE = 'a call is {"name": "…", "arguments": {…}}'
_LOOKS_LIKE_CALL = re.compile(r"\[?\s*\{\s*\"(name|type|function|parameters|arguments)\"")
_LOOKS_LIKE_PYTHON_CALL = re.compile(r"\[\s*[A-Za-z_]\w*(\.\w+)*\(")
_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's words for Python's, which stand within Python's syntax where a template writes an object as JSON."""


@dataclass(frozen=True)
class TaggedToolCallParser:
    """Parses `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the format of Hermes and Qwen.

    For models without a format, `f(1, b="x")` between the tags is accepted too: literals only, nothing is evaluated.
    """

    mark: str = _OPENING_TAG

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
                    calls.append(parse_call(json.loads(content)))
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
            calls += map(parse_call, value if isinstance(value, list) else [value])
            text = text[end:].lstrip(" \n\t;,")
        return tuple(calls)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of calls with arguments by name: a list after Mistral's mark, or objects as Llama writes them."""
        if self.mark == MISTRAL_MARK:
            return f"{self.mark} {_dump([{'name': call.name, 'arguments': dict(call.arguments)} for call in calls])}"
        return "; ".join(_dump({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)


@dataclass(frozen=True)
class PythonToolCallParser:
    """Parses calls in Python's syntax between two marks: `[f(a=1), g(b="x")]`, or one call a line.

    Literals only, nothing is evaluated; `true`, `false` and `null` may be JSON's.
    """

    mark: str = "<|tool_call_start|>"
    end: str = "<|tool_call_end|>"
    in_list: bool = True
    """Whether the calls are written as one list, rather than one a line."""

    def __call__(self, text: str) -> tuple[ToolCall, ...]:
        text = _strip_reasoning(text)
        if not self.mark:  # the turn is a list of calls, or it has none
            return tuple(_parse_python_calls(text.strip())) if _LOOKS_LIKE_PYTHON_CALL.match(text.strip()) else ()
        calls = list[ToolCall]()
        while self.mark in text:
            content, closed, text = text.partition(self.mark)[2].partition(self.end)
            if not closed:
                calls.append(ToolCall(error=f"the call is not closed by {self.end}"))
            else:
                calls += _parse_python_calls(content.strip())
        return tuple(calls)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of calls with arguments by name."""
        texts = [f"{c.name}({', '.join(f'{key}={value!r}' for key, value in c.arguments.items())})" for c in calls]
        inner = f"[{', '.join(texts)}]" if self.in_list else "\n{}\n".format("\n".join(texts))
        return f"{self.mark}{inner}{self.end}"


@runtime_checkable
class WritesCalls(Protocol):
    """A parser that also writes calls."""

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of calls with arguments by name."""


TAGGED_PARSER = TaggedToolCallParser()


def parse_call(value: Any) -> ToolCall:
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


def _strip_reasoning(text: str) -> str:
    """Return the text after the reasoning; "" if the reasoning has not ended."""
    _, closed, answer = text.rpartition(END_OF_THOUGHT)
    return answer if closed or THOUGHT not in text else ""


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parse_python_calls(text: str) -> Iterator[ToolCall]:
    """Yield the calls of a list, of several separated by commas, or of lines."""
    try:
        tree = ast.parse(text)
        values = [statement.value if isinstance(statement, ast.Expr) else statement for statement in tree.body]
        nodes = [n for value in values for n in (value.elts if isinstance(value, ast.List | ast.Tuple) else [value])]
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        yield ToolCall(error="the calls cannot be read: write [name(argument=value), …]")
        return
    if not nodes:
        yield ToolCall(error="the calls cannot be read: write [name(argument=value), …]")
    for node in nodes:
        yield _read_python_call(node, "a call is name(argument=value)")


def _parse_python_call(text: str) -> ToolCall:
    try:
        return _read_python_call(ast.parse(text, mode="eval").body, _USAGE)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ToolCall(error=_USAGE)


def _read_python_call(node: ast.AST, usage: str) -> ToolCall:
    try:
        if not (isinstance(node, ast.Call) and (name := _read_name(node.func))):
            return ToolCall(error=usage)
        named = {word.arg: _read_literal(word.value) for word in node.keywords if word.arg is not None}
        if len(named) < len(node.keywords):
            return ToolCall(error=usage)
        return ToolCall(name, named, tuple(map(_read_literal, node.args)))
    except (ValueError, TypeError, MemoryError, RecursionError):
        return ToolCall(error=usage)


def _read_name(node: ast.AST) -> str:
    """Return `f` or `module.f`; "" for anything else."""
    if isinstance(node, ast.Attribute):
        inner = _read_name(node.value)
        return inner and f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class _Constants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Constant(_CONSTANTS[node.id]), node) if node.id in _CONSTANTS else node


def _read_literal(node: ast.AST) -> Any:
    return ast.literal_eval(_Constants().visit(node))
