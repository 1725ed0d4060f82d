"""Continuing a conversation in token ids: what stands between a sampled turn and the next, by the model's chat template."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policygrad.errors import DataError, ModelError
from policygrad.models.chat.control_tokens import (
    Placeholders,
    encode_escaped,
    escape_special_tokens,
    list_special_texts,
    make_placeholder,
)
from policygrad.models.chat.formats import list_format_names
from policygrad.models.chat.messages import (
    ANY_END,
    Continuation,
    EncodedText,
    HistoryRewrittenError,
    LostMessageError,
    Message,
    Tools,
)
from policygrad.models.chat.rendering import expand_pictures, inline_tools, render, write_message
from policygrad.models.chat.turns import AssistantMessage, ToolCall, number_calls
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
    call_ids: Sequence[str] = (),
) -> Continuation:
    """Encode the new messages after a reply, as `Tokenizer.encode_continuation` says: the rendered difference."""
    if isinstance(so_far, str) != isinstance(new, str):
        raise DataError(f"{source}: a text must be continued by text, and messages by messages")
    if isinstance(so_far, str) or isinstance(new, str):
        prefix = make_placeholder(repr((so_far, reply, new, tools)))
        [text], placeholders = escape_special_tokens(tokenizer.hf, [{"content": str(new)}], prefix)
        ids = torch.tensor(encode_escaped(tokenizer.hf, text["content"], placeholders, source), dtype=torch.int64)
        marked = torch.ones_like(ids, dtype=torch.bool) if tokenizer.marks_contents else None
        return Continuation(ids, is_content=marked)
    seam = _Seam(tokenizer, so_far, reply, new, source, tools, call_ids)
    try:
        found = seam.find()
    except HistoryRewrittenError:
        raise
    except ModelError as error:
        if not any(message.get("role") == "tool" for message in new):
            raise
        # a template that shows what tools say only after a call that it reads itself
        seam = _Seam(tokenizer, so_far, reply, inline_tools(new, ()), source, tools, call_ids)
        try:
            found = seam.find()
        except HistoryRewrittenError:
            raise
        except ModelError:
            raise error from None
    encoded = _encode_after_end(tokenizer, found.tail, seam.new, seam.placeholders, source, end)
    if tokenizer.marks_contents:
        encoded = replace(encoded, is_content=seam.mark_contents(encoded, found.reply))
    return Continuation(
        encoded.ids, encoded.media, encoded.compact_ids, encoded.is_content, (found.reply, *seam.new_messages)
    )


def check_tool_use(
    tokenizer: Tokenizer, prompt: Sequence[Message], tools: Tools, source: str, *, reads_calls: bool = True
) -> None:
    """Try a call and its result once, so that a run with tools ends before it begins where a chat template cannot do that.

    Args:
        reads_calls: Calls are read in the model's format, not by a parser of the environment's own.

    Raises:
        ModelError: Calls are written in an unknown format, or the template leaves a tool's result out.
    """
    if reads_calls and (reason := tokenizer.chat_format.parse("").unread):
        raise ModelError(f"{source}: {reason}. Known are {', '.join(list_format_names())}")
    name = next((str(tool.get("function", tool).get("name", "tool")) for tool in tools), "tool")
    asked = AssistantMessage(calls=(ToolCall(name, {}),))
    reply = write_turn(tokenizer, prompt, asked, tools, source) if reads_calls else name
    result = {"role": "tool", "name": name, "tool_call_id": number_calls(asked.calls, 0)[0], "content": "0"}
    with suppress(HistoryRewrittenError):  # an episode has branches then
        encode_continuation(tokenizer, prompt, reply, [result], source, tools)


def write_turn(
    tokenizer: Tokenizer, prompt: Sequence[Message], message: AssistantMessage, tools: Tools, source: str
) -> str:
    """Return what a model would write for a turn after a prompt, without the token that ends it."""
    before = render(tokenizer, prompt, generation_prompt=True, tools=tools, source=source)
    shown = [*prompt, write_message(tokenizer, message)]
    after = render(tokenizer, shown, generation_prompt=False, tools=tools, source=source)
    begin = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    ends = map(str, tokenizer.hf.convert_ids_to_tokens(sorted(tokenizer.end_ids)))
    return min((after[begin:].partition(end)[0] for end in ends), key=len, default=after[begin:])


@dataclass(frozen=True)
class _Joint:
    """A rendering of a conversation in which a reply stands as it was sampled."""

    reply: Message
    tail: str
    """What follows the reply."""


class _Seam:
    """Where a sampled turn meets what follows: a conversation, a reply and new messages, as the chat template renders them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        so_far: Sequence[Message],
        reply: str,
        new: Sequence[Message],
        source: str,
        tools: Tools | None,
        call_ids: Sequence[str] = (),
    ) -> None:
        self.tokenizer, self.so_far, self.reply, self.source, self.tools = tokenizer, so_far, reply, source, tools
        self.before = self.render(so_far).rstrip()
        self.opening = tokenizer.find_opening_text(self.before)
        self.message = tokenizer.chat_format.parse(reply, self.opening, tools or ())
        turn = sum(message.get("role") == "assistant" for message in so_far)
        self.call_ids = number_calls(self.message.calls, turn)
        self.own_ids = dict(zip(call_ids, self.call_ids, strict=False))
        self.new_messages = self._name_results(new)
        prefix = make_placeholder(repr((so_far, reply, self.new_messages, tools)))
        self.new, self.placeholders = escape_special_tokens(tokenizer.hf, self.new_messages, prefix)

    def find(self) -> _Joint:
        """Return where the new messages begin behind the sampled reply.

        Raises:
            HistoryRewrittenError: The template shows something else than was sampled.
            ModelError: It refuses the messages, or leaves out what the new ones say.
        """
        for written in self.list_replies():
            if (found := self.join(written)) is not None:
                return found
        error = HistoryRewrittenError(
            f"{self.source}: the chat template of {self.tokenizer.name!r} rewrites earlier turns once there is another message "
            "(for example, it drops their reasoning), so the next turn cannot continue the sampled tokens: begin a new trajectory "
            "at every turn, or use a template that only appends"
        )
        error.messages = self.write_messages()
        raise error

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        return render(
            self.tokenizer, messages, generation_prompt=generation_prompt, tools=self.tools, source=self.source
        )

    def list_replies(self) -> Iterator[Message]:
        """Yield the reply as messages that a template may read, first with its reasoning and calls apart."""
        if self.message.is_complete and (self.message.calls or self.message.reasoning):
            yield write_message(self.tokenizer, self.message, self.call_ids)
        yield {"role": "assistant", "content": self.reply}

    def write_messages(self) -> tuple[Message, ...]:
        """Return the reply and the new messages in the first form that the template accepts."""
        for written in self.list_replies():
            try:
                self.render([*self.so_far, written, *self.new])
            except ModelError:  # it is told if the last form is refused, too
                continue
            return (written, *self.new_messages)
        return ({"role": "assistant", "content": self.reply}, *self.new_messages)

    def join(self, written: Message) -> _Joint | None:
        """Return where the new messages begin behind a written reply; None = the template shows something else than was sampled.

        Raises:
            ModelError: The template refuses the reply as it was sampled, or leaves out what the new messages say.
        """
        try:
            full = self.render([*self.so_far, written, *self.new])
        except ModelError:
            if "tool_calls" in written:  # it may read calls as text
                return None
            raise
        if not full.startswith(self.before):
            return None
        tail = self._find_tail(written, full)
        if tail is None or not self._is_sampled(full[len(self.before) : len(full) - len(tail)]):
            return None
        self._check_shown(written)
        return _Joint(written, tail)

    def _is_sampled(self, shown: str) -> bool:
        """Return True when a rendered reply is the sampled one, or the same message in other white space or quotes."""
        if shown.strip() == self.reply.strip():
            return True
        if not self.message.is_complete or self.message.is_thinking:
            return False
        return self.tokenizer.chat_format.parse(shown, self.opening, self.tools or ()).says_the_same(self.message)

    def _find_tail(self, written: Message, full: str) -> str | None:
        """Return what a rendering has behind the written reply; None = the reply is not shown."""
        mark = make_placeholder(full)
        if not written.get("tool_calls"):
            marked = _mask_reply(written, mark)
            head, found, tail = self.render([*self.so_far, marked, *self.new]).partition(mark)
            return tail if found and full.endswith(tail) and head.startswith(self.before) else None
        rest = full[len(self.before) :].lstrip()
        if rest.startswith(self.reply.strip()):  # to the letter
            return rest[len(self.reply.strip()) :]
        changed = self.render([*self.so_far, _mask_reply(written, mark), *self.new])
        if mark not in changed:
            return None
        common = _count_common(full[::-1], changed[::-1])
        common = min(common, len(full) - len(self.before))
        suffix = full[len(full) - common :]
        if (end := _find_end(self.tokenizer, suffix)) is not None:
            return suffix[end:]
        alone = self.render([*self.so_far, written], generation_prompt=False)
        shared = _count_common(alone, full)
        return full[max(shared, len(full) - common) :]

    def _check_shown(self, written: Message) -> None:
        """Raise ModelError unless the template shows what the new messages say; once for each kind of conversation."""
        roles = tuple(str(message.get("role")) for message in self.new)
        key = roles, bool(written.get("tool_calls")), self.tools is not None
        if key in self.tokenizer.shown_roles:
            return
        _, marks, masked = _mask(self.new, repr((self.so_far, written)))
        text = self.render([*self.so_far, written, *masked])
        lost = next((role for role, word in zip(roles, marks, strict=True) if word not in text), None)
        if lost is not None:
            raise LostMessageError(
                f"{self.source}: the chat template of {self.tokenizer.name!r} leaves out what a message of the role {lost!r} says "
                f"(after {'a call' if written.get('tool_calls') else 'a turn without a call that it reads'}), so the model would "
                "not read it: use a template that shows it, or give the text in a message of the role 'user'"
            )
        self.tokenizer.shown_roles.add(key)

    def _name_results(self, new: Sequence[Message]) -> tuple[Message, ...]:
        """Return the new messages with the name and id of the call that each tool's result answers: by its id, or in their order.

        The ids are the same in every run, since some templates show them.
        """
        named, number = list[Message](), 0
        for message in new:
            if message.get("role") == "tool":
                identity = self.own_ids.get(message.get("tool_call_id", ""), message.get("tool_call_id"))
                if identity is None and number < len(self.call_ids):
                    identity = self.call_ids[number]
                number += 1
                if identity in self.call_ids:
                    call = self.message.calls[self.call_ids.index(identity)]
                    message = {**message, "tool_call_id": identity, "name": message.get("name") or call.name}
            named.append(message)
        return tuple(named)

    def mark_contents(self, encoded: EncodedText, written: Message) -> Tensor:
        """Return [P] bool, the tokens of the new messages' contents."""
        mark, marks, masked = _mask(self.new, repr((self.so_far, written)))
        template = _cut_after_mark(self.render([*self.so_far, _mask_reply(written, mark), *masked]), mark, written)
        return _mark_contents(self.tokenizer, encoded, self.new_messages, template, marks)


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
    reply = conversation[-1 - new]
    mark, marks, masked = _mask(new_messages, text)
    shown = rendered([*earlier, _mask_reply(reply, mark), *new_messages])
    tail = _cut_after_mark(shown, mark, reply)
    is_shown = mark in shown
    if not is_shown:
        tail = "\n".join(content_text(message.get("content", "")) for message in new_messages)
    elif reply.get("tool_calls") and (place := _find_end(tokenizer, tail)) is not None:
        tail = tail[place:]
    encode = partial(encode_escaped, tokenizer.hf, placeholders=placeholders, source=source)
    expanded = expand_pictures(tokenizer, text, conversation, source)
    rewritten = tokenizer.with_media(encode(expanded), encode(text), conversation, source)
    end = _encode_after_end(tokenizer, tail, new_messages if is_shown else [], placeholders, source)
    if tokenizer.marks_contents and is_shown and new_messages:
        template = _cut_after_mark(rendered([*earlier, _mask_reply(reply, mark), *masked]), mark, reply)
        end = replace(end, is_content=_mark_contents(tokenizer, end, messages[len(messages) - new :], template, marks))
    return rewritten, end


