"""The four request formats that the proxy answers, as one: a `ChatRequest` in, a `ChatReply` out.

Sources: platform.openai.com/docs/api-reference (chat, completions, responses), docs.anthropic.com/en/api/messages. A program may
send fields that these have and that change nothing here (user, metadata, store, parallel_tool_calls, …); those that would change
the distribution that is sampled from, or the form of the answer, and that cannot be followed are refused with status 400.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from policygrad.models.tool_calls import ToolCall

Message = dict[str, Any]
Event = tuple[str, dict[str, Any]]
"""One event of a stream: its name, "" for a format without names, and its data."""
MAX_CHOICES = 128


class ApiError(Exception):
    """A request that is answered with an error of HTTP.

    Args:
        status: 400 for a request that cannot be answered, which clients do not repeat.
        code: A word for programs, as in OpenAI's `error.code`.
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class ChatRequest:
    """A request for completions, whatever format it came in."""

    prompt: str | tuple[int, ...] | tuple[Message, ...]
    """Text, token ids, or messages with the roles system, user, assistant and tool. An assistant's `tool_calls` have arguments as
    objects."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas in the form of chat templates: {"type": "function", "function": {...}}."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the completion and are not part of it."""
    num_choices: int = 1
    seed: int | None = None
    stream: bool = False
    has_usage_event: bool = False
    """A stream of OpenAI's chat format ends with the numbers of tokens."""
    has_logprobs: bool = False
    has_token_ids: bool = False
    """The reply lists token ids, as with vLLM's `return_token_ids`."""
    parses_calls: bool = True
    """False = tool calls in the text are left as text."""
    model: str = ""
    """The name that the program gave, which is repeated to it."""


@dataclass(frozen=True)
class ChatChoice:
    """One completion."""

    text: str
    """As sampled, without its end token, up to a stop text."""
    finish_reason: str
    """stop, length or tool_calls."""
    token_ids: tuple[int, ...]
    logp: tuple[float, ...]
    """Nats of each token."""
    pieces: tuple[str, ...] = ()
    """The text of each token, if log-probabilities were asked for."""
    content: str = ""
    """The text without tool calls."""
    calls: tuple[ToolCall, ...] = ()
    call_ids: tuple[str, ...] = ()
    stopped_by: str = ""
    """The stop text that ended it."""


@dataclass(frozen=True)
class ChatReply:
    """The completions of a request."""

    choices: tuple[ChatChoice, ...]
    prompt_ids: tuple[int, ...]
    identifier: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(frozen=True)
class ApiFormat:
    """One of the request formats."""

    path: str
    parse: Callable[[Mapping[str, Any]], ChatRequest]
    """Raises ApiError."""
    render: Callable[[ChatRequest, ChatReply], dict[str, Any]]
    stream: Callable[[ChatRequest, ChatReply], Iterator[Event]]
    render_error: Callable[[ApiError], dict[str, Any]]
    last_line: str = ""
    """The data that ends a stream."""


# Reading fields of a request.


