"""What the request formats have in common: numbers, stop texts, contents of messages, tools and calls; and OpenAI's answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.proxy.requests import ApiError, ChatReply, ChatRequest, Message

MAX_CHOICES = 128
MAX_ALTERNATIVES = 20
"""As in OpenAI's chat format."""
MAX_TOOLS_SIZE = 2**20
"""Characters of the descriptions of a request's tools, as JSON."""
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_HIDDEN_PARTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")


def quote(value: Any) -> str:
    """Return a value for a message."""
    return json.dumps(value, default=str, ensure_ascii=False)[:200]


def read_field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """Return a field, or the default if it is absent or null. Raises ApiError for another type."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise ApiError(f"{name} must be {names}, not {quote(value)}")
    return value


def read_sampling(body: Mapping[str, Any], *max_tokens: str, least: int = 1) -> dict[str, Any]:
    """Read the fields that all formats share. least: The smallest limit of tokens."""
    numbers = {name: read_field(body, name, (int, float)) for name in ("temperature", "top_p")}
    limit = next((value for name in max_tokens if (value := read_field(body, name, int)) is not None), None)
    if limit is not None and limit < least:
        raise ApiError(f"{max_tokens[0]} must be at least {least}, not {limit}")
    temperature, top_p = numbers["temperature"], numbers["top_p"]
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ApiError(f"temperature must be finite and at least 0, not {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ApiError(f"top_p must be in (0, 1], not {top_p}")
    return {
        **numbers,
        "max_tokens": limit,
        "top_k": read_field(body, "top_k", int),
        "seed": read_field(body, "seed", int),
        "stream": read_field(body, "stream", bool, False),
        "has_token_ids": read_field(body, "return_token_ids", bool, False),
        "model": read_field(body, "model", str, ""),
    }


def read_count(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    """Return a whole number in a range."""
    count: int = read_field(body, name, int, default)
    if not least <= count <= most:
        raise ApiError(f"{name} must be from {least} to {most}, not {count}")
    return count


def read_alternatives(body: Mapping[str, Any], asked_by: str = "") -> int:
    """Return how many of the most probable tokens are to be listed. asked_by: What is missing to list any."""
    count = read_count(body, "top_logprobs", 0, 0, MAX_ALTERNATIVES)
    if count and asked_by:
        raise ApiError(f"top_logprobs={count} needs {asked_by}")
    return count


def read_stop(value: Any) -> tuple[str, ...]:
    """Return the texts that end a completion."""
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ApiError(f"stop must be a text or a list of texts, not {quote(value)}")
    return tuple(texts)


def read_text(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, or parts that are text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(f"the content of {where} must be text or a list of parts, not {type(content).__name__}")
    texts = list[str]()
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_PARTS:
            text = part.get("text") or part.get("refusal") or ""
            if not isinstance(text, str):
                raise ApiError(f"a part of {where} has a text that is none: {quote(text)}")
            texts.append(text)
        elif kind not in _HIDDEN_PARTS:
            raise ApiError(f"{where} has a part of type {kind!r}: this endpoint reads text alone")
    return "".join(texts)


def read_objects(values: Any, name: str) -> list[dict[str, Any]]:
    """Return a list of objects; [] if there is none."""
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ApiError(f"{name} must be a list of objects")
    return values


def make_call(name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Return an assistant's call as chat templates read it.

    arguments: An object, or its JSON text as in OpenAI's formats.
    """
    if not isinstance(name, str) or not name:
        raise ApiError(f"a tool call of {where} has no name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the arguments of {where} are no JSON: {error}") from error
    if not isinstance(arguments, dict | None):
        raise ApiError(f"the arguments of {where} must be a JSON object, not {quote(arguments)}")
    return {"type": "function", "function": {"name": name, "arguments": arguments or {}}}


def read_tools(given: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return tools as chat templates read them, from objects with name, description and parameters."""
    tools = list[dict[str, Any]]()
    for tool in given:
        name, parameters = tool.get("name"), tool.get("parameters")
        if not isinstance(name, str) or not name:
            raise ApiError(f"a tool has no name: {quote(tool)}")
        if not isinstance(parameters, dict | None):
            raise ApiError(f"the parameters of the tool {name!r} must be a JSON schema, not {quote(parameters)}")
        function = {
            "name": name,
            "description": str(tool.get("description") or ""),
            "parameters": parameters or {"type": "object"},
        }
        tools.append({"type": "function", "function": function})
    if tools and (size := len(json.dumps(tools))) > MAX_TOOLS_SIZE:
        raise ApiError(f"the tools are described in {size} characters, and the most is {MAX_TOOLS_SIZE}", 413)
    return tuple(tools)


def check_conversation(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages that end with something to answer."""
    if not messages:
        raise ApiError("there is no message to answer")
    if messages[-1]["role"] == "assistant":
        raise ApiError(
            "the last message is the assistant's: an answer that begins with given text (prefill) is no sample of the policy. "
            "End with a message of the user or a tool"
        )
    return tuple(messages)


def count_tokens(reply: ChatReply, names: tuple[str, str] = ("prompt_tokens", "completion_tokens")) -> dict[str, Any]:
    """Return `usage`."""
    read, sampled = reply.num_read, reply.num_tokens
    return {names[0]: read, names[1]: sampled, "total_tokens": read + sampled}


def render_choices(
    request: ChatRequest, reply: ChatReply, identifier: str, kind: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return an answer with choices, as OpenAI's formats have it."""
    return {
        "id": identifier,
        "object": kind,
        "created": reply.created,
        "model": request.model,
        "choices": choices,
        "usage": count_tokens(reply),
        **({"prompt_token_ids": list(reply.prompt_ids)} if request.has_token_ids else {}),
    }


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return an error as OpenAI's formats have it."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