def _mask(messages: Sequence[Message], besides: str) -> tuple[str, list[str], list[Message]]:
    """Return a word that is nowhere, one for each message, and the messages with these words as contents."""
    mark = make_placeholder(besides + repr(messages))
    marks = [f"{mark[:-1]}Y{number}X" for number in range(len(messages))]
    return mark, marks, [{**message, "content": word} for message, word in zip(messages, marks, strict=True)]


def _mask_reply(reply: Message, mark: str) -> Message:
    """Return a reply with a word as its content, or in place of its calls' arguments."""
    if not reply.get("tool_calls"):
        return {**reply, "content": mark}
    calls = [{**call, "function": {**call["function"], "arguments": {mark: mark}}} for call in reply["tool_calls"]]
    return {**reply, "tool_calls": calls}


def _cut_after_mark(text: str, mark: str, reply: Message) -> str:
    """Return what follows a masked reply."""
    return (text.rpartition(mark) if reply.get("tool_calls") else text.partition(mark))[2]


def _find_end(tokenizer: Tokenizer, text: str) -> int | None:
    """Return where the first token that ends a turn stands in a text; None = nowhere."""
    texts = (str(tokenizer.hf.convert_ids_to_tokens(end)) for end in tokenizer.end_ids)
    return min((place for word in texts if (place := text.find(word)) >= 0), default=None)


def _count_common(one: str, other: str) -> int:
    """Return the number of characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


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