def _get(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """Return a field, or the default if it is absent or null. Raises ApiError for another type."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise ApiError(f"{name} must be {names}, not {json.dumps(value, default=str)[:200]}")
    return value


def _refuse(body: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Raise ApiError for a field with another value than the neutral ones."""
    for name, values in neutral.items():
        if body.get(name) is not None and body[name] not in values:
            allowed = " or ".join(json.dumps(value) for value in values)
            raise ApiError(
                f"{name}={json.dumps(body[name], default=str)[:200]} cannot be followed here, where completions are samples of one "
                f"distribution: {f'send {allowed}' if values else 'leave it out'}"
            )


def _read_sampling(body: Mapping[str, Any], *max_tokens: str) -> dict[str, Any]:
    """Read the fields that most formats share."""
    numbers = {name: _get(body, name, (int, float)) for name in ("temperature", "top_p")}
    limit = next((value for name in max_tokens if (value := _get(body, name, int)) is not None), None)
    if limit is not None and limit < 1:
        raise ApiError(f"{max_tokens[0]} must be at least 1, not {limit}")
    if numbers["temperature"] is not None and numbers["temperature"] < 0:
        raise ApiError(f"temperature must be at least 0, not {numbers['temperature']}")
    if numbers["top_p"] is not None and not 0 < numbers["top_p"] <= 1:
        raise ApiError(f"top_p must be in (0, 1], not {numbers['top_p']}")
    return {
        **numbers,
        "max_tokens": limit,
        "top_k": _get(body, "top_k", int),
        "seed": _get(body, "seed", int),
        "stream": _get(body, "stream", bool, False),
        "has_token_ids": _get(body, "return_token_ids", bool, False),
        "model": _get(body, "model", str, ""),
    }


def _read_stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ApiError(f"stop must be a text or a list of texts, not {json.dumps(value, default=str)[:200]}")
    return tuple(texts)


def _read_choices(body: Mapping[str, Any]) -> int:
    count: int = _get(body, "n", int, 1)
    if not 1 <= count <= MAX_CHOICES:
        raise ApiError(f"n must be from 1 to {MAX_CHOICES}, not {count}")
    return count


_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_HIDDEN_PARTS = ("thinking", "redacted_thinking", "reasoning")


def _read_text(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, or parts that are text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(f"the content of {where} must be text or a list of parts, not {type(content).__name__}")
    texts = list[str]()
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_PARTS:
            texts.append(str(part.get("text", part.get("refusal", ""))))
        elif kind not in _HIDDEN_PARTS:
            raise ApiError(f"{where} has a part of type {kind!r}: this endpoint reads text alone")
    return "".join(texts)


def _read_arguments(value: Any, where: str) -> Any:
    """Return a call's arguments as an object, from the JSON text of OpenAI's formats."""
    if not isinstance(value, str):
        return value or {}
    try:
        return json.loads(value or "{}")
    except ValueError as error:
        raise ApiError(f"the arguments of {where} are no JSON: {error}") from error


def _make_call(name: Any, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": str(name), "arguments": arguments}}


def _make_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    function = {
        "name": str(name),
        "description": str(description or ""),
        "parameters": parameters or {"type": "object"},
    }
    return {"type": "function", "function": function}


def _require_objects(values: Any, name: str) -> list[dict[str, Any]]:
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ApiError(f"{name} must be a list of objects")
    return values


def _check_conversation(messages: Sequence[Message]) -> tuple[Message, ...]:
    if not messages:
        raise ApiError("there is no message to answer")
    if messages[-1]["role"] == "assistant":
        raise ApiError(
            "the last message is the assistant's: an answer that begins with given text (prefill) is no sample of the policy. "
            "End with a message of the user or a tool"
        )
    return tuple(messages)


def _usage(reply: ChatReply, names: tuple[str, str] = ("prompt_tokens", "completion_tokens")) -> dict[str, Any]:
    read, sampled = len(reply.prompt_ids), reply.num_tokens
    return {names[0]: read, names[1]: sampled, "total_tokens": read + sampled}


def _openai_error(error: ApiError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


# OpenAI's chat completions.


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request of `/v1/chat/completions`. Raises ApiError."""
    _refuse(
        body,
        {
            "frequency_penalty": (0,),
            "presence_penalty": (0,),
            "repetition_penalty": (1,),
            "logit_bias": ({},),
            "response_format": ({"type": "text"},),
            "functions": ([],),
            "modalities": (["text"],),
        },
    )
    messages = list[Message]()
    for number, given in enumerate(_require_objects(body.get("messages"), "messages"), 1):
        role, where = given.get("role"), f"message {number}"
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise ApiError(f"{where} has the role {role!r}: use system, developer, user, assistant or tool")
        message: Message = {
            "role": "system" if role == "developer" else role,
            "content": _read_text(given.get("content"), where),
        }
        if role == "assistant" and given.get("tool_calls"):
            functions = [call.get("function") or {} for call in _require_objects(given["tool_calls"], "tool_calls")]
            message["tool_calls"] = [
                _make_call(f.get("name"), _read_arguments(f.get("arguments"), where)) for f in functions
            ]
        messages.append(message)
    functions = [tool.get("function") or {} for tool in _require_objects(body.get("tools"), "tools")]
    tools = [_make_tool(f.get("name"), f.get("description"), f.get("parameters")) for f in functions]
    options = _get(body, "stream_options", dict, {})
    return ChatRequest(
        _check_conversation(messages),
        tuple(tools),
        stop=_read_stop(body.get("stop")),
        num_choices=_read_choices(body),
        has_logprobs=_get(body, "logprobs", bool, False),
        has_usage_event=bool(options.get("include_usage")),
        parses_calls=bool(tools) and body.get("tool_choice") != "none",
        **_read_sampling(body, "max_completion_tokens", "max_tokens"),
    )


def _chat_calls(choice: ChatChoice) -> list[dict[str, Any]]:
    return [
        {"id": number, "type": "function", "function": {"name": call.name, "arguments": _dump_arguments(call)}}
        for call, number in zip(choice.calls, choice.call_ids, strict=True)
    ]


def _dump_arguments(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _chat_logprobs(choice: ChatChoice) -> dict[str, Any]:
    pairs = zip(choice.pieces, choice.logp, strict=True)
    return {
        "content": [
            {"token": piece, "logprob": logp, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logp in pairs
        ],
        "refusal": None,
    }


def render_chat(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """Return the answer of `/v1/chat/completions`."""
    choices = []
    for index, choice in enumerate(reply.choices):
        message: dict[str, Any] = {"role": "assistant", "content": choice.content or (None if choice.calls else "")}
        if choice.calls:
            message["tool_calls"] = _chat_calls(choice)
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": _chat_logprobs(choice) if request.has_logprobs else None,
                "finish_reason": choice.finish_reason,
                **({"token_ids": list(choice.token_ids)} if request.has_token_ids else {}),
            }
        )
    return {
        "id": f"chatcmpl-{reply.identifier}",
        "object": "chat.completion",
        "created": reply.created,
        "model": request.model,
        "choices": choices,
        "usage": _usage(reply),
        **({"prompt_token_ids": list(reply.prompt_ids)} if request.has_token_ids else {}),
    }


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
        yield chunk(index, {"role": "assistant", "content": ""})
        if choice.content:
            logprobs = {"logprobs": _chat_logprobs(choice)} if request.has_logprobs else {}
            yield chunk(index, {"content": choice.content}, None, **logprobs)
        for number, call in enumerate(_chat_calls(choice)):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        ids = {"token_ids": list(choice.token_ids)} if request.has_token_ids else {}
        yield chunk(index, {}, choice.finish_reason, **ids)
    if request.has_usage_event:
        yield "", {**common, "choices": [], "usage": _usage(reply)}


# OpenAI's completions of text.


def parse_completion(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request of `/v1/completions`. Raises ApiError."""
    _refuse(
        body,
        {
            "frequency_penalty": (0,),
            "presence_penalty": (0,),
            "logit_bias": ({},),
            "echo": (False,),
            "suffix": ("",),
            "best_of": (1, body.get("n")),
        },
    )
    prompt: Any = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        prompt = tuple(prompt)
    if not prompt or not isinstance(prompt, str | tuple):
        raise ApiError("prompt must be one text or one list of token ids: send several prompts as several requests")
    logprobs = _get(body, "logprobs", (int, bool), None)
    return ChatRequest(
        prompt,
        stop=_read_stop(body.get("stop")),
        num_choices=_read_choices(body),
        has_logprobs=logprobs is not None and logprobs is not False,
        parses_calls=False,
        **_read_sampling(body, "max_tokens"),
    )


def _render_completion_choice(request: ChatRequest, index: int, choice: ChatChoice) -> dict[str, Any]:
    logprobs = None
    if request.has_logprobs:
        offsets = [sum(map(len, choice.pieces[:i])) for i in range(len(choice.pieces))]
        logprobs = {
            "tokens": list(choice.pieces),
            "token_logprobs": list(choice.logp),
            "top_logprobs": None,
            "text_offset": offsets,
        }
    ids = {"token_ids": list(choice.token_ids)} if request.has_token_ids else {}
    return {
        "index": index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        **ids,
    }


def render_completion(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """Return the answer of `/v1/completions`."""
    return {
        "id": f"cmpl-{reply.identifier}",
        "object": "text_completion",
        "created": reply.created,
        "model": request.model,
        "choices": [_render_completion_choice(request, *pair) for pair in enumerate(reply.choices)],
        "usage": _usage(reply),
        **({"prompt_token_ids": list(reply.prompt_ids)} if request.has_token_ids else {}),
    }


def stream_completion(request: ChatRequest, reply: ChatReply) -> Iterator[Event]:
    """Yield the answer of `/v1/completions`, each choice as one chunk."""
    rendered = render_completion(request, reply)
    for choice in rendered["choices"]:
        yield "", {**rendered, "choices": [choice], "usage": None}
    if request.has_usage_event:
        yield "", {**rendered, "choices": []}


# OpenAI's responses.


def parse_response(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request of `/v1/responses`, whose `input` has the items of earlier responses too. Raises ApiError."""
    text = (body.get("text") or {}).get("format") or {}
    if text.get("type", "text") != "text":
        raise ApiError("text.format is not enforced here: ask for the form in the prompt, or send {'type': 'text'}")
    _refuse(body, {"background": (False,), "conversation": ()})
    messages = list[Message]()
    if instructions := _get(body, "instructions", str, ""):
        messages.append({"role": "system", "content": instructions})
    given: Any = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _require_objects(given, "input")
    for number, item in enumerate(items, 1):
        where, kind = f"input item {number}", item.get("type", "message")
        if kind == "message":
            role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
            if role not in ("system", "user", "assistant"):
                raise ApiError(f"{where} has the role {role!r}: use system, developer, user or assistant")
            messages.append({"role": role, "content": _read_text(item.get("content"), where)})
        elif kind == "function_call":
            call = _make_call(item.get("name"), _read_arguments(item.get("arguments"), where))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": _read_text(item.get("output"), where)})
        elif kind != "reasoning":
            raise ApiError(f"{where} has the type {kind!r}: this endpoint reads messages and function calls")
    given_tools = _require_objects(body.get("tools"), "tools")
    if other := [tool.get("type") for tool in given_tools if tool.get("type") != "function"]:
        raise ApiError(f"a tool has the type {other[0]!r}: only functions of the program are offered here")
    tools = [_make_tool(tool.get("name"), tool.get("description"), tool.get("parameters")) for tool in given_tools]
    return ChatRequest(
        _check_conversation(messages),
        tuple(tools),
        parses_calls=bool(tools) and body.get("tool_choice") != "none",
        **_read_sampling(body, "max_output_tokens"),
    )


def _response_items(reply: ChatReply) -> list[dict[str, Any]]:
    """Return the output items of a response: a message, and function calls."""
    choice, items = reply.choices[0], list[dict[str, Any]]()
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    if choice.content or not choice.calls:
        part = {"type": "output_text", "text": choice.content, "annotations": [], "logprobs": []}
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
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{number}",
                "call_id": number,
                "name": call.name,
                "arguments": _dump_arguments(call),
                "status": status,
            }
        )
    return items


def _render_response(
    request: ChatRequest, reply: ChatReply, status: str, items: list[dict[str, Any]]
) -> dict[str, Any]:
    usage = {
        **_usage(reply, ("input_tokens", "output_tokens")),
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
    return _render_response(request, reply, status, _response_items(reply))


def stream_response(request: ChatRequest, reply: ChatReply) -> Iterator[Event]:
    """Yield the answer of `/v1/responses` as its events."""
    numbers = iter(range(10**9))

    def event(name: str, **values: Any) -> Event:
        return name, {"type": name, "sequence_number": next(numbers), **values}

    started = _render_response(request, reply, "in_progress", [])
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    for index, item in enumerate(_response_items(reply)):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part, opened = item["content"][0], {**item, "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=index, item=opened)
            yield event("response.content_part.added", **at, content_index=0, part={**part, "text": ""})
            yield event("response.output_text.delta", **at, content_index=0, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **at, content_index=0, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, content_index=0, part=part)
        else:
            opened = {**item, "status": "in_progress", "arguments": ""}
            yield event("response.output_item.added", output_index=index, item=opened)
            yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield event("response.function_call_arguments.done", **at, **done)
        yield event("response.output_item.done", output_index=index, item=item)
    rendered = render_response(request, reply)
    yield event(f"response.{rendered['status']}", response=rendered)


# Anthropic's messages.


def parse_messages(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request of `/v1/messages`. Raises ApiError."""
    messages = list[Message]()
    if system := _read_text(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for number, given in enumerate(_require_objects(body.get("messages"), "messages"), 1):
        role, where = given.get("role"), f"message {number}"
        if role not in ("user", "assistant", "system"):
            raise ApiError(f"{where} has the role {role!r}: use user or assistant")
        content = given.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _require_objects(content, where)
        special = [block for block in blocks if block.get("type") in ("tool_use", "tool_result")]
        text = _read_text([block for block in blocks if block not in special], where)
        if role == "assistant":
            calls = [_make_call(block.get("name"), block.get("input") or {}) for block in special]
            messages.append({"role": role, "content": text, **({"tool_calls": calls} if calls else {})})
            continue
        messages += [{"role": "tool", "content": _read_text(block.get("content"), where)} for block in special]
        if text or not special:
            messages.append({"role": role, "content": text})
    given_tools = _require_objects(body.get("tools"), "tools")
    if other := [tool.get("type") for tool in given_tools if "input_schema" not in tool]:
        raise ApiError(f"a tool has the type {other[0]!r}: only functions of the program are offered here")
    tools = [_make_tool(tool.get("name"), tool.get("description"), tool["input_schema"]) for tool in given_tools]
    choice = (_get(body, "tool_choice", dict, {})).get("type")
    return ChatRequest(
        _check_conversation(messages),
        tuple(tools),
        stop=_read_stop(body.get("stop_sequences")),
        parses_calls=bool(tools) and choice != "none",
        **_read_sampling(body, "max_tokens"),
    )


def _message_blocks(choice: ChatChoice) -> list[dict[str, Any]]:
    blocks = list[dict[str, Any]]()
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
        "usage": {"input_tokens": len(reply.prompt_ids), "output_tokens": reply.num_tokens},
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
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
        yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    end = {"stop_reason": rendered["stop_reason"], "stop_sequence": rendered["stop_sequence"]}
    yield "message_delta", {"type": "message_delta", "delta": end, "usage": {"output_tokens": usage["output_tokens"]}}
    yield "message_stop", {"type": "message_stop"}


def _anthropic_error(error: ApiError) -> dict[str, Any]:
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


CHAT = ApiFormat("/v1/chat/completions", parse_chat, render_chat, stream_chat, _openai_error, "[DONE]")
COMPLETIONS = ApiFormat(
    "/v1/completions", parse_completion, render_completion, stream_completion, _openai_error, "[DONE]"
)
RESPONSES = ApiFormat("/v1/responses", parse_response, render_response, stream_response, _openai_error)
MESSAGES = ApiFormat("/v1/messages", parse_messages, render_messages, stream_messages, _anthropic_error)
FORMATS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
