"""Tools of every type: what a template is told, and in which form their calls return."""

from __future__ import annotations

from typing import Any

import pytest

from policygrad.models.chat.turns import ToolCall
from policygrad.proxy.formats import CHAT, MESSAGES, RESPONSES
from policygrad.proxy.requests import ApiFormat, ChatChoice, ChatReply, ChatRequest

USER = [{"role": "user", "content": "Go"}]
SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {"task": {}}}}
CODEX = [
    {"type": "function", "name": "exec_command", "parameters": {"type": "object"}, "strict": False},
    {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [SPAWN]},
    {"type": "web_search", "external_web_access": False},
]
"""Of each type one, as Codex 0.171 sends them."""
OF_THE_API = [
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
]


def ask(api: ApiFormat, tools: list[dict[str, Any]], **more: Any) -> ChatRequest:
    question = {"input": USER} if api is RESPONSES else {"messages": USER}
    needed = {"max_tokens": 9} if api is MESSAGES else {}
    return api.parse({"model": "m", "tools": tools, **question, **needed, **more})


def answer(request: ChatRequest, *calls: ToolCall) -> ChatReply:
    numbers = tuple(f"c{i}" for i in range(len(calls)))
    return ChatReply((ChatChoice("", "tool_calls", (1,), (0.0,), calls=calls, call_ids=numbers),), (1,))


def names(request: ChatRequest) -> list[str]:
    return [tool["function"]["name"] for tool in request.tools]


def test_what_codex_offers_is_described_and_called_in_its_own_form() -> None:
    request = ask(RESPONSES, CODEX)
    assert names(request) == ["exec_command", "agents__spawn"]
    assert request.tools[1]["function"]["parameters"] == SPAWN["parameters"]
    assert request.other_fields == ("tools.web_search",)
    calls = ToolCall("agents__spawn", {"task": "x"}), ToolCall("exec_command", {"cmd": "ls"})
    first, second = RESPONSES.render(request, answer(request, *calls))["output"]
    assert (first["type"], first["namespace"], first["name"]) == ("function_call", "agents", "spawn")
    assert first["arguments"] == '{"task": "x"}'
    assert (second["name"], "namespace" in second) == ("exec_command", False)


def test_tools_that_the_api_defines_are_called_by_its_items() -> None:
    request = ask(RESPONSES, OF_THE_API)
    assert names(request) == ["local_shell", "shell", "apply_patch", "edit"]
    assert "grammar (lark):\nstart: X" in request.tools[3]["function"]["description"]
    patch = {"type": "create_file", "path": "a.py", "diff": "+x"}
    calls = (
        ToolCall("local_shell", {"command": ["ls"]}),
        ToolCall("shell", {"commands": ["ls", "pwd"]}),
        ToolCall("apply_patch", patch),
        ToolCall("edit", {"input": "do it"}),
    )
    items = RESPONSES.render(request, answer(request, *calls))["output"]
    assert [item["type"] for item in items] == [
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
        "custom_tool_call",
    ]
    assert items[0]["action"] == {"type": "exec", "env": {}, "command": ["ls"]}
    assert items[1]["action"] == {"commands": ["ls", "pwd"]}
    assert items[2]["operation"] == patch
    assert items[3]["input"] == "do it"
    assert [item["call_id"] for item in items] == ["c0", "c1", "c2", "c3"]
    events = list(RESPONSES.stream(request, answer(request, *calls)))
    assert [data["item"]["type"] for kind, data in events if kind == "response.output_item.done"] == [
        item["type"] for item in items
    ]
    assert "response.custom_tool_call_input.delta" in [kind for kind, _ in events]


def test_calls_of_every_type_return_to_the_conversation_as_they_were_written() -> None:
    """What a client sends back is what the template was told the model had called."""
    tools = [*CODEX, *OF_THE_API]
    request = ask(RESPONSES, tools)
    patch = {"type": "delete_file", "path": "a.py"}
    calls = (
        ToolCall("agents__spawn", {"task": "x"}),
        ToolCall("local_shell", {"command": ["ls"]}),
        ToolCall("shell", {"commands": ["ls"]}),
        ToolCall("apply_patch", patch),
        ToolCall("edit", {"input": "do it"}),
    )
    items = RESPONSES.render(request, answer(request, *calls))["output"]
    outputs = [
        {"type": "function_call_output", "call_id": "c0", "output": "one"},
        {"type": "local_shell_call_output", "call_id": "c1", "output": "two"},
        {
            "type": "shell_call_output",
            "call_id": "c2",
            "output": [{"stdout": "three", "stderr": "bad", "outcome": {"type": "exit", "exit_code": 3}}],
        },
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "completed", "output": "four"},
        {"type": "custom_tool_call_output", "call_id": "c4", "output": "five"},
    ]
    again = RESPONSES.parse({"model": "m", "tools": tools, "input": [*USER, *items, *outputs]})
    assert not isinstance(again.prompt, str)
    _, assistant, *answers = again.prompt  # type: ignore[misc]
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in assistant["tool_calls"]]
    assert made == [
        (call.name, {**call.arguments, **({"env": {}} if call.name == "local_shell" else {})}) for call in calls
    ]
    assert [message["content"] for message in answers] == ["one", "two", "three\nbad\nexit code 3", "four", "five"]


def test_free_text_is_called_so_in_chat_completions() -> None:
    custom = {"type": "custom", "custom": {"name": "code", "description": "Runs Python."}}
    request = ask(CHAT, [custom, {"type": "function", "function": {"name": "f"}}, {"type": "web_search"}])
    assert names(request) == ["code", "f"]
    assert request.other_fields == ("tools.web_search",)
    reply = answer(request, ToolCall("code", {"input": "print(1)"}), ToolCall("code", {"wrong": 1}), ToolCall("f"))
    calls = CHAT.render(request, reply)["choices"][0]["message"]["tool_calls"]
    assert calls[0] == {"id": "c0", "type": "custom", "custom": {"name": "code", "input": "print(1)"}}
    assert calls[1]["custom"]["input"] == '{"wrong": 1}'
    assert calls[2]["function"] == {"name": "f", "arguments": "{}"}
    said = [*USER, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "1"}]
    again = CHAT.parse({"model": "m", "messages": said, "tools": [custom]})
    assert again.prompt[1]["tool_calls"][0]["function"] == {"name": "code", "arguments": {"input": "print(1)"}}  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "name", "parameter"),
    [("bash_20250124", "bash", "restart"), ("text_editor_20250728", "str_replace_based_edit_tool", "old_str")],
)
def test_anthropics_own_tools_are_described_by_what_they_take(kind: str, name: str, parameter: str) -> None:
    request = ask(MESSAGES, [{"type": kind, "name": name}, {"type": "web_search_20250305", "name": "web_search"}])
    assert names(request) == [name]
    assert parameter in request.tools[0]["function"]["parameters"]["properties"]
    assert request.other_fields == ("tools.web_search_20250305",)


def test_without_a_tool_that_can_be_described_calls_are_text() -> None:
    assert not ask(RESPONSES, [{"type": "web_search"}]).parses_calls
    assert ask(RESPONSES, CODEX).parses_calls
