"""A model that answers requests of several clients at once, for `policygrad proxy` and `policygrad chat`."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policygrad.commands.text_scores import GivenText, TokenScore
    from policygrad.proxy.requests import ApiError, ChatChoice, ChatReply, ChatRequest, ScoredTokens
    from policygrad.rollout.conversation_tree import ConversationTree, OpenTurn
    from policygrad.samplers.base import Generation, Request

MAX_TOKENS = 512
MAX_TURNS = 10_000
"""Completions whose tokens are kept, so that later requests continue them."""


@dataclass(eq=False)
class _Call:
    """A client's request that is being answered."""

    turn: OpenTurn
    tree: ConversationTree
    requests: list[Request]
    future: Future[ChatReply]
    generations: dict[int, Generation] = field(default_factory=dict)
    """By the id of the request, those that are finished."""


@dataclass(frozen=True, eq=False)
class _Draft:
    """A turn that is sampled, and what is to be scored before it is answered."""

    turn: OpenTurn
    choices: tuple[ChatChoice, ...]
    texts: tuple[GivenText, ...]
    """One for each choice, or of the first alone, or none."""
    future: Future[ChatReply]


class ServedModel:
    """Samples for all requests that are there, in one batch that later ones join, and computes log-probabilities of given text."""

    def __init__(
        self,
        name: str,
        *,
        max_tokens: int = MAX_TOKENS,
        template_options: tuple[str, ...] = (),
        trust_remote_code: bool = False,
        record: Any = None,
    ) -> None:
        """Load a model.

        Args:
            name: A run, a model's folder, a hub id, or an embedded model.
            max_tokens: Of a completion at most; a request may ask for fewer.
            template_options: Variables of the chat template.
            record: A file to which completions are appended.
        """
        from policygrad.models.loading import load_model
        from policygrad.models.tokenizer import load_tokenizer
        from policygrad.rollout.conversation_tree import ConversationTree
        from policygrad.samplers.local.sampler import LocalSampler

        self.model = load_model(name, trust_remote_code=trust_remote_code)
        self.max_tokens, self.record = max_tokens, record
        loaded = load_tokenizer(name, self.model, trust_remote_code=trust_remote_code)
        self.encoder = loaded.with_template_options(template_options)
        self.sampler = LocalSampler.from_tokenizer(self.model, self.encoder)
        self.tree = ConversationTree(self.encoder, "a request")
        self.count = 0
        self.has_cut = False  # a request was told that it gets fewer tokens than it asks for
        self.named = set[str]()  # fields that it was said of that they cannot be followed
        self.queue: SimpleQueue[tuple[ChatRequest, Future[ChatReply]]] = SimpleQueue()
        self.calls = dict[int, _Call]()
        """Those that are being sampled for, by the id of each of their requests."""

    def submit(self, request: ChatRequest) -> Future[ChatReply]:
        future: Future[ChatReply] = Future()
        self.queue.put((request, future))
        return future

    def note_error(self, error: ApiError) -> None:
        """Say what a request was refused for: some clients show little of it."""
        print(f"a request was answered with status {error.status}: {error}", file=sys.stderr, flush=True)

    def start(self) -> None:
        """Answer requests in a thread, for ever."""
        threading.Thread(target=self.run, name="sampling", daemon=True).start()

    def run(self) -> None:
        """Answer requests for ever."""
        while True:
            if requests := self._take(self.queue.get()):
                self._sample(requests)

    def _take(self, *items: tuple[ChatRequest, Future[ChatReply]]) -> list[Request]:
        """Return what is to be sampled for these requests and those that have come; what needs nothing sampled is answered."""
        waiting = list(items)
        with contextlib.suppress(Empty):
            while True:
                waiting.append(self.queue.get_nowait())
        requests: list[Request] = []
        drafts = list[_Draft]()
        for request, future in waiting:
            if future.cancelled():  # its client has gone away
                continue
            try:
                call = self._open(request, future)
                if not call.requests:
                    drafts.append(self._draft(call))
            except Exception as error:  # the server answers with it, and goes on
                _finish(future, error)
                continue
            self.calls |= dict.fromkeys(map(id, call.requests), call)
            requests += call.requests
        self._complete(drafts)
        return requests

    def _sample(self, requests: Sequence[Request]) -> None:
        """Sample until nothing waits; or for each request alone if that fails, since it may fail for one of them."""
        self.sampler.is_abandoned = lambda request: self.calls[id(request)].future.cancelled()
        try:
            self.sampler.generate_arriving(requests, self._take, self._note)
        except Exception:
            for call in dict.fromkeys(self.calls.values()):
                call.generations.clear()
                try:
                    self.sampler.generate_arriving(call.requests, list, self._note)
                except Exception as error:
                    for request in call.requests:
                        del self.calls[id(request)]
                    _finish(call.future, error)

    def _note(self, request: Request, generation: Generation) -> None:
        """Keep a completion, and answer the request if it was the last one."""
        call = self.calls[id(request)]
        call.generations[id(request)] = generation
        if len(call.generations) == len(call.requests):
            for each in call.requests:
                del self.calls[id(each)]
            try:
                drafts = [self._draft(call)]
            except Exception as error:
                _finish(call.future, error)
            else:
                self._complete(drafts)

    def _open(self, request: ChatRequest, future: Future[ChatReply]) -> _Call:
        """Return a request as a turn of a conversation, and what is to be sampled for it."""
        from policygrad.proxy.formats import ApiError
        from policygrad.samplers.base import Request, SamplingParams

        for name in sorted({*request.other_fields} - self.named):
            print(f"a request has the field {name}, which cannot be followed", file=sys.stderr, flush=True)
            self.named.add(name)
        if request.max_tokens is not None and request.max_tokens > self.max_tokens and not self.has_cut:
            self.has_cut = True
            text = (
                f"a request asks for {request.max_tokens} tokens and gets {self.max_tokens} at most: raise --max-tokens"
            )
            print(text, file=sys.stderr, flush=True)
        tree = self._find_tree(request)
        turn = tree.open_turn(request)
        limit = self.max_tokens if request.max_tokens is None else min(request.max_tokens, self.max_tokens)
        length, room = len(turn.context_ids), self.encoder.context_length
        if room is not None and length + min(limit, 1) > room and not request.only_counts:
            raise ApiError(
                f"the prompt has {length} tokens, and the model reads {room}", 400, "context_length_exceeded"
            )
        limit = limit if room is None else min(limit, room - length)
        requests = list[Request]()
        if limit and not request.only_counts:
            temperature = 1.0 if request.temperature is None else request.temperature
            sampling = SamplingParams(
                temperature, request.top_p or 1.0, max(0, request.top_k or 0), limit, stop=tuple(request.stop)
            )
            for number in range(request.num_choices):
                self.count += 1
                key = (0, self.count) if request.seed is None else (1, request.seed % 2**63, number)
                requests.append(Request(turn.context_ids, key, sampling, limit, continues=True))
        return _Call(turn, tree, requests, future)

    def _find_tree(self, request: ChatRequest) -> ConversationTree:
        """Return the texts that a request's turn is one of. What is scored is read as the tokenizer writes it, and token ids as
        they are: neither continues what was sampled."""
        from policygrad.rollout.conversation_tree import ConversationTree

        if self.tree.num_turns >= MAX_TURNS:
            self.tree = ConversationTree(self.encoder, "a request")
        is_alone = request.has_echo or isinstance(next(iter(request.prompt), None), int)
        return ConversationTree(self.encoder, "a request") if is_alone else self.tree

    def _draft(self, call: _Call) -> _Draft:
        """Return a turn's choices, with the texts that are to be scored for them."""
        import torch

        from policygrad.commands.text_scores import GivenText
        from policygrad.proxy.formats import ChatChoice
        from policygrad.samplers.base import SamplingParams

        turn, requests = call.turn, call.requests
        request, prompt = turn.request, turn.context_ids
        if request.only_counts:
            return _Draft(turn, (), (), call.future)
        choices = tuple(call.tree.add_reply(turn, call.generations[id(each)]) for each in requests)
        choices = choices or (ChatChoice("", "length", (), ()),) * request.num_choices
        texts = list[GivenText]()
        for number, choice in enumerate(choices):
            scores_prompt = request.has_echo and request.has_logprobs and not number
            if scores_prompt or request.num_alternatives:
                sampled = torch.tensor(choice.token_ids if request.num_alternatives else (), dtype=torch.int64)
                ids = torch.cat([prompt, sampled])
                sampling = requests[number].sampling if requests else SamplingParams()
                start = 1 if scores_prompt else len(prompt)
                texts.append(GivenText(ids, start, len(prompt), sampling, request.num_alternatives))
        return _Draft(turn, choices, tuple(texts), call.future)

    def _complete(self, drafts: Sequence[_Draft]) -> None:
        """Score the texts of all drafts at once, or of each alone if that fails, and answer."""
        from policygrad.commands.text_scores import score_texts

        drafts = [draft for draft in drafts if not draft.future.cancelled()]
        try:
            scores = iter(score_texts(self.model, [text for draft in drafts for text in draft.texts]))
        except Exception as error:
            for draft in drafts:
                if len(drafts) > 1:
                    self._complete([draft])
                else:
                    _finish(draft.future, error)
            return
        for draft in drafts:
            scored = [next(scores) for _ in draft.texts]
            try:
                result: ChatReply | Exception = self._reply(draft, scored)
            except Exception as error:
                result = error
            _finish(draft.future, result)

    def _reply(self, draft: _Draft, scores: Sequence[Sequence[TokenScore]]) -> ChatReply:
        from policygrad.proxy.formats import ChatReply

        turn, request = draft.turn, draft.turn.request
        prompt_ids, choices = tuple(turn.context_ids.tolist()), list(draft.choices)
        if request.has_echo:
            prompt = self._describe_prompt(prompt_ids, scores[0][: len(prompt_ids) - 1] if scores else ())
            choices = [replace(choice, prompt=prompt) for choice in choices]
        if request.num_alternatives:
            pairs = [
                (choice, of_text[len(of_text) - len(choice.token_ids) :])
                for choice, of_text in zip(choices, scores, strict=True)
            ]
            choices = [replace(c, alternatives=self._list_alternatives(c.token_ids, own)) for c, own in pairs]
        if self.record is not None:
            for choice in choices:
                values = {"prompt_ids": prompt_ids, "token_ids": choice.token_ids, "logp": choice.logp}
                self.record.write(json.dumps({**values, "text": choice.text}) + "\n")
            self.record.flush()
        return ChatReply(tuple(choices), prompt_ids)

    def _describe_prompt(self, ids: Sequence[int], scores: Sequence[TokenScore]) -> ScoredTokens:
        """Return a prompt's tokens, with their scores if they were asked for: those of all but the first."""
        from policygrad.models.token_offsets import find_offsets
        from policygrad.proxy.formats import ScoredTokens

        decode = self.encoder.hf.decode
        return ScoredTokens(
            tuple(decode([token]) for token in ids),
            (None, *(score.logp for score in scores)),
            (None, *self._list_alternatives(ids[1 : len(scores) + 1], scores)),
            decode(list(ids)),
            find_offsets(decode, ids),
        )

    def _list_alternatives(self, ids: Sequence[int], scores: Sequence[TokenScore]) -> tuple[dict[str, float], ...]:
        """Return the most probable tokens in each place by their texts, the place's own among them."""
        places = list[dict[str, float]]()
        for token, score in zip(ids, scores, strict=True):
            listed: dict[str, float] = {}
            for other, value in score.alternatives:  # of several with one text the most probable
                listed.setdefault(self.encoder.hf.decode([other]), value)
            if score.alternatives:
                listed.setdefault(self.encoder.hf.decode([token]), score.logp)
            places.append(listed)
        return tuple(places)


def _finish(future: Future[ChatReply], result: ChatReply | Exception) -> None:
    """Answer a request, unless its client has gone away."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
