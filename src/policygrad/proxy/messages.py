"""Anthropic's messages, and the number of their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from policygrad.proxy.fields import MESSAGE_FIELDS, check_fields
from policygrad.proxy.reading import (
    check_conversation,
    make_call,
    read_field,
    read_objects,
    read_sampling,
    read_stop,
    read_text,
)
from policygrad.proxy.requests import ApiError, ApiFormat, ChatChoice, ChatReply, ChatRequest, Event, Message
from policygrad.proxy.tools import read_offered_by_schema

_SPECIAL = ("tool_use", "tool_result")


def parse_messages(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request of `/v1/messages`. Raises ApiError."""
    other = check_fields(body, MESSAGE_FIELDS)
    messages = list[Message]()
    if system := read_text(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for number, given in enumerate(read_objects(body.get("messages"), "messages"), 1):
        role, where = given.get("role"), f"message {number}"
        if role not in ("user", "assistant", "system"):
            raise ApiError(f"{where} has the role {role!r}: use user or assistant")
        content = given.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else read_objects(content, where)
        special = [block for block in blocks if block.get("type") in _SPECIAL]
        text = read_text([block for block in blocks if block.get("type") not in _SPECIAL], where)
        if role == "assistant":
            calls = [make_call(block.get("name"), block.get("input"), where) for block in special]
            messages.append({"role": role, "content": text, **({"tool_calls": calls} if calls else {})})
            continue
        messages += [{"role": "tool", "content": read_text(block.get("content"), where)} for block in special]
        if text or not special:
            messages.append({"role": role, "content": text})
    offered = read_offered_by_schema(read_objects(body.get("tools"), "tools"))
    choice = read_field(body, "tool_choice", dict, {}).get("type")
    return ChatRequest(
        check_conversation(messages),
        tools=offered.schemas,
        stop=read_stop(body.get("stop_sequences")),
        parses_calls=bool(offered.schemas) and choice != "none",
        other_fields=(*other, *offered.left_out),
        **read_sampling(body, "max_tokens"),
    )


def _message_blocks(choice: ChatChoice) -> list[dict[str, Any]]:
    blocks = list[dict[str, Any]]()
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.content or not choice.calls:
        blocks.append({"type": "text", "text": choice.content})
    for call, number in zip(choice.calls, choice.call_ids, strict=True):
        blocks.append({"type": "tool_use", "id": number, "name": call.name, "input": dict(call.arguments)})
    return blocks


def _stop_reason(choice: ChatChoice) -> str:
    if choice.stopped_by:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[choice.finish_reason]


def render_messages(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """Return the answer of `/v1/messages`."""
    choice = reply.choices[0]
    return {
        "id": f"msg_{reply.identifier}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _message_blocks(choice),
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stopped_by or None,
        "usage": {"input_tokens": reply.num_read, "output_tokens": reply.num_tokens},
    }


def stream_messages(request: ChatRequest, reply: ChatReply) -> Iterator[Event]:
    """Yield the answer of `/v1/messages` as its events."""
    rendered = render_messages(request, reply)
    usage = rendered["usage"]
    opened = {
        **rendered,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield "message_start", {"type": "message_start", "message": opened}
    for index, block in enumerate(rendered["content"]):
        empty: dict[str, Any]
        if block["type"] == "text":
            empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        elif block["type"] == "thinking":
            empty, delta = {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
        yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    end = {"stop_reason": rendered["stop_reason"], "stop_sequence": rendered["stop_sequence"]}
    yield "message_delta", {"type": "message_delta", "delta": end, "usage": {"output_tokens": usage["output_tokens"]}}
    yield "message_stop", {"type": "message_stop"}


def parse_count(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request of `/v1/messages/count_tokens`. Raises ApiError."""
    return replace(parse_messages({**body, "stream": False}), only_counts=True)


def render_count(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """Return the answer of `/v1/messages/count_tokens`."""
    return {"input_tokens": reply.num_read}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return an error as Anthropic's format has it."""
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


MESSAGES = ApiFormat("/v1/messages", parse_messages, render_messages, stream_messages, anthropic_error)
COUNT = ApiFormat("/v1/messages/count_tokens", parse_count, render_count, stream_messages, anthropic_error)
