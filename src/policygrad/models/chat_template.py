"""Rendering chat messages to text and token ids, and the ids between a sampled turn and the next.

Sampled tokens are never tokenized again: the next turn's prompt is the ids so far, the sampled ids, and `encode_continuation`.
If a template rewrites earlier turns, that is impossible, and the next turn's prompt is `encode_rewritten`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

from policygrad.errors import DataError, ModelError
from policygrad.models.control_tokens import Placeholders, encode_escaped, escape_special_tokens
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


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | Sequence[Message], *, tools: Tools | None = None, source: str = "a prompt"
) -> list[int]:
    """Encode a prompt: text, preceded by the tokenizer's initial special tokens, or rendered chat messages."""
    if not isinstance(prompt, str):
        return render_ids(tokenizer, prompt, generation_prompt=True, tools=tools, source=source)
    text = f"{format_tools(tools)}\n\n{prompt}" if tools else prompt
    ids = list(tokenizer.hf(text, add_special_tokens=True)["input_ids"])
    closed = len(ids) > 1 and ids[-1] in tokenizer.end_ids  # some tokenizers close every text; a prompt stays open
    return ids[:-1] if closed else ids


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


def encode_continuation(
    tokenizer: Tokenizer,
    messages_so_far: str | Sequence[Message],
    reply_text: str,
    new_messages: str | Sequence[Message],
    *,
    tools: Tools | None = None,
    source: str = "a conversation",
) -> list[int]:
    """Encode what stands between a sampled turn and the next: prompt ids + sampled ids + these are the next prompt.

    They are the rendered difference. Decoded, the concatenation is the template's rendering of the conversation, except for
    whitespace around the reply and the end token, which a template may trim or leave out. New messages come from tools and
    environments: control tokens that they spell out are encoded letter by letter.

    Args:
        messages_so_far: The conversation that the reply answers, each earlier reply as its sampled text.
        reply_text: The sampled turn, decoded without its end token.
        new_messages: Text if the conversation is text, else messages.

    Raises:
        DataError: Text continued by messages, or the reverse.
        ModelError: See `render`; or letters that cannot be encoded without a control token.
        HistoryRewrittenError: The template renders earlier turns differently once there are more.
    """
    if isinstance(messages_so_far, str) != isinstance(new_messages, str):
        raise DataError(f"{source}: a text must be continued by text, and messages by messages")
    prefix = _make_placeholder(repr((messages_so_far, reply_text, new_messages, tools)))
    if isinstance(messages_so_far, str) or isinstance(new_messages, str):
        [text], placeholders = escape_special_tokens(tokenizer.hf, [{"content": str(new_messages)}], prefix)
        return encode_escaped(tokenizer.hf, text["content"], placeholders, source)
    new, placeholders = escape_special_tokens(tokenizer.hf, new_messages, prefix)

    rendered = partial(render, tokenizer, generation_prompt=True, tools=tools, source=source)
    before = rendered(messages_so_far).rstrip()
    full = rendered([*messages_so_far, {"role": "assistant", "content": reply_text}, *new])
    mark = _make_placeholder(full)
    with_mark = rendered([*messages_so_far, {"role": "assistant", "content": mark}, *new])
    head, marked, tail = with_mark.partition(mark)
    rendered_reply = full[len(before) : len(full) - len(tail)]
    appends = head.rstrip() == before and full.startswith(before) and full.endswith(tail)
    if not marked or not appends or rendered_reply.strip() != reply_text.strip():
        raise HistoryRewrittenError(
            f"{source}: the chat template of {tokenizer.name!r} rewrites earlier turns once there is another message (for example, "
            "it drops their reasoning), so the next turn cannot continue the sampled tokens: begin a new trajectory at every turn, "
            "or use a template that only appends"
        )
    return _encode_after_end(tokenizer, tail, placeholders, source)


def encode_rewritten(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    opening: int,
    new: int,
    *,
    tools: Tools | None = None,
    source: str = "a conversation",
) -> tuple[list[int], list[int]]:
    """Encode a conversation whose template rewrites earlier turns.

    Earlier replies are text here, as the template renders them. Control tokens that they, tools or environments spell out are
    encoded letter by letter.

    Args:
        opening: Number of messages in the task's prompt, which are encoded as they are.
        new: Number of messages after the last reply.

    Returns:
        The ids of the conversation up to where the assistant's turn begins, and the ids of the new messages.

    Raises:
        ModelError: See `encode_continuation`.
    """
    prefix = _make_placeholder(repr((messages, tools)))
    escaped, placeholders = escape_special_tokens(tokenizer.hf, messages[opening:], prefix)
    conversation = [*messages[:opening], *escaped]
    earlier, new_messages = conversation[: -1 - new], conversation[len(conversation) - new :]
    rendered = partial(render, tokenizer, generation_prompt=True, tools=tools, source=source)
    text = rendered(conversation)
    mark = _make_placeholder(text)
    _, marked, tail = rendered([*earlier, {"role": "assistant", "content": mark}, *new_messages]).partition(mark)
    if not marked:  # the template does not show the reply at all
        tail = "\n".join(str(message.get("content", "")) for message in new_messages)
    ids = encode_escaped(tokenizer.hf, text, placeholders, source)
    return ids, _encode_after_end(tokenizer, tail, placeholders, source)


def _encode_after_end(tokenizer: Tokenizer, tail: str, placeholders: Placeholders, source: str) -> list[int]:
    """Encode what follows the sampled end token. It is tokenized after that token, where the result may differ."""
    for end in sorted(tokenizer.end_ids):
        text = str(tokenizer.hf.convert_ids_to_tokens(end))
        if tail.lstrip().startswith(text):
            tail = tail.lstrip().removeprefix(text)
            ids = encode_escaped(tokenizer.hf, text + tail, placeholders, source)
            return ids[1:] if ids[:1] == [end] else encode_escaped(tokenizer.hf, tail, placeholders, source)
    return encode_escaped(tokenizer.hf, tail, placeholders, source)


def _make_placeholder(text: str) -> str:
    """Return a word that is not in the text, of letters that no template trims, escapes or splits."""
    return next(word for i in count() if (word := f"PLACEHOLDER{i}X") not in text)
