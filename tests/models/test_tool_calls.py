"""Tool calls in the formats of different chat templates, and for a model without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policygrad.models.chat.formats import TAGGED, find_format, supports_tools
from policygrad.models.chat.rendering import format_tools, inline_tools
from policygrad.models.chat.tool_calls import (
    TAGGED_PARSER,
    JsonToolCallParser,
)
from policygrad.models.chat.turns import ToolCall

TEMPLATES = Path(__file__).parent / "templates"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SUM = ToolCall("add", {"a": 1, "b": 2})


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", "hermes"),
        ("llama31", "llama3"),
        ("mistral_tools", "mistral_list"),
        ("chatml", "hermes"),
        ("gemma", "hermes"),
        ("phi4", "hermes"),
        ("reasoning", "unknown"),
    ],
)
def test_the_format_follows_the_chat_template(name: str, expected: str) -> None:
    assert find_format(template(name), name).name == expected
    assert supports_tools(template(name)) is (name in ("qwen3", "llama31", "mistral_tools", "reasoning"))


def test_models_without_template_use_tags_and_unknown_formats_say_so() -> None:
    assert find_format(None) == TAGGED
    assert not supports_tools("{{ '# no tools' }}")
    unknown = find_format("{% if tools %}<tool>f{% endif %}", "new").parse("<think>hm</think>anything")
    assert unknown.unread.startswith(
        "the chat template of 'new' has an unknown format for tool calls: name a format of docs/models.md"
    )
    assert (unknown.reasoning, unknown.content, unknown.calls) == ("hm", "anything", ())


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        (TAGGED_PARSER, 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [SUM]),
        (TAGGED_PARSER, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', [SUM]),
        (TAGGED_PARSER, "<tool_call>add(1, b=-2)</tool_call>", [ToolCall("add", {"b": -2}, (1,))]),
        (
            TAGGED_PARSER,
            '<tool_call>{"name": "f"}</tool_call> <tool_call>f()</tool_call>',
            [ToolCall("f"), ToolCall("f")],
        ),
        (TAGGED_PARSER, "<think><tool_call>add(1, 2)</tool_call></think>3", []),
        (TAGGED_PARSER, "<think>not yet <tool_call>f()</tool_call>", []),
        (TAGGED_PARSER, "so far</think><tool_call>f()</tool_call>", [ToolCall("f")]),
        (TAGGED_PARSER, "The answer is {3}.", []),
        (JsonToolCallParser(), '{"name": "add", "parameters": {"a": 1, "b": 2}}', [SUM]),
        (JsonToolCallParser("<|python_tag|>"), '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', [SUM]),
        (JsonToolCallParser(), '[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "f"}]', [SUM, ToolCall("f")]),
        (
            JsonToolCallParser(),
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            [ToolCall("f"), ToolCall("g")],
        ),
        (JsonToolCallParser(), "The sum is 3.", []),
        (JsonToolCallParser(), "[1, 2]", []),
        (JsonToolCallParser(), "{3}", []),
    ],
)
def test_calls_are_read(form: Any, text: str, calls: list[ToolCall]) -> None:
    assert list(form(text)) == calls


@pytest.mark.parametrize(
    ("form", "text", "error"),
    [
        (TAGGED_PARSER, '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "no JSON"),
        (TAGGED_PARSER, '<tool_call>{"name": "add", "arguments": {"a": 1}}', "not closed by </tool_call>"),
        (TAGGED_PARSER, '<tool_call>{"arguments": {"a": 1}}</tool_call>', 'a call is {"name"'),
        (
            TAGGED_PARSER,
            '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
            "arguments of add are no JSON object",
        ),
        (
            TAGGED_PARSER,
            '<tool_call>{"name": "add", "arguments": "1 and 2"}</tool_call>',
            "arguments of add are no JSON object",
        ),
        (TAGGED_PARSER, "<tool_call>add(1, open('/etc/passwd'))</tool_call>", 'a call is {"name"'),
        (TAGGED_PARSER, "<tool_call>add(*x)</tool_call>", 'a call is {"name"'),
        (TAGGED_PARSER, "<tool_call>1 + 2</tool_call>", 'a call is {"name"'),
        (TAGGED_PARSER, "<tool_call></tool_call>", 'a call is {"name"'),
        (TAGGED_PARSER, "<tool_call>" + "(" * 10_000 + "</tool_call>", 'a call is {"name"'),
        (TAGGED_PARSER, '<tool_call>{"name":' + "[" * 100_000 + "</tool_call>", "no JSON"),
        (JsonToolCallParser(), '{"name": "add", "parameters": {"a": 1}', "no JSON"),
        (JsonToolCallParser("[TOOL_CALLS]"), "[TOOL_CALLS] add", "no JSON"),
        (JsonToolCallParser(), '[{"name": 3}]', 'a call is {"name"'),
    ],
)
def test_unreadable_calls_carry_an_error(form: Any, text: str, error: str) -> None:
    (call,) = form(text)
    assert error in call.error


def test_an_unreadable_call_does_not_hide_earlier_ones() -> None:
    first, second = TAGGED_PARSER("<tool_call>f()</tool_call><tool_call>f(</tool_call>")
    assert (first.error, bool(second.error)) == ("", True)
    first, second = JsonToolCallParser()('{"name": "f"} and')
    assert (first.error, bool(second.error)) == ("", True)


def test_tools_are_inlined_for_a_template_without_them() -> None:
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "<tool_call>…"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    first, output, answers = inline_tools(messages, [ADD])
    assert first["role"] == "user"
    assert first["content"] == f"{format_tools([ADD])}\n\n1 + 2?"
    assert '{"type": "function", "function": {"name": "add"' in first["content"]
    assert output == messages[1]
    assert answers["role"] == "user"
    assert answers["content"] == "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
