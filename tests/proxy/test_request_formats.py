"""The request formats: which fields are followed, and what a request and a reply become."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policygrad.models.chat.turns import ToolCall
from policygrad.proxy.fields import TABLES
from policygrad.proxy.formats import (
    CHAT,
    COMPLETIONS,
    FORMATS,
    MESSAGES,
    RESPONSES,
    ApiError,
    ApiFormat,
    ChatChoice,
    ChatReply,
    ScoredTokens,
)
from policygrad.proxy.reading import MAX_TOOLS_SIZE
from policygrad.proxy.server import MAX_DEPTH, parse_body
from policygrad.proxy.stored import StoredResponses

USER = [{"role": "user", "content": "1 + 1"}]
SMALLEST: dict[ApiFormat, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "1 + 1"},
    RESPONSES: {"input": "1 + 1"},
    MESSAGES: {"messages": USER, "max_tokens": 8},
}
CLAUDE_CODE = {
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
"""What version 2.1 sends with every request: nothing that a policy does not do."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = ChatReply(
    (ChatChoice("x", "tool_calls", (7, 8), (-0.5, -0.25), ("<t", ">"), "", (ToolCall("f", {"a": 2}),), ("call_1",)),),
    (1, 2, 3),
)


def refusal(api: ApiFormat, **more: Any) -> str:
    with pytest.raises(ApiError) as raised:
        api.parse({**SMALLEST[api], **more})
    assert raised.value.status == 400
    return str(raised.value)


