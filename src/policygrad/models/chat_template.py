"""Chat messages as text and token ids: the one place that renders a model's template, and what follows a sampled turn.

Nothing that was sampled is tokenised again: the next turn's prompt is the ids so far, the sampled ids, and `continuation`. Where
a template writes earlier turns anew there is no such thing, and the next turn's prompt is `rewritten`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import count, groupby
from typing import Any, Protocol

from policygrad.errors import DataError, ModelError
from policygrad.models.control_tokens import Placeholders, encode_escaped, escape_special_tokens
from policygrad.models.tool_calls import get_chat_template, supports_tools

# Tools in the words of a conversation, for models whose chat template knows none, or that have no template.

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
_HOW = (
    'To call one, write <tool_call>{"name": "…", "arguments": {…}}</tool_call>. What it returns follows in '
    "<tool_response></tool_response>."
)


def format_tools(tools: Tools) -> str:
    """What tools there are, one JSON schema a line, and how they are called: the tags of Hermes and Qwen."""
    lines = (json.dumps(tool, ensure_ascii=False) for tool in tools)
    return "\n".join(["You can call these functions:", "<tools>", *lines, "</tools>", _HOW])


def format_tool_response(text: str) -> str:
    """What a tool returned, in the tags of Hermes and Qwen."""
    return f"<tool_response>\n{text}\n</tool_response>"


def inline_tools(messages: Sequence[Message], tools: Tools) -> list[Message]:
    """The same conversation for a template without tools: they stand before the first message's text, and what they return is
    said by the user, all answers to one turn in one message."""
    found: list[Message] = []
    for is_tool, some in groupby(messages, lambda message: message.get("role") == "tool"):
        if is_tool:
            text = "\n".join(format_tool_response(str(message.get("content"))) for message in some)
            found.append({"role": "user", "content": text})
        else:
            found += some
    if not found:
        return found
    first = found[0]
    return [{**first, "content": f"{format_tools(tools)}\n\n{first.get('content')}"}, *found[1:]]


class ChatTokenizer(Protocol):
    """What is needed of a `Tokenizer` here."""

    @property
    def hf(self) -> Any: ...
    @property
    def name(self) -> str: ...
    @property
    def end_ids(self) -> frozenset[int]: ...


class HistoryRewrittenError(ModelError):
    """The template writes earlier turns otherwise once there is another message."""


def render(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    generation_prompt: bool,
    tools: Tools | None = None,
    source: str = "a prompt",
) -> str:
    """The messages as the model's template writes them; generation_prompt: up to where the assistant begins to speak.

    tools: as the template writes them, or in the first message's text where it knows none (`plain_tools`).
    source: where the messages stand, for error messages.

    Raises:
        ModelError: no chat template, or one that refuses the messages.
    """
    if getattr(tokenizer.hf, "chat_template", None) is None:
        raise ModelError(
            f"{source} is a list of chat messages and the tokenizer of {tokenizer.name!r} has no chat template: set "
            "`chat_template` in its tokenizer_config.json, or give the prompts as strings"
        )
    if tools and not supports_tools(get_chat_template(tokenizer.hf)):
        messages, tools = inline_tools(messages, tools), None
    given = {} if tools is None else {"tools": list(tools)}
    try:
        text = tokenizer.hf.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=generation_prompt, **given
        )
    except Exception as error:  # a template is a program of the model's: it may raise anything
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise ModelError(
            f"{source}: the chat template of {tokenizer.name!r} refuses the messages (roles: {roles}): "
            f"{str(error).strip().rstrip('.') or repr(error)}. Change the messages, or give the prompt as a string"
        ) from error
    return str(text)


def render_ids(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    generation_prompt: bool,
    tools: Tools | None = None,
    source: str = "a prompt",
) -> list[int]:
    """`render` in token ids; the template writes what special tokens there are. The same errors."""
    text = render(tokenizer, messages, generation_prompt=generation_prompt, tools=tools, source=source)
    return _plain_ids(tokenizer, text)


def encode_prompt(
    tokenizer: ChatTokenizer,
    prompt: str | Sequence[Message],
    *,
    tools: Tools | None = None,
    source: str = "a prompt",
) -> list[int]:
    """What the model is to continue: text as it stands, with what its tokenizer puts before it, or chat messages rendered."""
    if not isinstance(prompt, str):
        return render_ids(tokenizer, prompt, generation_prompt=True, tools=tools, source=source)
    text = f"{format_tools(tools)}\n\n{prompt}" if tools else prompt
    ids = list(tokenizer.hf(text, add_special_tokens=True)["input_ids"])
    closed = len(ids) > 1 and ids[-1] in tokenizer.end_ids  # some tokenizers close every text; a prompt is not closed
    return ids[:-1] if closed else ids


def extend_ids(
    tokenizer: ChatTokenizer, ids: list[int], messages: Sequence[Message], *, generation_prompt: bool, source: str
) -> list[int]:
    """The ids of a longer conversation, which have to begin with `ids`, those of its beginning.

    Raises:
        ModelError: as `render`; a template that writes earlier messages otherwise once there are more.
    """
    longer = render_ids(tokenizer, messages, generation_prompt=generation_prompt, source=source)
    if longer[: len(ids)] != ids:
        raise ModelError(
            f"{source}: the chat template of {tokenizer.name!r} renders the first {len(messages) - 1} messages otherwise once "
            "there is another one, so that the tokens of the assistant's turns cannot be told apart: split the conversation "
            "into one line per turn of the assistant, or use a template whose rendering only grows"
        )
    return longer


def encode_continuation(
    tokenizer: ChatTokenizer,
    messages_so_far: str | Sequence[Message],
    reply_text: str,
    new_messages: str | Sequence[Message],
    *,
    end_ids: Collection[int] | None = None,
    tools: Tools | None = None,
    source: str = "a conversation",
) -> list[int]:
    """The ids between a sampled turn and the next: prompt ids + sampled ids + these are the next turn's prompt.

    They are the rendered difference. Decoded, the whole is what the template makes of the conversation, up to whitespace at
    the ends of the reply and the end token itself, where a template trims the one or leaves out the other. Text goes on as text.
    What is new comes from tools and environments: where it spells out a control token, that is read letter by letter.

    messages_so_far: the conversation that the reply answers, each earlier reply as the text that was sampled.
    reply_text: the sampled turn, decoded without its end token. end_ids: what may have closed it, None = the tokenizer's ends.

    Raises:
        DataError: text that goes on as messages, or messages as text.
        ModelError: as `render`; letters that cannot be told from a control token.
        HistoryRewrittenError: a template that writes earlier turns otherwise once there are more.
    """
    if isinstance(messages_so_far, str) != isinstance(new_messages, str):
        raise DataError(f"{source}: what began as text goes on as text, and messages as messages: give both alike")
    word = _absent_from(repr((messages_so_far, reply_text, new_messages, tools)))
    if isinstance(messages_so_far, str) or isinstance(new_messages, str):
        [text], words = escape_special_tokens(tokenizer.hf, [{"content": str(new_messages)}], word)
        return encode_escaped(tokenizer.hf, text["content"], words, source)
    new, words = escape_special_tokens(tokenizer.hf, new_messages, word)

    def rendered(*reply: Message) -> str:
        messages = [*messages_so_far, *reply, *(new if reply else ())]
        return render(tokenizer, messages, generation_prompt=True, tools=tools, source=source)

    before, full = rendered().rstrip(), rendered({"role": "assistant", "content": reply_text})
    mark = _absent_from(full)
    head, found, tail = rendered({"role": "assistant", "content": mark}).partition(mark)
    said = full[len(before) : len(full) - len(tail)]
    grows = head.rstrip() == before and full.startswith(before) and full.endswith(tail)
    if not found or not grows or said.strip() != reply_text.strip():
        raise HistoryRewrittenError(
            f"{source}: the chat template of {tokenizer.name!r} rewrites earlier turns once there is another message (it leaves "
            "out their reasoning, say), so that the next turn cannot follow the tokens that were sampled: begin a new "
            "trajectory at every turn, or use a template whose rendering only grows"
        )
    return _after_end(tokenizer, tail, tokenizer.end_ids if end_ids is None else end_ids, words, source)


def encode_rewritten(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    opening: int,
    new: int,
    *,
    tools: Tools | None = None,
    source: str = "a conversation",
) -> tuple[list[int], list[int]]:
    """(the ids of a conversation as the template writes it now, up to where the assistant begins to speak; those of what is new).

    Earlier replies are text here, as the template leaves them. They and what tools and environments say end no turn: where they
    spell out a control token, it is read letter by letter.

    opening: messages that the task began with, which are taken as they are written. new: messages behind the last reply.

    Raises:
        ModelError: as `continuation`.
    """
    since, words = escape_special_tokens(tokenizer.hf, messages[opening:], _absent_from(repr((messages, tools))))
    whole = [*messages[:opening], *since]

    def rendered(messages: Sequence[Message]) -> str:
        return render(tokenizer, messages, generation_prompt=True, tools=tools, source=source)

    text, behind = rendered(whole), len(whole) - new
    mark = _absent_from(text)
    reply = {"role": "assistant", "content": mark}
    _, found, tail = rendered([*whole[: behind - 1], reply, *whole[behind:]]).partition(mark)
    if not found:  # a template that does not show the reply at all
        tail = "\n".join(str(message.get("content", "")) for message in whole[behind:])
    return encode_escaped(tokenizer.hf, text, words, source), _after_end(
        tokenizer, tail, tokenizer.end_ids, words, source
    )


def _after_end(
    tokenizer: ChatTokenizer, tail: str, end_ids: Collection[int], words: Placeholders, source: str
) -> list[int]:
    """The ids of what stands behind the end token, which was sampled. It is tokenised behind that token, where a tokenizer may
    see it otherwise than at the beginning of a text."""
    for end in sorted(end_ids):
        text = str(tokenizer.hf.convert_ids_to_tokens(end))
        if tail.lstrip().startswith(text):
            tail = tail.lstrip().removeprefix(text)
            ids = encode_escaped(tokenizer.hf, text + tail, words, source)
            return ids[1:] if ids[:1] == [end] else encode_escaped(tokenizer.hf, tail, words, source)
    return encode_escaped(tokenizer.hf, tail, words, source)


def _plain_ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return list(tokenizer.hf(text, add_special_tokens=False)["input_ids"])


def _absent_from(text: str) -> str:
    """A word that the text does not hold, of letters that no template trims, escapes or splits at."""
    return next(word for i in count() if (word := f"PLACEHOLDER{i}X") not in text)
