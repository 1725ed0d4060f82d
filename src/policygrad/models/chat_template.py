"""Rendering chat messages to text and token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from policygrad.errors import ModelError
from policygrad.models.tool_calls import get_chat_template, supports_tools

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
            text = "\n".join(format_tool_response(str(message.get("content"))) for message in group)
            converted.append({"role": "user", "content": text})
        else:
            converted += group
    if not converted:
        return converted
    first = converted[0]
    return [{**first, "content": f"{format_tools(tools)}\n\n{first.get('content')}"}, *converted[1:]]


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
    try:
        text = tokenizer.hf.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=generation_prompt, **options
        )
    except Exception as error:  # a template is the model's program: it may raise anything
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise ModelError(
            f"{source}: the chat template of {tokenizer.name!r} refuses the messages (roles: {roles}): "
            f"{str(error).strip().rstrip('.') or repr(error)}. Change the messages, or give the prompt as a string"
        ) from error
    return str(text)


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
