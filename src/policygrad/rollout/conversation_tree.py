"""What an agent's program has read and sampled in one episode, token by token: a tree of texts.

A request that extends an earlier conversation continues its sampled tokens, which are never tokenized again. One that rewrites it,
drops messages or begins another conversation (a sub-agent's) is a branch, after the longest text that both begin with. In the order
of a walk that visits what branches off last first, each branch follows a beginning of the text before it, which is what
`Segment.prefix_length` says: the episode is one trajectory, in which every sampled token stands in the context it was sampled in.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from policygrad.errors import ModelError
from policygrad.models.chat.messages import EncodedText, HistoryRewrittenError, Message, Tools
from policygrad.models.chat.rendering import write_message
from policygrad.models.chat.turns import AssistantMessage, ToolCall, number_calls
from policygrad.models.tokenizer import Tokenizer
from policygrad.proxy.formats import ApiError, ChatChoice, ChatRequest
from policygrad.rollout.trajectory import Segment, align_contents, common_length
from policygrad.samplers.base import Generation
from policygrad.samplers.stop_texts import cut_at_stop

MAX_CONTEXT = 2**20  # tokens that a model is said to read if it does not say so itself
PIECE = 2**16  # characters that are tokenized at a time to count them
COUNTED_FROM = 4  # characters for each position, above which a text's tokens are counted first


@dataclass(eq=False)
class _Run:
    """Consecutive tokens with one origin, after a beginning of another run's text."""

    parent: _Run | None
    start: int
    """Number of tokens before it."""
    segment: Segment
    """Without `prefix_length`."""
    state: Hashable = None
    """Of a sampled run: what the policy read last."""
    children: list[_Run] = field(default_factory=list)
    is_read: bool = False
    """Something was sampled in it or after it."""

    @property
    def end(self) -> int:
        return self.start + len(self.segment.tokens)

    def text(self, end: int | None = None) -> Tensor:
        """Return the ids up to `end`, by default the run's own end."""
        parts, run, stop = list[Tensor](), self, self.end if end is None else end
        while True:
            parts.append(run.segment.tokens[: max(0, stop - run.start)])
            stop = min(stop, run.start)
            if run.parent is None:
                return torch.cat(parts[::-1])
            run = run.parent

    def add_sampled(self, segment: Segment, state: Hashable) -> _Run:
        """Return a sampled run after this one."""
        run = _Run(self, self.end, segment, state)
        self.children.append(run)
        above: _Run | None = run
        while above is not None and not above.is_read:
            above.is_read, above = True, above.parent
        return run


@dataclass(frozen=True, eq=False)
class _Reply:
    """A sampled turn that later requests may continue."""

    run: _Run
    length: int
    """Tokens of the run that are part of the conversation: not a stop text."""
    end: int | None
    """The end token that was sampled; None = none."""
    messages: tuple[Message, ...] | str
    """What it answers; earlier replies as the policy wrote them."""
    text: str
    keys: tuple[Hashable, ...] | str
    """The same with the reply, as the program sees it: for comparison."""
    tools: str
    call_ids: tuple[str, ...]
    """Those that the program knows."""
    written: Message
    """The reply as the chat template reads it, where it is not continued."""
    own_ids: Mapping[str, str]
    """Its calls' ids there, by those that the program knows."""


@dataclass(frozen=True, eq=False)
class OpenTurn:
    """A request, tokenized: what the policy reads next."""

    context_ids: Tensor
    """[P] int64."""
    run: _Run
    request: ChatRequest
    messages: tuple[Message, ...] | str
    state: Hashable


