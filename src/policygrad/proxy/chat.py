"""OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from policygrad.models.chat.turns import ToolCall
from policygrad.proxy.fields import CHAT_FIELDS, check_fields
from policygrad.proxy.reading import (
    MAX_CHOICES,
    check_conversation,
    count_tokens,
    make_call,
    openai_error,
    quote,
    read_alternatives,
    read_count,
    read_field,
    read_objects,
    read_sampling,
    read_stop,
    read_text,
    render_choices,
)
from policygrad.proxy.requests import ApiError, ApiFormat, ChatChoice, ChatReply, ChatRequest, Event, Message
from policygrad.proxy.tools import CUSTOM, FUNCTION, get_input, read_offered_in_chat


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request of `/v1/chat/completions`. Raises ApiError."""
    other = check_fields(body, CHAT_FIELDS)
    messages = list[Message]()
    for number, given in enumerate(read_objects(body.get("messages"), "messages"), 1):
        role, where = given.get("role"), f"message {number}"
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise ApiError(f"{where} has the role {role!r}: use system, developer, user, assistant or tool")
        if given.get("function_call") is not None:
            raise ApiError(f"{where} has a function_call, the older form: send it as tool_calls")
        message: Message = {
            "role": "system" if role == "developer" else role,
            "content": read_text(given.get("content"), where),
        }
        if role == "assistant" and given.get("tool_calls"):
            message["tool_calls"] = _read_calls(given["tool_calls"], where)
        messages.append(message)
    offered = read_offered_in_chat(read_objects(body.get("tools"), "tools"))
    options = read_field(body, "stream_options", dict, {})
    has_logprobs = read_field(body, "logprobs", bool, False)
    return ChatRequest(
        check_conversation(messages),
        tools=offered.schemas,
        tool_forms=offered.forms,
        stop=read_stop(body.get("stop")),
        num_choices=read_count(body, "n", 1, 1, MAX_CHOICES),
        has_logprobs=has_logprobs,
        num_alternatives=read_alternatives(body, "" if has_logprobs else "logprobs=true"),
        has_usage_event=bool(options.get("include_usage")),
        parses_calls=bool(offered.schemas) and body.get("tool_choice") != "none",
        other_fields=(*other, *offered.left_out),
        **read_sampling(body, "max_completion_tokens", "max_tokens"),
    )


def _read_calls(values: Any, where: str) -> list[dict[str, Any]]:
    """Return an assistant's calls as chat templates read them."""
    calls = list[dict[str, Any]]()
    for value in read_objects(values, f"the tool_calls of {where}"):
        kind = value.get("type", FUNCTION)
        inner = value.get(kind) if kind in (FUNCTION, CUSTOM) else None
        if not isinstance(inner, dict):
            raise ApiError(
                f"the tool_calls of {where} must have an object `function` or `custom` each, not {quote(value)}"
            )
        arguments = inner.get("arguments") if kind == FUNCTION else {"input": str(inner.get("input") or "")}
        calls.append(make_call(inner.get("name"), arguments, where))
    return calls


def dump_arguments(call: ToolCall) -> str:
    """Return a call's arguments as OpenAI's formats have them."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _render_calls(request: ChatRequest, choice: ChatChoice) -> list[dict[str, Any]]:
    calls = list[dict[str, Any]]()
    for call, number in zip(choice.calls, choice.call_ids, strict=True):
        form = request.tool_forms.get(call.name)
        inner = {"name": call.name, "arguments": dump_arguments(call)}
        if form is not None and form.kind == CUSTOM:
            calls.append({"id": number, "type": CUSTOM, CUSTOM: {"name": call.name, "input": get_input(call)}})
        else:
            calls.append({"id": number, "type": FUNCTION, FUNCTION: inner})
    return calls


def render_logprobs(choice: ChatChoice) -> list[dict[str, Any]]:
    """Return each token with its log-probability."""

    def describe(piece: str, logp: float) -> dict[str, Any]:
        return {"token": piece, "logprob": logp, "bytes": list(piece.encode())}

    alternatives = choice.alternatives or ({},) * len(choice.pieces)
    return [
        {**describe(piece, logp), "top_logprobs": [describe(*pair) for pair in others.items()]}
        for piece, logp, others in zip(choice.pieces, choice.logp, alternatives, strict=True)
    ]


def render_chat(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """Return the answer of `/v1/chat/completions`."""
    choices = []
    for index, choice in enumerate(reply.choices):
        message: dict[str, Any] = {"role": "assistant", "content": choice.content or (None if choice.calls else "")}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = _render_calls(request, choice)
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": {"content": render_logprobs(choice), "refusal": None} if request.has_logprobs else None,
                "finish_reason": choice.finish_reason,
                **({"token_ids": list(choice.token_ids)} if request.has_token_ids else {}),
            }
        )
    return render_choices(request, reply, f"chatcmpl-{reply.identifier}", "chat.completion", choices)


def stream_chat(request: ChatRequest, reply: ChatReply) -> Iterator[Event]:
    """Yield the answer of `/v1/chat/completions` as chunks."""
    common = {
        "id": f"chatcmpl-{reply.identifier}",
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": request.model,
    }

    def chunk(index: int, delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> Event:
        choice = {"index": index, "delta": dict(delta), "logprobs": None, "finish_reason": reason, **more}
        return "", {**common, "choices": [choice]}

    for index, choice in enumerate(reply.choices):
        name, opening = chunk(index, {"role": "assistant", "content": ""})
        ids = {"prompt_token_ids": list(reply.prompt_ids)} if request.has_token_ids and index == 0 else {}
        yield name, {**opening, **ids}
        texts = {"reasoning_content": choice.reasoning, "content": choice.content}
        deltas: list[dict[str, Any]] = [{name: text} for name, text in texts.items() if text]
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(_render_calls(request, choice))]
        unsent: dict[str, Any] = {}
        if request.has_logprobs:
            unsent = {"logprobs": {"content": render_logprobs(choice), "refusal": None}}
        for delta in deltas:  # the log-probabilities of all tokens are with the first
            yield chunk(index, delta, None, **unsent)
            unsent = {}
        if request.has_token_ids:
            unsent = {**unsent, "token_ids": list(choice.token_ids)}
        yield chunk(index, {}, choice.finish_reason, **unsent)
    if request.has_usage_event:
        yield "", {**common, "choices": [], "usage": count_tokens(reply)}


CHAT = ApiFormat("/v1/chat/completions", parse_chat, render_chat, stream_chat, openai_error, "[DONE]")
