"""Calls of tools in what a model says, read as its own chat template has it write them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from policygrad.errors import ModelError
from policygrad.models.control_tokens import replace_surrogates

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_LOOKS_LIKE = re.compile(r"\[?\s*\{\s*\"(name|type|function|parameters|arguments)\"")


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it; half a surrogate pair in it is U+FFFD."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()
    """Arguments without a name, before the others."""
    error: str = ""
    """Why it cannot be read; "" = it can."""

    def __post_init__(self) -> None:
        for part in ("name", "arguments", "positional", "error"):
            object.__setattr__(self, part, replace_surrogates(getattr(self, part)))


class ToolCallParser(Protocol):
    """How a model writes calls."""

    def __call__(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in a turn, in their order; one that cannot be read says why. () = the turn calls nothing."""
        ...


@dataclass(frozen=True)
class TaggedToolCallParser:
    """`<tool_call>…</tool_call>`, as Hermes and Qwen write calls, with JSON inside: {"name": …, "arguments": {…}}.

    Also `f(1, b="x")` inside, for models that have no convention: literals only, nothing is evaluated.
    """

    def __call__(self, text: str) -> tuple[ToolCall, ...]:
        found, said = [], _spoken(text)
        while _OPENS in said:
            inside, closed, rest = said.partition(_OPENS)[2].partition(_CLOSES)
            if closed:
                found.append(_read(inside.strip()))
            else:
                found.append(ToolCall(error=f"the call is not closed by {_CLOSES}"))
            said = rest
        return tuple(found)


@dataclass(frozen=True)
class JsonToolCallParser:
    """A turn that is nothing but JSON, one object, several behind each other, or a list, as Llama 3.1 and Mistral write calls.

    {"name": …, "parameters": {…}} or {"name": …, "arguments": {…}}; `mark` may stand before it, where decoding leaves it in.
    """

    mark: str = ""

    def __call__(self, text: str) -> tuple[ToolCall, ...]:
        said = _spoken(text).strip()
        marked = bool(self.mark) and said.startswith(self.mark)
        said = said.removeprefix(self.mark).strip()
        if not marked and not _LOOKS_LIKE.match(said):
            return ()
        found: list[ToolCall] = []
        while said:
            try:
                value, end = json.JSONDecoder().raw_decode(said)
            except (ValueError, RecursionError) as error:
                return (*found, ToolCall(error=f"the call is no JSON: {error}"))
            found += [_called(one) for one in (value if isinstance(value, list) else [value])]
            said = said[end:].lstrip(" \n\t;,")
        return tuple(found)


@dataclass(frozen=True)
class UnsupportedToolCalls:
    """The template of a model describes tools in a way of its own."""

    model: str

    def __call__(self, text: str) -> tuple[ToolCall, ...]:
        raise ModelError(
            f"how the model of {self.model!r} writes calls is not known from its chat template: give ToolUse(form=…), a function "
            "from the text of a turn to policygrad.ToolCall objects; TaggedToolCallParser() and JsonToolCallParser() in "
            "policygrad.models.tool_calls are two"
        )


TAGGED_PARSER = TaggedToolCallParser()


def get_chat_template(hf: Any) -> str | None:
    """The chat template that a tokenizer of transformers uses where there are tools."""
    template = getattr(hf, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use", template.get("default"))
    return template if isinstance(template, str) else None


@cache
def supports_tools(template: str | None) -> bool:
    """Whether a chat template reads `tools`."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        return any((kind, word) == ("name", "tools") for _, kind, word in Environment().lex(template or ""))
    except TemplateSyntaxError:  # rendering will say where
        return False


@cache
def parser_for_template(template: str | None, model: str = "") -> ToolCallParser:
    """How the model of this template writes calls; tags where the template knows no tools, as `plain_tools` then asks for them.

    Known by what their templates hold: Hermes 2 Pro, Qwen 2.5 and 3 (`<tool_call>` and JSON), Llama 3.1 to 3.3 (`ipython` and
    "parameters"), Mistral 7B 0.3 (`[TOOL_CALLS]` and a list).
    """
    if template is None or not supports_tools(template):
        return TAGGED_PARSER
    if _OPENS in template and "<arg_key>" not in template and "<function=" not in template:
        return TAGGED_PARSER
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return JsonToolCallParser("[TOOL_CALLS]")
    if "ipython" in template and "parameters" in template:
        return JsonToolCallParser("<|python_tag|>")
    return UnsupportedToolCalls(model)


def _spoken(text: str) -> str:
    """What is said after the reasoning; nothing where that has not ended."""
    _, closed, said = text.rpartition("</think>")
    return said if closed or "<think>" not in text else ""


def _read(inside: str) -> ToolCall:
    if not inside.startswith("{"):
        return _as_python(inside)
    try:
        return _called(json.loads(inside))
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is no JSON: {error}")


def _called(value: Any) -> ToolCall:
    """A call from its JSON; arguments may be JSON in a string, as OpenAI's are."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return ToolCall(error='a call is {"name": "…", "arguments": {…}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, error=f"the arguments of {name} are no JSON object")
    return ToolCall(name, arguments)


def _as_python(inside: str) -> ToolCall:
    try:
        node = ast.parse(inside, mode="eval").body
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise ValueError(inside)
        named = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
        return ToolCall(node.func.id, named, tuple(map(ast.literal_eval, node.args)))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ToolCall(error='a call is {"name": "…", "arguments": {…}}')
