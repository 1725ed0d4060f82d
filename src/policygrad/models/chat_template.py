"""Rendering chat messages to text and token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from policygrad.errors import ModelError
from policygrad.models.tool_calls import get_chat_template, supports_tools
from policygrad.utils.pictures import content_text, list_pictures

if TYPE_CHECKING:
    from policygrad.models.tokenizer import Tokenizer

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


class HistoryRewrittenError(ModelError):
    """The template renders earlier turns differently once there is another message."""


# Tools for models whose chat template does not support them, or that have none.


def format_tools(tools: Tools) -> str:
    """List the tools, one JSON schema per line, and how to call them, with the tags of Hermes and Qwen."""
    lines = (json.dumps(tool, ensure_ascii=False) for tool in tools)
    usage = (
        'To call one, write <tool_call>{"name": "…", "arguments": {…}}</tool_call>. What it returns follows in '
        "<tool_response></tool_response>."
    )
    return "\n".join(["You can call these functions:", "<tools>", *lines, "</tools>", usage])


def format_tool_response(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def inline_tools(messages: Sequence[Message], tools: Tools) -> list[Message]:
    """Convert a conversation for a template that does not support tools.

    The tools are listed before the first message's text; the results of one turn become one user message.
    """
    converted: list[Message] = []
    for is_tool, group in groupby(messages, lambda message: message.get("role") == "tool"):
        if is_tool:
            converted.append({"role": "user", "content": join_tool_responses(list(group))})
        else:
            converted += group
    if not converted:
        return converted
    first = converted[0]
    content, listed = first.get("content"), f"{format_tools(tools)}\n\n"
    if isinstance(content, (list, tuple)):
        return [{**first, "content": ({"type": "text", "text": listed}, *content)}, *converted[1:]]
    return [{**first, "content": f"{listed}{content}"}, *converted[1:]]


def join_tool_responses(messages: Sequence[Message]) -> Any:
    """Join what the tools of one turn returned: text, or parts if there is a picture."""
    if not any(list_pictures(messages)):
        return "\n".join(format_tool_response(content_text(message.get("content") or "")) for message in messages)
    parts = list[Any]()
    for message in messages:
        content = message.get("content") or ""
        inner = [{"type": "text", "text": content}] if isinstance(content, str) else content
        before = "\n<tool_response>\n" if parts else "<tool_response>\n"
        parts += [{"type": "text", "text": before}, *inner, {"type": "text", "text": "\n</tool_response>"}]
    return tuple(parts)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    generation_prompt: bool,
    tools: Tools | None = None,
    source: str = "a prompt",
) -> str:
    """Render messages with the model's chat template.

    Args:
        generation_prompt: Append what opens the assistant's turn.
        tools: Rendered by the template, or within the first message if it does not support them.
        source: Location of the messages, for error messages.

    Raises:
        ModelError: No chat template, or one that refuses the messages.
    """
    if getattr(tokenizer.hf, "chat_template", None) is None:
        raise ModelError(
            f"{source} is a list of chat messages and the tokenizer of {tokenizer.name!r} has no chat template: set "
            "`chat_template` in its tokenizer_config.json, or give the prompts as strings"
        )
    if tools and not supports_tools(get_chat_template(tokenizer.hf)):
        messages, tools = inline_tools(messages, tools), None
    options = {} if tools is None else {"tools": list(tools)}
    conversation = [_with_parts(message, tokenizer, source) for message in messages]
    try:
        text = tokenizer.hf.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=generation_prompt, **options
        )
    except Exception as error:  # a template is the model's program: it may raise anything
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise ModelError(
            f"{source}: the chat template of {tokenizer.name!r} refuses the messages (roles: {roles}): "
            f"{str(error).strip().rstrip('.') or repr(error)}. Change the messages, or give the prompt as a string"
        ) from error
    return str(text)


def _with_parts(message: Message, tokenizer: Tokenizer, source: str) -> dict[str, Any]:
    """Write a message's content as its model's template reads it: text, or for a model that sees a list of parts."""
    content = message.get("content")
    if tokenizer.pictures is None:
        if any(list_pictures([message])):
            raise ModelError(
                f"{source} has a picture, and {tokenizer.name!r} does not see: give a vision-language model, with its processor"
            )
        return {**message, "content": content if content is None else content_text(content)}
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    parts = [part if part["type"] == "text" else {"type": "image"} for part in content or ()]
    return {**message, "content": parts}


def expand_pictures(tokenizer: Tokenizer, text: str, messages: Sequence[Message], source: str) -> str:
    """Return a rendered text with the placeholder tokens of its messages' pictures. Raises ModelError."""
    pictures = list(list_pictures(messages))
    if not pictures or tokenizer.pictures is None:
        return text
    return tokenizer.pictures.expand(text, pictures, source)


def render_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    generation_prompt: bool,
    tools: Tools | None = None,
    source: str = "a prompt",
) -> list[int]:
    """Render messages and encode them; the template writes all special tokens. Raises like `render`."""
    text = render(tokenizer, messages, generation_prompt=generation_prompt, tools=tools, source=source)
    return encode_text(tokenizer, expand_pictures(tokenizer, text, messages, source))


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a rendered text."""
    return list(tokenizer.hf(text, add_special_tokens=False)["input_ids"])


def extend_ids(
    tokenizer: Tokenizer, ids: list[int], messages: Sequence[Message], *, generation_prompt: bool, source: str
) -> list[int]:
    """Encode a longer conversation, whose ids must begin with `ids`, those of its beginning.

    Raises:
        ModelError: See `render`; or the template renders earlier messages differently once there are more.
    """
    longer = render_ids(tokenizer, messages, generation_prompt=generation_prompt, source=source)
    if longer[: len(ids)] != ids:
        raise ModelError(
            f"{source}: the chat template of {tokenizer.name!r} renders the first {len(messages) - 1} messages differently once "
            "there is another one, so the tokens of the assistant's turns cannot be located: split the conversation into one "
            "line per assistant turn, or use a template that only appends"
        )
    return longer