class ConversationTree:
    """The texts of one episode."""

    def __init__(self, encoder: Tokenizer, source: str) -> None:
        self.encoder, self.source = encoder, source
        self.roots: list[_Run] = []
        self._replies: list[_Reply] = []
        self.num_turns = 0

    @property
    def first_text(self) -> Tensor:
        """[P] int64; the first text that the policy answered."""
        return self._first_root().segment.tokens

    def _first_root(self) -> _Run:
        return next(root for root in self.roots if root.is_read)

    def open_turn(self, request: ChatRequest) -> OpenTurn:
        """Tokenize a request and place it in the tree.

        Raises:
            ModelError: The chat template refuses the messages.
            ApiError: Token ids that the model does not have, or text that is longer than it reads.
        """
        if isinstance(request.prompt, tuple) and request.prompt and isinstance(request.prompt[0], int):
            largest, size = max(request.prompt), len(self.encoder.hf)
            if largest >= size:
                raise ApiError(f"the prompt has the token id {largest}, and the vocabulary has {size}")
            ids = torch.tensor(request.prompt, dtype=torch.int64)
            return OpenTurn(ids, self._place(ids), request, "", tuple(request.prompt))
        check_length(self.encoder, request)
        prompt: Any = request.prompt
        messages: Any
        last = self._find_reply(request)
        if last is not None:
            new = prompt[len(last.keys) :]
            before = last.messages
            context = last.run.text(last.run.start + last.length)
            state = new if isinstance(new, str) else _canonical(new)
            try:
                added = self.encoder.encode_continuation(
                    before, last.text, new, self.source, request.tools or None, end=last.end, call_ids=last.call_ids
                )
                messages = f"{before}{last.text}{new}" if isinstance(before, str) else (*before, *added.messages)
                segment = Segment(added.ids, observation=added.is_content)
                run = self._append(last.run, last.run.start + last.length, segment)
                return OpenTurn(torch.cat([context, added.ids]), run, request, messages, state)
            except HistoryRewrittenError as error:
                assert not isinstance(before, str)
                return self._rewrite((*before, *error.messages), len(error.messages) - 1, request, state)
        if isinstance(prompt, str):
            ids = self.encoder.encode(prompt, 1, self.source).ids
            return OpenTurn(ids, self._place(ids), request, prompt, prompt)
        messages = self._restore_replies(prompt, request.tools)
        replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if replies:
            return self._rewrite(messages, len(messages) - 1 - replies[-1], request, _canonical(prompt))
        ids = self.encoder.encode(messages, 1, self.source, request.tools or None).ids
        return OpenTurn(ids, self._place(ids), request, messages, _canonical(prompt))

    def add_reply(self, turn: OpenTurn, generation: Generation) -> ChatChoice:
        """Add what the policy sampled for a turn, up to a stop text. Return it as the program receives it."""
        encoder, request = self.encoder, turn.request
        generation = cut_at_stop(generation, request.stop, encoder.decode)
        text, stopped_by, length = _text_before_stop(encoder, generation, request.stop)
        message = encoder.read_turn(text, turn.context_ids, request.tools)
        calls = _name_calls(request, message)
        # a call that the program does not receive as such stays in the text that it receives
        is_read = not isinstance(request.prompt, str) and len(calls) == len(message.calls)
        content = message.content.strip() if is_read and (calls or message.reasoning) else text
        ids = generation.tokens.tolist()
        # not random, since some agents show the policy a call's id: a run that is repeated reads the same
        digest = sha256(torch.cat([turn.context_ids, generation.tokens]).numpy().tobytes()).hexdigest()[:16]
        call_ids = tuple(f"call_{digest}{self.num_turns:04d}{number:04d}" for number in range(len(calls)))
        choice = ChatChoice(
            text,
            "tool_calls" if calls else generation.finish_reason,
            tuple(ids),
            tuple(generation.logp.tolist()),
            tuple(encoder.hf.decode([token]) for token in ids) if request.has_logprobs else (),
            content,
            calls,
            call_ids,
            stopped_by,
            reasoning=message.reasoning.strip() if is_read else "",
        )
        end = ids[-1] if not stopped_by and ids[-1] in encoder.end_ids else None
        self._remember(turn, generation, choice, message, length, end)
        return choice

    def _remember(
        self,
        turn: OpenTurn,
        generation: Generation,
        choice: ChatChoice,
        message: AssistantMessage,
        length: int,
        end: int | None,
    ) -> None:
        run = turn.run.add_sampled(Segment.from_generation(generation), turn.state)
        self.num_turns += 1
        keys: Any
        if isinstance(turn.request.prompt, str):
            keys = turn.request.prompt + choice.text
        elif isinstance(turn.messages, str):  # token ids, which are continued by token ids
            return
        else:
            reply = {"role": "assistant", "content": choice.content, "calls": choice.calls}
            keys = _message_keys((*turn.request.prompt, reply), turn.request.tools)
        tools, written = _canonical(turn.request.tools), {"role": "assistant", "content": choice.text}
        own_ids: dict[str, str] = {}
        if choice.calls and message.is_complete and not isinstance(turn.messages, str):
            numbers = number_calls(message.calls, sum(m["role"] == "assistant" for m in turn.messages))
            written = dict(write_message(self.encoder, message, numbers))
            own_ids = dict(zip(choice.call_ids, numbers, strict=True))
        self._replies.append(
            _Reply(run, length, end, turn.messages, choice.text, keys, tools, choice.call_ids, written, own_ids)
        )

    def segments(self, prompt_length: int) -> tuple[tuple[Segment, ...], tuple[Hashable, ...]]:
        """Return the episode after the first `prompt_length` tokens of its first text, and the state of each sampled segment.

        prompt_length: 0 = the episode shares no token with its group's prompt, and every text begins anew.
        """
        segments, states = list[Segment](), list[Hashable]()
        at = prompt_length  # tokens in the text so far
        first = self._first_root()
        for run in self._walk():
            segment, start = run.segment, run.start
            if run is first:
                if len(segment.tokens) == prompt_length:
                    continue
                segment = replace(segment, tokens=segment.tokens[prompt_length:])
                start = prompt_length
            is_new_text = start != at or (run.parent is None and not prompt_length)
            segments.append(replace(segment, prefix_length=start) if is_new_text else segment)
            if segment.is_sampled:
                states.append(run.state)
            at = run.end
        return tuple(segments), tuple(states)

    def _walk(self) -> Iterator[_Run]:
        """Yield the runs that something was sampled after, each after a beginning of the text before it."""
        waiting = [root for root in reversed(self.roots) if root.is_read]
        while waiting:
            run = waiting.pop()
            yield run
            children = [child for child in run.children if child.is_read]
            # what branches off last is next, of several the first
            waiting += sorted(children, key=lambda child: -child.start)[::-1]

    def _place(self, ids: Tensor, end: EncodedText | None = None) -> _Run:
        """Return a run that ends with a text, after the longest beginning that an earlier text has.

        end: The part of the text that is new, if it repeats a conversation.
        """
        best, shared = None, 0
        stack = list(self.roots)
        while stack:
            run = stack.pop()
            reached = run.start + common_length([run.segment.tokens, ids[run.start :]])
            if reached > shared:
                best, shared = run, reached
            stack += [child for child in run.children if child.start <= reached]
        if best is not None and shared == len(ids) == best.end and not best.segment.is_sampled:
            return best
        if best is not None and shared == len(ids):  # one token of its own, which predicts the turn's first
            shared -= 1
            while best.parent is not None and best.start >= shared:
                best = best.parent
        segment = Segment(ids[shared:])
        if end is not None:
            segment = replace(segment, new_tokens=end.ids, observation=align_contents(segment.tokens, end))
        return self._append(best, shared, segment)

    def _append(self, parent: _Run | None, start: int, segment: Segment) -> _Run:
        """Return the unsampled run with the segment's ids at that place, a new one if there is none."""
        siblings = self.roots if parent is None else parent.children
        for run in siblings:
            if run.start == start and not run.segment.is_sampled and torch.equal(run.segment.tokens, segment.tokens):
                return run
        run = _Run(parent, start, segment)
        siblings.append(run)
        return run

    def _rewrite(self, messages: Sequence[Message], num_new: int, request: ChatRequest, state: Hashable) -> OpenTurn:
        """Open a turn after a conversation whose earlier replies are text now."""
        opening = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
        text, end = self.encoder.encode_rewritten(messages, opening, num_new, self.source, request.tools or None)
        return OpenTurn(text.ids, self._place(text.ids, end), request, tuple(messages), state)

    def _find_reply(self, request: ChatRequest) -> _Reply | None:
        """Return the sampled turn that a request continues: the longest conversation that it begins with."""
        tools, prompt = _canonical(request.tools), request.prompt
        if isinstance(prompt, str):
            candidates = [
                r for r in self._replies if isinstance(r.keys, str) and prompt.startswith(r.keys) and prompt != r.keys
            ]
        else:
            keys = _message_keys(prompt, request.tools)  # type: ignore[arg-type]
            candidates = [
                r
                for r in self._replies
                if r.tools == tools and len(r.keys) < len(keys) and keys[: len(r.keys)] == r.keys
            ]
        return max(candidates, key=lambda reply: len(reply.keys), default=None)

    def _restore_replies(self, messages: Sequence[Message], tools: Tools) -> tuple[Message, ...]:
        """Return a program's messages with the replies that it repeats as the policy wrote them."""
        replies = {r.keys[-1]: r for r in self._replies if not isinstance(r.keys, str)}
        restored, own_ids = list[Message](), dict[str, str]()
        for message, key in zip(messages, _message_keys(messages, tools), strict=True):
            reply = replies.get(key) if message["role"] == "assistant" else None
            if reply is not None:
                own_ids |= {
                    call["id"]: own
                    for call, own in zip(message.get("tool_calls", ()), reply.own_ids.values(), strict=False)
                }
                message = reply.written
            elif (own := own_ids.get(message.get("tool_call_id", ""))) is not None:
                message = {**message, "tool_call_id": own}
            restored.append(message)
        return tuple(restored)