class Noting(dict[str, Any]):
    """A body that notes which of its fields are asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read = set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def test_the_fields_that_a_table_calls_read_are_those_that_are_read() -> None:
    elsewhere = {"previous_response_id", "store"}  # by the server
    for api, body in SMALLEST.items():
        noting = Noting(body)
        api.parse(noting)
        table = TABLES[api.path]
        said = {name.partition(".")[0] for name, field in table.items() if field.use == "read"}
        assert said - elsewhere <= noting.read, api.path
        partly = {name for name in noting.read if any(name == n.partition(".")[0] for n in table)}
        assert noting.read == partly, api.path  # nothing is read that no table has


def test_a_field_that_would_change_samples_or_answer_is_refused_in_every_format() -> None:
    changing: dict[str, Any] = {
        "min_p": 0.5,
        "typical_p": 0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 4,
        "ignore_eos": True,
        "bad_words": ["answer"],
        "stop_token_ids": [5],
        "guided_json": {"type": "object"},
        "guided_choice": ["yes", "no"],
        "structured_outputs": {"regex": "[0-9]"},
        "prompt_logprobs": 1,
    }
    for api in SMALLEST:
        for name, value in changing.items():
            assert refusal(api, **{name: value}).startswith(f"{name}=")
        neutral = {
            "min_p": 0,
            "typical_p": 1.0,
            "min_tokens": 0,
            "ignore_eos": False,
            "bad_words": [],
            "guided_json": None,
        }
        assert api.parse({**SMALLEST[api], **neutral}).other_fields == ()
    form = {"type": "json_schema", "name": "a", "schema": {}}
    assert "text.format" in refusal(RESPONSES, text={"format": form})
    assert "output_config.format" in refusal(MESSAGES, output_config={"format": form})
    assert "response_format" in refusal(CHAT, response_format=form)
    assert "must be an object" in refusal(RESPONSES, text="plain")


def test_a_field_that_cannot_be_followed_otherwise_is_named() -> None:
    tool = {"name": "f", "strict": True, "parameters": SCHEMA}
    cases: list[tuple[ApiFormat, dict[str, Any], tuple[str, ...]]] = [
        (CHAT, {"reasoning_effort": "low", "verbosity": None, "user": "me"}, ("reasoning_effort",)),
        (CHAT, {"tool_choice": "required"}, ("tool_choice",)),
        (CHAT, {"tool_choice": "auto", "parallel_tool_calls": True, "store": True}, ()),
        (CHAT, {"tools": [{"type": "function", "function": tool}]}, ("tools.strict",)),
        (
            RESPONSES,
            {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}},
            ("reasoning.effort", "text.verbosity"),
        ),
        (
            RESPONSES,
            {"include": ["reasoning.encrypted_content", "file_search_call.results"]},
            ('include "file_search_call.results"',),
        ),
        (MESSAGES, {"thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}}, ()),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, ("thinking.type", "thinking.budget_tokens")),
        (MESSAGES, CLAUDE_CODE, ()),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, ("context_management",)),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}}, ("tool_choice.type",)),
        (COMPLETIONS, {"never_heard_of": 1}, ("never_heard_of",)),
    ]
    for api, more, names in cases:
        assert api.parse({**SMALLEST[api], **more}).other_fields == names


def test_the_page_names_every_refused_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "proxy.md").read_text(encoding="utf-8")
    names = {name for table in TABLES.values() for name, field in table.items() if field.use == "refused"}
    assert sorted(name for name in names if f"`{name}`" not in page) == []


def test_malformed_tools_calls_and_contents_are_refused_with_their_reason() -> None:
    def called(function: Any) -> dict[str, Any]:
        return {"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}, *USER]}

    cases: list[tuple[ApiFormat, dict[str, Any], str]] = [
        (CHAT, {"tools": [{"type": "custom"}]}, "an object `custom`"),
        (RESPONSES, {"tools": [{"type": "namespace", "tools": []}]}, "a namespace of tools has no name"),
        (RESPONSES, {"tools": [{"type": "namespace", "name": "a", "tools": "f"}]}, "the tools of a must be a list"),
        (RESPONSES, {"input": [*USER, {"type": "shell_call", "action": "ls"}]}, "has no object 'action'"),
        (CHAT, {"tools": [{"type": "function"}]}, "an object `function`"),
        (CHAT, {"tools": [{"type": "function", "function": "f"}]}, "an object `function`"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": "none"}}]}, "JSON schema"),
        (CHAT, {"tools": [{"type": "function", "function": {"parameters": {}}}]}, "has no name"),
        (CHAT, called("f"), "an object `function`"),
        (CHAT, called({"name": "f", "arguments": "[1, 2]"}), "must be a JSON object"),
        (CHAT, called({"name": "f", "arguments": "{bad"}), "are no JSON"),
        (CHAT, {"messages": [*USER, {"role": "function", "content": "x"}]}, "has the role 'function'"),
        (CHAT, {"top_logprobs": 3}, "needs logprobs=true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        (CHAT, {"temperature": float("inf")}, "must be finite"),
        (COMPLETIONS, {"prompt": ["a", [1]], "max_tokens": 0}, "must be at least 1"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt must be"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt must be"),
        (COMPLETIONS, {"best_of": 2}, "best_of=2"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "store=false"),
    ]
    for api, more, reason in cases:
        assert reason in refusal(api, **more)
    wide = {"type": "function", "function": {"name": "f", "parameters": {"x": "y" * MAX_TOOLS_SIZE}}}
    with pytest.raises(ApiError, match="the most is") as raised:
        CHAT.parse({"messages": USER, "tools": [wide]})
    assert raised.value.status == 413


def test_instructions_alone_are_a_request() -> None:
    assert RESPONSES.parse({"instructions": "Say hi."}).prompt == ({"role": "system", "content": "Say hi."},)


def test_a_body_is_json_without_surrogates_and_not_too_deep() -> None:
    assert parse_body(b'{"a\\ud83d": ["b\\ud83d c", "\\ud83d\\ude00"]}') == {"a\ufffd": ["b\ufffd c", "\U0001f600"]}
    nested = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert "a" in parse_body(f'{{"a": {nested}}}'.encode())
    bad: list[tuple[bytes, str]] = [
        (f'{{"a": [{nested}]}}'.encode(), "nested deeper"),
        (b'{"a":' + b"[" * 10**6, "no JSON"),
        (b'{"temperature": NaN}', "NaN is no JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "no JSON"),
        (b"[1]", "must be a JSON object"),
        (b"\xff\xfe{", "no JSON"),
    ]
    for data, reason in bad:
        with pytest.raises(ApiError, match=reason):
            parse_body(data)


def events(stream: Iterator[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [json.loads(json.dumps({**data, "event": name})) for name, data in stream]


def test_a_streamed_call_has_all_its_events() -> None:
    request = RESPONSES.parse({"input": "x", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]})
    streamed = events(RESPONSES.stream(request, CALL))
    assert [e["type"].removeprefix("response.") for e in streamed] == [
        *("created", "in_progress", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert [e["sequence_number"] for e in streamed] == list(range(7))
    assert (streamed[4]["name"], json.loads(streamed[4]["arguments"])) == ("f", {"a": 2})
    assert streamed[6]["response"] == RESPONSES.render(request, CALL) | {"id": streamed[6]["response"]["id"]}


def test_a_chat_stream_of_a_call_alone_has_log_probabilities_and_token_ids() -> None:
    request = CHAT.parse({"messages": USER, "stream": True, "logprobs": True, "return_token_ids": True})
    chunks = events(CHAT.stream(request, CALL))
    assert chunks[0]["prompt_token_ids"] == [1, 2, 3]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [None if x is None else [t["logprob"] for t in x["content"]] for x in logprobs] == [
        None,
        [-0.5, -0.25],
        None,
    ]
    assert chunks[1]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "f"
    assert chunks[2]["choices"][0]["token_ids"] == [7, 8]
    empty = ChatReply((ChatChoice("", "stop", (2,), (-1.0,), ("</s>",)),), (1,))
    ends = [chunk["choices"][0] for chunk in events(CHAT.stream(request, empty))]
    assert [None if c["logprobs"] is None else len(c["logprobs"]["content"]) for c in ends] == [None, 1]


def test_top_logprobs_stand_beside_each_token() -> None:
    choice = ChatChoice(
        "ab", "stop", (5, 6), (-1.0, -2.0), ("a", "b"), "ab", alternatives=({"a": -1.0, "c": -1.5}, {"d": -0.1})
    )
    reply = ChatReply((choice,), (1,))
    request = CHAT.parse({"messages": USER, "logprobs": True, "top_logprobs": 2})
    listed = CHAT.render(request, reply)["choices"][0]["logprobs"]["content"]
    assert [[t["token"] for t in place["top_logprobs"]] for place in listed] == [["a", "c"], ["d"]]
    asked = RESPONSES.parse({"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2})
    assert RESPONSES.render(asked, reply)["output"][0]["content"][0]["logprobs"] == listed


def test_an_echoed_prompt_comes_before_the_completion_of_each_prompt() -> None:
    request = COMPLETIONS.parse({"prompt": ["ab", "c"], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0})
    assert (request.prompt, request.more_prompts, request.num_alternatives) == ("ab", ("c",), 1)
    first = ScoredTokens(("a", "b"), (None, -3.0), (None, {"x": -0.5, "b": -3.0}), "ab", (0, 1))
    choices = (
        ChatChoice("!", "length", (9,), (-0.0,), ("!",), alternatives=({"!": -0.0},), prompt=first),
        ChatChoice(
            "?",
            "length",
            (8,),
            (-1.0,),
            ("?",),
            alternatives=({"!": -0.2},),
            prompt=ScoredTokens(("c",), (None,), (None,), "c", (0,)),
        ),
    )
    answer = COMPLETIONS.render(request, ChatReply(choices, (1, 2), ((3,),)))
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "ab!"), (1, "c?")]
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, -3.0, -0.0]
    assert logprobs["top_logprobs"] == [None, {"x": -0.5, "b": -3.0}, {"!": -0.0}]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_errors_have_the_types_that_clients_know() -> None:
    for status, openai, anthropic in (
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
    ):
        error = ApiError("no", status)
        assert CHAT.render_error(error)["error"]["type"] == openai
        assert MESSAGES.render_error(error)["error"]["type"] == anthropic
    assert all(api.render_error(ApiError("no"))["error"]["message"] == "no" for api in FORMATS)


def respond(name: str, text: str, **more: Any) -> dict[str, Any]:
    item = {
        "type": "message",
        "id": f"msg_{name}",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
    }
    return {"id": f"resp_{name}", "output": [item], **more}


def test_a_response_is_continued_and_its_items_referred_to_by_its_own_key_alone() -> None:
    stored = StoredResponses()
    asked = {"input": [{"type": "reasoning", "id": "rs_1", "encrypted_content": "x" * 10**6}, *USER]}
    stored.add("one", asked, respond("a", "two"))
    assert stored.sizes["one"] < 1000  # reasoning is not kept
    continued = stored.complete("one", {"previous_response_id": "resp_a", "input": "and 2 + 2?"})
    assert [item["role"] for item in continued["input"]] == ["user", "assistant", "user"]
    for reference in ({"type": "item_reference", "id": "msg_a"}, {"id": "msg_a"}):
        named = stored.complete("one", {"input": [*USER, reference, *USER]})
        assert RESPONSES.parse(named).prompt[1] == {"role": "assistant", "content": "two"}
    with pytest.raises(ApiError, match="store=false"):
        stored.complete("other", {"previous_response_id": "resp_a", "input": "?"})
    with pytest.raises(ApiError, match="store=false"):
        RESPONSES.parse(stored.complete("other", {"input": [*USER, {"type": "item_reference", "id": "msg_a"}, *USER]}))
    stored.add("one", {**asked, "store": False}, respond("b", "three"))
    with pytest.raises(ApiError):
        stored.complete("one", {"previous_response_id": "resp_b", "input": "?"})
    stored.forget("one")
    assert not stored.sizes


def test_responses_are_kept_as_far_as_there_is_room() -> None:
    stored = StoredResponses(max_of_key=2000, max_in_all=5000)
    for number in range(30):
        stored.add(f"key {number % 3}", {"input": "x" * 500}, respond(str(number), "y"))
        assert max(stored.sizes.values()) <= 2000
        assert stored.sizes.total() <= 5000
    stored.complete("key 2", {"previous_response_id": "resp_29", "input": "?"})
    with pytest.raises(ApiError):
        stored.complete("key 0", {"previous_response_id": "resp_0", "input": "?"})
    stored.add("key 0", {"input": "x" * 9000}, respond("large", "y"))
    with pytest.raises(ApiError):
        stored.complete("key 0", {"previous_response_id": "resp_large", "input": "?"})


@pytest.mark.parametrize(
    ("form", "place"),
    [
        (CHAT, '"reasoning_content": "hm"'),
        (RESPONSES, '"type": "reasoning_text", "text": "hm"'),
        (MESSAGES, '"thinking": "hm"'),
    ],
)
def test_reasoning_is_a_part_of_its_own_in_answers_and_streams(form: ApiFormat, place: str) -> None:
    reply = ChatReply((ChatChoice("<think>hm</think>4", "stop", (7,), (-0.5,), content="4", reasoning="hm"),), (1, 2))
    request = form.parse(SMALLEST[form])
    answer = json.dumps(form.render(request, reply))
    assert place in answer
    assert "<think>" not in answer
    streamed = json.dumps([data for _, data in form.stream(request, reply)])
    assert '"hm"' in streamed
    assert "<think>" not in streamed
