"""The formats in which models write their turns: reasoning, tool calls and what they say, as text.

A model's format is the `response_template` of its tokenizer (transformers' own description of a format), or the one that its chat
template is recognised by. Most are data, a file each in `formats/`; in code are those that `response_template` cannot say.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Protocol, runtime_checkable

from policygrad.errors import ModelError
from policygrad.models.chat.declared import DeclaredFormat
from policygrad.models.chat.messages import Tools
from policygrad.models.chat.tool_calls import (
    MISTRAL_MARK,
    TAGGED_PARSER,
    JsonToolCallParser,
    PythonToolCallParser,
    WritesCalls,
)
from policygrad.models.chat.turns import THOUGHT, AssistantMessage, ToolCallParser, split_thought
from policygrad.utils.plugins import find_plugin, list_plugin_names, load_plugin


@runtime_checkable
class ChatFormat(Protocol):
    """How a model writes a turn. Another package adds one as `format.NAME` (`policygrad.utils.plugins`)."""

    @property
    def name(self) -> str: ...

    def parse(self, text: str, opening: str = "", tools: Tools = ()) -> AssistantMessage:
        """Read a sampled turn. It never raises: what cannot be read is a call with an error.

        Args:
            text: What the policy wrote, without the token that ends the turn.
            opening: What the chat template has written of this turn already, such as `<think>`.
            tools: The schemas of the tools, by which arguments that are written as plain text are typed.
        """

    def find_opening(self, context: str) -> str:
        """Return what a rendered conversation that ends where the assistant goes on contains of its turn already."""


@runtime_checkable
class RecognisesTemplates(Protocol):
    """A format of another package that knows the chat templates it belongs to."""

    def recognises(self, template: str) -> bool:
        """Return True for a chat template of this format."""


@dataclass(frozen=True)
class TextFormat:
    """Reasoning between `<think>` and `</think>`, and calls that a function finds in what follows."""

    name: str
    parser: ToolCallParser = TAGGED_PARSER

    def parse(self, text: str, opening: str = "", tools: Tools = ()) -> AssistantMessage:
        opened = self.find_opening(opening) != ""
        message = split_thought(text, opened=opened)
        if message.is_thinking or not (calls := self.parser(text)):
            return message
        before, found, _ = message.content.partition(getattr(self.parser, "mark", "") or text)
        return replace(message, content=before.rstrip() if found else "", calls=calls)

    def find_opening(self, context: str) -> str:
        return THOUGHT if context.rstrip().endswith(THOUGHT) else ""


@dataclass(frozen=True)
class UnknownFormat:
    """Reads reasoning, and says why calls cannot be read."""

    model: str
    name: str = "unknown"

    def parse(self, text: str, opening: str = "", tools: Tools = ()) -> AssistantMessage:
        reason = (
            f"the chat template of {self.model!r} has an unknown format for tool calls: name a format of docs/models.md as "
            "response_template in its tokenizer_config.json, such as hermes, or give ToolUse(parser=…), a function from the text "
            "of a turn to policygrad.ToolCall objects, such as JsonToolCallParser() in policygrad.models.chat.tool_calls"
        )
        return replace(split_thought(text, opened=self.find_opening(opening) != ""), unread=reason)

    def find_opening(self, context: str) -> str:
        return TAGGED.find_opening(context)


TAGGED = TextFormat("hermes")
"""For models without a format of their own, which `inline_tools` requests."""
_IN_CODE = {
    "hermes": TAGGED,
    "llama3": TextFormat("llama3", JsonToolCallParser("<|python_tag|>")),
    "mistral_list": TextFormat("mistral_list", JsonToolCallParser(MISTRAL_MARK)),
    "lfm2": TextFormat("lfm2", PythonToolCallParser()),
    "olmo3": TextFormat("olmo3", PythonToolCallParser("<function_calls>", "</function_calls>", in_list=False)),
    "pythonic": TextFormat("pythonic", PythonToolCallParser("", "")),
}


@dataclass(frozen=True)
class FormatRow:
    """What a format is, and how it is recognised."""

    name: str
    models: str
    example: str
    """A call of the format."""
    mark: str
    """What its calls, and no other text, contain; "" = there is nothing of the kind."""
    contains: tuple[str, ...]
    """Texts that a chat template of the format has, all of them."""
    lacks: tuple[str, ...] = ()
    """Texts that it does not have."""


_PYTHON = "NAME(KEY=VALUE)"
_ROWS_IN_CODE = (
    FormatRow(
        "lfm2",
        "LFM 2",
        f"<|tool_call_start|>[{_PYTHON}]<|tool_call_end|>",
        "<|tool_call_start|>",
        ("<|tool_list_start|>",),
    ),
    FormatRow("lfm2", "LFM 2.5", f"<|tool_call_start|>[{_PYTHON}]<|tool_call_end|>", "", ("<|tool_call_start|>",)),
    FormatRow(
        "olmo3", "Olmo 3", f"<function_calls>{_PYTHON}</function_calls>", "<function_calls>", ("<function_calls>",)
    ),
    FormatRow(
        "hermes",
        "Hermes, Qwen 2.5 and 3, Granite 4, and all without a format of their own",
        '<tool_call>{"name": "NAME", "arguments": {"KEY": VALUE}}</tool_call>',
        "<tool_call>",
        ("<tool_call>",),
    ),
    FormatRow(
        "mistral_list",
        "Mistral 7B 0.3 to Small 3.1",
        '[TOOL_CALLS] [{"name": "NAME", "arguments": {"KEY": VALUE}}]',
        "",
        (MISTRAL_MARK,),
    ),
    FormatRow(
        "llama3",
        "Llama 3.1 to 3.3, Llama 4",
        '{"name": "NAME", "parameters": {"KEY": VALUE}}',
        "<|python_tag|>",
        ("ipython", "parameters"),
    ),
    FormatRow("pythonic", "Llama 3.2 and 4, asked for Python", f"[{_PYTHON}]", "", ("[func_name1(",)),
)


def list_formats() -> tuple[FormatRow, ...]:
    """Return the formats in the order in which a chat template is compared with them."""
    return (*(row for _, row in _read_declared().values()), *_ROWS_IN_CODE)


def find_foreign_mark(text: str) -> str:
    """Return what a text without a readable call has of a call in another format; "" = nothing."""
    return next((row.mark for row in list_formats() if row.mark and row.mark in text), "")


def list_format_names() -> list[str]:
    """Return the names of all formats, those of other packages last."""
    return [*sorted({*_IN_CODE, *_read_declared()}), *list_plugin_names("format")]


def get_format(name: str) -> ChatFormat:
    """Return a format by name. Raises ModelError."""
    if name in _IN_CODE:
        return _IN_CODE[name]
    if name in (declared := _read_declared()):
        return declared[name][0]
    if (plugin := find_plugin("format", name)) is not None:
        loaded = load_plugin(plugin)
        if not isinstance(loaded, ChatFormat):
            raise ModelError(
                f"format {name!r} of the package {plugin.package} is no ChatFormat: it needs name, parse and find_opening"
            )
        return loaded
    raise ModelError(f"there is no format {name!r}: there are {', '.join(list_format_names())}")


@cache
def find_format(template: str | None, model: str = "") -> ChatFormat:
    """Return the format that a chat template asks for; tagged calls if it does not support tools, as `inline_tools` requests."""
    if not supports_tools(template):
        return TAGGED
    text = template or ""
    for row in list_formats():
        if all(word in text for word in row.contains) and not any(word in text for word in row.lacks):
            return get_format(row.name)
    for name in list_plugin_names("format"):
        found = get_format(name)
        if isinstance(found, RecognisesTemplates) and found.recognises(text):
            return found
    return UnknownFormat(model)


def find_declared_format(response_template: Any, template: str | None, model: str = "") -> ChatFormat:
    """Return the format of a tokenizer that has a `response_template`, a description or the name of a format (`get_format`); None
    or one that cannot be read: by its chat template. Raises ModelError for an unknown name."""
    if isinstance(response_template, str):
        return get_format(response_template)
    if isinstance(response_template, dict) and supports_tools(template):
        own = DeclaredFormat("response_template", response_template)
        if not own.find_fault():
            return own
    return find_format(template, model)


@cache
def supports_tools(template: str | None) -> bool:
    """Return True when a chat template reads `tools`."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        return any((kind, word) == ("name", "tools") for _, kind, word in Environment().lex(template or ""))
    except TemplateSyntaxError:  # rendering reports it
        return False


@cache
def _read_declared() -> dict[str, tuple[DeclaredFormat, FormatRow]]:
    """Return the formats that are data, with what they are recognised by."""
    result = {}
    folder = files("policygrad.models.chat") / "formats"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            data = tomllib.loads(file.read_text(encoding="utf-8"))
            name = file.name.removesuffix(".toml")
            declared = DeclaredFormat(name, data["response_template"], data.get("has_plain_arguments", False))
            texts = data["models"], data["example"], data["mark"]
            result[name] = declared, FormatRow(name, *texts, tuple(data["contains"]), tuple(data.get("lacks", ())))
    return result


def write_calls(format: ChatFormat, calls: Sequence[Any]) -> str | None:
    """Return calls as text, for a template that does not show them; None = the format cannot say."""
    parser = format.parser if isinstance(format, TextFormat) else None
    return parser.write(calls) if isinstance(parser, WritesCalls) else None