def check_length(encoder: Tokenizer, request: ChatRequest) -> None:
    """Refuse text that is certainly longer than the model reads, before all of it is rendered and tokenized.

    Only text of many characters for each position is counted, piece by piece until it is too long. A message has a token or more.

    Raises:
        ApiError: It is too long.
    """
    limit = encoder.context_length or MAX_CONTEXT
    if not isinstance(request.prompt, str) and len(request.prompt) > limit:
        raise _too_long(f"{len(request.prompt)} messages", limit)
    text = request.prompt if isinstance(request.prompt, str) else "".join(_list_texts(request.prompt))
    if len(text) <= max(PIECE, COUNTED_FROM * limit):
        return
    count = 0
    for start in range(0, len(text), PIECE):
        # fewer by a token for each end of a piece, where the whole may have one token instead of two
        count += len(encoder.hf(text[start : start + PIECE], add_special_tokens=False)["input_ids"]) - 2
        if count > limit:
            raise _too_long(f"{len(text)} characters, which are more than {limit} tokens", limit)


def _too_long(what: str, limit: int) -> ApiError:
    return ApiError(f"the prompt has {what}, and the model reads {limit}", 400, "context_length_exceeded")


def _list_texts(messages: Any) -> list[str]:
    """Return the texts of messages and of their calls."""
    texts = [str(message.get("content") or "") for message in messages]
    return texts + [json.dumps(message["tool_calls"]) for message in messages if message.get("tool_calls")]


