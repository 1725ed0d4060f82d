"""Continuing a conversation in token ids: what stands between a sampled turn and the next, by the model's chat template."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policygrad.errors import DataError
from policygrad.models.chat_template import expand_pictures, render
from policygrad.models.control_tokens import (
    Placeholders,
    encode_escaped,
    escape_special_tokens,
    list_special_texts,
    make_placeholder,
)
from policygrad.models.messages import ANY_END, EncodedText, HistoryRewrittenError, Message, Tools
from policygrad.utils.message_parts import content_text

if TYPE_CHECKING:
    from policygrad.models.tokenizer import Tokenizer


def encode_continuation(
    tokenizer: Tokenizer,
    so_far: str | Sequence[Message],
    reply: str,
    new: str | Sequence[Message],
    source: str = "a conversation",
    tools: Tools | None = None,
    *,
    end: int | None = ANY_END,
) -> EncodedText:
    """Encode the new messages after a reply, as `Tokenizer.encode_continuation` says: the rendered difference."""
    if isinstance(so_far, str) != isinstance(new, str):
        raise DataError(f"{source}: a text must be continued by text, and messages by messages")
    prefix = make_placeholder(repr((so_far, reply, new, tools)))
    if isinstance(so_far, str) or isinstance(new, str):
        [text], placeholders = escape_special_tokens(tokenizer.hf, [{"content": str(new)}], prefix)
        ids = torch.tensor(encode_escaped(tokenizer.hf, text["content"], placeholders, source), dtype=torch.int64)
        return EncodedText(ids, is_content=torch.ones_like(ids, dtype=torch.bool) if tokenizer.marks_contents else None)
    escaped, placeholders = escape_special_tokens(tokenizer.hf, new, prefix)
    rendered = partial(render, tokenizer, generation_prompt=True, tools=tools, source=source)
    before = rendered(so_far).rstrip()
    full = rendered([*so_far, {"role": "assistant", "content": reply}, *escaped])
    mark = make_placeholder(full)
    head, marked, tail = rendered([*so_far, {"role": "assistant", "content": mark}, *escaped]).partition(mark)
    rendered_reply = full[len(before) : len(full) - len(tail)]
    appends = head.rstrip() == before and full.startswith(before) and full.endswith(tail)
    if not marked or not appends or rendered_reply.strip() != reply.strip():
        raise HistoryRewrittenError(
            f"{source}: the chat template of {tokenizer.name!r} rewrites earlier turns once there is another message (for example, "
            "it drops their reasoning), so the next turn cannot continue the sampled tokens: begin a new trajectory at every "
            "turn, or use a template that only appends"
        )
    encoded = _encode_after_end(tokenizer, tail, new, placeholders, source, end)
    if not tokenizer.marks_contents:
        return encoded
    marks = [f"{mark}{number}X" for number in range(len(new))]
    masked = [{**message, "content": word} for message, word in zip(new, marks, strict=True)]
    template = rendered([*so_far, {"role": "assistant", "content": mark}, *masked]).partition(mark)[2]
    return replace(encoded, is_content=_mark_contents(tokenizer, encoded, new, template, marks))


def encode_rewritten(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    opening: int,
    new: int,
    source: str = "a conversation",
    tools: Tools | None = None,
) -> tuple[EncodedText, EncodedText]:
    """Encode a conversation whose template rewrites earlier turns, as `Tokenizer.encode_rewritten` says."""
    prefix = make_placeholder(repr((messages, tools)))
    given_tools = tools or ()
    in_replies = _find_reply_tokens(tokenizer, messages[:opening], source)
    escaped, placeholders = escape_special_tokens(tokenizer.hf, [*messages[opening:], *given_tools], prefix, in_replies)
    conversation = [*messages[:opening], *escaped[: len(messages) - opening]]
    tools = escaped[len(messages) - opening :] or None
    earlier, new_messages = conversation[: -1 - new], conversation[len(conversation) - new :]
    rendered = partial(render, tokenizer, generation_prompt=True, tools=tools, source=source)
    text = rendered(conversation)
    mark = make_placeholder(text)
    _, marked, tail = rendered([*earlier, {"role": "assistant", "content": mark}, *new_messages]).partition(mark)
    if not marked:  # the template does not show the reply at all
        tail, new_messages = "\n".join(content_text(message.get("content", "")) for message in new_messages), []
    encode = partial(encode_escaped, tokenizer.hf, placeholders=placeholders, source=source)
    expanded = expand_pictures(tokenizer, text, conversation, source)
    rewritten = tokenizer.with_media(encode(expanded), encode(text), conversation, source)
    end = _encode_after_end(tokenizer, tail, new_messages, placeholders, source)
    if tokenizer.marks_contents and new_messages:
        marks = [f"{mark}{number}X" for number in range(len(new_messages))]
        masked = [{**message, "content": word} for message, word in zip(new_messages, marks, strict=True)]
        template = rendered([*earlier, {"role": "assistant", "content": mark}, *masked]).partition(mark)[2]
        end = replace(end, is_content=_mark_contents(tokenizer, end, messages[len(messages) - new :], template, marks))
    return rewritten, end


def _find_reply_tokens(tokenizer: Tokenizer, opening: Sequence[Message], source: str) -> frozenset[str]:
    """Return the control tokens that may stand in a reply: not those that end it, or that the template writes around turns."""
    blank = [{**message, "content": "x"} for message in opening if message.get("role") in ("system", "user")]
    shown = render(tokenizer, blank or opening, generation_prompt=True, source=source)
    around = re.sub(r"<think>\s*(</think>\s*)?$", "", shown)
    return frozenset(text for text in list_special_texts(tokenizer.hf, tokenizer.unread_ids) if text not in around)


def _mark_contents(
    tokenizer: Tokenizer, encoded: EncodedText, messages: Sequence[Message], template: str, marks: Sequence[str]
) -> Tensor:
    """Return [P] bool, the tokens with a character of a message's content.

    Args:
        template: The messages as the chat template renders them, each content replaced by one of `marks`.
    """
    ids = encoded.ids
    decode = partial(tokenizer.hf.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    text, marked = str(decode(ids)), torch.zeros_like(ids, dtype=torch.bool)
    pieces = re.split("|".join(map(re.escape, marks)), template)
    contents = [content_text(message.get("content", "")).strip() for message in messages]
    # without the end token, which the policy sampled, and without what the template writes before the first content
    opening = pieces[0].rstrip()
    shown = next((n for n in range(len(opening) + 1) if text.startswith(opening[n:])), len(opening))
    at = len(opening) - shown
    for content, piece in zip(contents, pieces[1:], strict=False):
        at += len(text[at:]) - len(text[at:].lstrip())
        # a template may change a content (to JSON, say): then it is what stands between the template's pieces
        end = at + len(content) if text.startswith(content, at) else at
        if piece.strip():
            end = text.find(piece.strip(), end)
        elif end == at:
            end = len(text)
        if end < 0:
            break
        end = at + len(text[at:end].rstrip())
        if end > at:
            marked[_token_at(decode, ids, text, at + 1) : _token_at(decode, ids, text, end) + 1] = True
        at = end + len(text[end:]) - len(text[end:].lstrip()) + len(piece.strip())
    for picture in encoded.media:
        marked[picture.slots] = False
    return marked


def _encode_after_end(
    tokenizer: Tokenizer,
    tail: str,
    messages: Sequence[Message],
    placeholders: Placeholders,
    source: str,
    end: int | None = ANY_END,
) -> EncodedText:
    """Encode what follows a sampled turn, `messages` rendered as `tail`: after the template's end token, where the result may
    differ. The token itself comes first unless it is the one that was sampled."""
    encode = partial(_encode_tail, tokenizer, placeholders=placeholders, source=source, sampled=end)
    expanded = expand_pictures(tokenizer, tail, messages, source)
    return tokenizer.with_media(encode(expanded), encode(tail), messages, source)


def _encode_tail(
    tokenizer: Tokenizer, tail: str, placeholders: Placeholders, source: str, sampled: int | None
) -> list[int]:
    for end in sorted(tokenizer.end_ids):
        text = str(tokenizer.hf.convert_ids_to_tokens(end))
        if tail.lstrip().startswith(text):
            tail = tail.lstrip().removeprefix(text)
            with_end = encode_escaped(tokenizer.hf, text + tail, placeholders, source)
            if with_end[:1] == [end]:
                return with_end[sampled in (end, ANY_END) :]
            break
    return encode_escaped(tokenizer.hf, tail, placeholders, source)


def _token_at(decode: Callable[[Tensor], str], ids: Tensor, text: str, end: int) -> int:
    """Return the index of the first token at which the decoded text reaches `end` characters."""
    return bisect_left(range(1, len(ids)), True, key=lambda count: decode(ids[:count])[:end] == text[:end])
