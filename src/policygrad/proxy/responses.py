"""OpenAI's responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from policygrad.proxy.chat import render_logprobs
from policygrad.proxy.fields import RESPONSE_FIELDS, check_fields
from policygrad.proxy.reading import (
    check_conversation,
    count_tokens,
    openai_error,
    quote,
    read_alternatives,
    read_field,
    read_objects,
    read_sampling,
    read_text,
)
from policygrad.proxy.requests import ApiError, ApiFormat, ChatReply, ChatRequest, Event, Message
from policygrad.proxy.tools import read_call_item, read_offered, read_output_item, render_call_item

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
"""What `include` may ask for; of the second there is none."""
UNKNOWN_ITEM = (
    "it refers to an item that is not kept here: it is of another key, was too long ago, or of a response with store=false. Send "
    "the items themselves, as clients do with store=false"
)


def parse_response(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request of `/v1/responses`, whose `input` has the items of earlier responses too. Raises ApiError."""
    other = list(check_fields(body, RESPONSE_FIELDS))
    messages = list[Message]()
    if instructions := read_field(body, "instructions", str, ""):
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(list_items(body.get("input")), 1):
        where, kind = f"input item {number}", item.get("type", "message")
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            if role not in ("system", "user", "assistant"):
                raise ApiError(f"{where} has the role {role!r}: use system, developer, user or assistant")
            messages.append({"role": role, "content": read_text(item.get("content"), where)})
        elif (call := read_call_item(item, where)) is not None:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif (output := read_output_item(item, where)) is not None:
            messages.append(output)
        elif kind == "item_reference":
            raise ApiError(f"{where}, {quote(item.get('id'))}: {UNKNOWN_ITEM}")
        elif kind != "reasoning":
            raise ApiError(f"{where} has the type {kind!r}: this endpoint reads messages and calls of tools")
    offered = read_offered(read_objects(body.get("tools"), "tools"))
    include = read_field(body, "include", list, [])
    other += [f"include {quote(name)}" for name in include if name not in _INCLUDABLE]
    return ChatRequest(
        check_conversation(messages),
        tools=offered.schemas,
        tool_forms=offered.forms,
        has_logprobs=_LOGPROBS in include,
        num_alternatives=read_alternatives(body, "" if _LOGPROBS in include else f"include=[{_LOGPROBS!r}]"),
        parses_calls=bool(offered.schemas) and body.get("tool_choice") != "none",
        other_fields=(*other, *offered.left_out),
        **read_sampling(body, "max_output_tokens"),
    )


def list_items(given: Any) -> list[dict[str, Any]]:
    """Return `input` as items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return read_objects(given, "input")


def _response_items(request: ChatRequest, reply: ChatReply) -> list[dict[str, Any]]:
    """Return the output items of a response: reasoning, a message, and calls of tools."""
    choice, items = reply.choices[0], list[dict[str, Any]]()
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    if choice.reasoning:
        thought = {"type": "reasoning_text", "text": choice.reasoning}
        items.append(
            {"type": "reasoning", "id": f"rs_{reply.identifier}", "summary": [], "content": [thought], "status": status}
        )
    if choice.content or not choice.calls:
        logprobs = render_logprobs(choice) if request.has_logprobs else []
        part = {"type": "output_text", "text": choice.content, "annotations": [], "logprobs": logprobs}
        items.append(
            {
                "type": "message",
                "id": f"msg_{reply.identifier}",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for call, number in zip(choice.calls, choice.call_ids, strict=True):
        items.append(render_call_item(call, number, status, request.tool_forms.get(call.name)))
    return items


def _render_response(
    request: ChatRequest, reply: ChatReply, status: str, items: list[dict[str, Any]]
) -> dict[str, Any]:
    usage = {
        **count_tokens(reply, ("input_tokens", "output_tokens")),
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": f"resp_{reply.identifier}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": items,
        "parallel_tool_calls": True,
        "temperature": request.temperature,
        "tool_choice": "auto",
        "tools": [{"strict": None, **tool["function"], "type": "function"} for tool in request.tools],
        "top_p": request.top_p,
        "usage": None if status == "in_progress" else usage,
    }


def render_response(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """Return the answer of `/v1/responses`."""
    status = "incomplete" if reply.choices[0].finish_reason == "length" else "completed"
    return _render_response(request, reply, status, _response_items(request, reply))


def stream_response(request: ChatRequest, reply: ChatReply) -> Iterator[Event]:
    """Yield the answer of `/v1/responses` as its events."""
    numbers = count()

    def event(kind: str, /, **values: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(numbers), **values}

    started = _render_response(request, reply, "in_progress", [])
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    for index, item in enumerate(_response_items(request, reply)):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part, opened = item["content"][0], {**item, "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=index, item=opened)
            yield event("response.content_part.added", **at, content_index=0, part={**part, "text": "", "logprobs": []})
            yield event(
                "response.output_text.delta", **at, content_index=0, delta=part["text"], logprobs=part["logprobs"]
            )
            yield event(
                "response.output_text.done", **at, content_index=0, text=part["text"], logprobs=part["logprobs"]
            )
            yield event("response.content_part.done", **at, content_index=0, part=part)
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            yield event("response.output_item.added", output_index=index, item={**item, "content": []})
            yield event("response.reasoning_text.delta", **at, content_index=0, delta=text)
            yield event("response.reasoning_text.done", **at, content_index=0, text=text)
        elif item["type"] == "custom_tool_call":
            yield event("response.output_item.added", output_index=index, item={**item, "input": ""})
            yield event("response.custom_tool_call_input.delta", **at, delta=item["input"])
            yield event("response.custom_tool_call_input.done", **at, input=item["input"])
        elif item["type"] != "function_call":
            yield event("response.output_item.added", output_index=index, item={**item, "status": "in_progress"})
        else:
            opened = {**item, "status": "in_progress", "arguments": ""}
            yield event("response.output_item.added", output_index=index, item=opened)
            yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield event("response.function_call_arguments.done", **at, **done)
        yield event("response.output_item.done", output_index=index, item=item)
    rendered = render_response(request, reply)
    yield event(f"response.{rendered['status']}", response=rendered)


RESPONSES = ApiFormat("/v1/responses", parse_response, render_response, stream_response, openai_error)