def _text_before_stop(encoder: Tokenizer, generation: Generation, stop: Sequence[str]) -> tuple[str, str, int]:
    """Return a cut completion's text before its stop text; the stop text, "" if there is none; the number of tokens before it."""
    tokens, text = generation.tokens, encoder.decode(generation.tokens)
    if not any(word in text for word in stop):
        return text, "", len(tokens)
    place, word = min((text.find(word), word) for word in stop if word in text)
    before = max((n for n in range(len(tokens)) if text[:place].startswith(encoder.decode(tokens[:n]))), default=0)
    return text[:place], word, before


def _message_keys(messages: Sequence[Message], tools: Tools) -> tuple[Hashable, ...]:
    """Return what makes each message the same as another: role, text up to white space around it, and calls.

    An argument that has its schema's default is left out, since some programs repeat a call with the defaults filled in.
    """
    defaults = {tool["function"]["name"]: _list_defaults(tool["function"].get("parameters")) for tool in tools}

    def key(name: str, arguments: Mapping[str, Any]) -> Hashable:
        known = defaults.get(name, {})
        return name, _canonical({n: v for n, v in arguments.items() if n not in known or known[n] != _canonical(v)})

    keys = list[Hashable]()
    for message in messages:
        calls = [key(call.name, call.arguments) for call in message.get("calls", ())]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls += [key(function["name"], function["arguments"]) for function in functions]
        keys.append((message["role"], str(message.get("content") or "").strip(), tuple(calls)))
    return tuple(keys)


def _list_defaults(schema: Any) -> dict[str, str]:
    """Return the defaults of a function's arguments, as JSON."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {n: _canonical(p["default"]) for n, p in properties.items() if isinstance(p, Mapping) and "default" in p}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _name_calls(request: ChatRequest, message: AssistantMessage) -> tuple[ToolCall, ...]:
    """Return a reply's tool calls. () = it has none, or one that cannot be read: the program then receives the text."""
    if not request.parses_calls:
        return ()
    if message.unread:
        raise ModelError(message.unread)
    calls = message.calls
    if any(call.error for call in calls):
        return ()
    functions = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    return tuple(_name_arguments(call, functions.get(call.name, {})) for call in calls)


def _name_arguments(call: ToolCall, function: dict[str, Any]) -> ToolCall:
    """Give a call's positional arguments the names of the schema."""
    names = list((function.get("parameters") or {}).get("properties") or {})
    named = dict(zip(names, call.positional, strict=False))
    return ToolCall(call.name, {**named, **call.arguments})
