"""A model that answers requests of several clients at once, for `policygrad proxy` and `policygrad chat`."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from policygrad.proxy.requests import ApiError, ChatReply, ChatRequest, ScoredTokens
    from policygrad.rollout.conversation_tree import OpenTurn
    from policygrad.samplers.base import Generation, Request, SamplingParams

MAX_TOKENS = 512
MAX_TURNS = 10_000
"""Completions whose tokens are kept, so that later requests continue them."""
PLACES_AT_ONCE = 256
"""Places of a text whose tokens are compared at once: each has a log-probability for the whole vocabulary."""
LEAST_LOGP = -9999.0
"""Nats of what has probability 0, as in OpenAI's formats, since JSON has no infinity."""


@dataclass(eq=False)
class _Call:
    """A client's request that is being answered."""

    turn: OpenTurn
    requests: list[Request]
    future: Future[ChatReply]
    generations: dict[int, Generation] = field(default_factory=dict)
    """By the id of the request, those that are finished."""


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
            if requests := self._begin(self.queue.get()):
                self._sample([*requests, *self._take()])

    def _take(self) -> list[Request]:
        """Return what is to be sampled for the requests that have come."""
        requests: list[Request] = []
        with contextlib.suppress(Empty):
            while True:
                requests += self._begin(self.queue.get_nowait())
        return requests

    def _begin(self, item: tuple[ChatRequest, Future[ChatReply]]) -> list[Request]:
        """Return what is to be sampled for a request; one that needs nothing sampled is answered."""
        request, future = item
        if future.cancelled():  # its client has gone away
            return []
        try:
            call = _Call(*self._open(request), future)
        except Exception as error:  # the server answers with it, and goes on
            _finish(future, error)
            return []
        if call.requests:
            self.calls |= dict.fromkeys(map(id, call.requests), call)
        else:
            self._answer(call)
        return call.requests

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
            self._answer(call)

    def _open(self, request: ChatRequest) -> tuple[OpenTurn, list[Request]]:
        from policygrad.proxy.formats import ApiError
        from policygrad.rollout.conversation_tree import ConversationTree
        from policygrad.samplers.base import Request, SamplingParams

        for name in sorted({*request.other_fields} - self.named):
            print(f"a request has the field {name}, which cannot be followed", file=sys.stderr, flush=True)
            self.named.add(name)
        if self.tree.num_turns >= MAX_TURNS:
            self.tree = ConversationTree(self.encoder, "a request")
        turn = self.tree.open_turn(request)
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
        return turn, requests

    def _answer(self, call: _Call) -> None:
        try:
            sampled = [call.generations[id(request)] for request in call.requests]
            result: ChatReply | Exception = self._reply(call.turn, call.requests, sampled)
        except Exception as error:
            result = error
        _finish(call.future, result)

    def _reply(self, turn: OpenTurn, requests: Sequence[Request], generations: Sequence[Generation]) -> ChatReply:
        from policygrad.proxy.formats import ChatChoice, ChatReply

        request, prompt_ids = turn.request, tuple(turn.context_ids.tolist())
        if request.only_counts:
            return ChatReply((), prompt_ids)
        choices = [self.tree.add_reply(turn, generation) for generation in generations]
        if request.num_alternatives:
            pairs = zip(choices, requests, generations, strict=True)
            choices = [
                replace(
                    choice, alternatives=self._list_alternatives(turn, r.sampling, g.tokens[: len(choice.token_ids)])
                )
                for choice, r, g in pairs
            ]
        choices = choices or [ChatChoice("", "length", (), ())] * request.num_choices
        if request.has_echo:
            scored = self._score(turn)
            choices = [replace(choice, prompt=scored) for choice in choices]
        if self.record is not None:
            for choice in choices:
                values = {"prompt_ids": prompt_ids, "token_ids": choice.token_ids, "logp": choice.logp}
                self.record.write(json.dumps({**values, "text": choice.text}) + "\n")
            self.record.flush()
        return ChatReply(tuple(choices), prompt_ids)

    def _list_alternatives(
        self, turn: OpenTurn, sampling: SamplingParams, tokens: Tensor
    ) -> tuple[dict[str, float], ...]:
        """Return the most probable tokens in each place of a completion, in the distribution that was sampled from."""
        import torch

        ids = torch.cat([turn.context_ids, tokens])
        first = len(turn.context_ids) - 1
        places = self._read(ids, sampling, turn.request.num_alternatives, first, len(ids) - 1)
        return tuple(alternatives for _, alternatives in places)

    def _score(self, turn: OpenTurn) -> ScoredTokens:
        """Return what the policy thinks of a prompt, at temperature 1."""
        from policygrad.proxy.formats import ScoredTokens
        from policygrad.samplers.base import SamplingParams

        ids = turn.context_ids
        places = list(self._read(ids, SamplingParams(), turn.request.num_alternatives, 0, len(ids) - 1))
        pieces = tuple(self.encoder.hf.decode([token]) for token in ids.tolist())
        logp = (None, *(logp for logp, _ in places))
        return ScoredTokens(pieces, logp, (None, *(alternatives for _, alternatives in places)))

    def _read(
        self, ids: Tensor, sampling: SamplingParams, num_alternatives: int, first: int, last: int
    ) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield, for each place from `first` to before `last`, log π of the text's next token, and the most probable tokens with it
        among them."""
        import torch

        from policygrad.samplers.local.sampling import log_probabilities

        if last <= first:
            return
        with torch.inference_mode():
            device = next(self.model.parameters()).device
            logits = self.model(input_ids=ids[None, :last].to(device), use_cache=False).logits[0, first:]
            for at in range(0, last - first, PLACES_AT_ONCE):
                logp = log_probabilities(logits[at : at + PLACES_AT_ONCE], sampling).clamp(min=LEAST_LOGP)
                tokens = ids[first + at + 1 : first + at + 1 + len(logp)].to(device)
                top = logp.topk(min(num_alternatives, logp.shape[-1]))
                token_logp = logp.gather(-1, tokens[:, None])[:, 0].tolist()
                for token, value, others, values in zip(
                    tokens.tolist(), token_logp, top.indices.tolist(), top.values.tolist(), strict=True
                ):
                    listed = {self.encoder.hf.decode([o]): v for o, v in zip(others, values, strict=True)}
                    if num_alternatives:
                        listed.setdefault(self.encoder.hf.decode([token]), value)
                    yield value, listed


def _finish(future: Future[ChatReply], result: ChatReply | Exception) -> None:
    """Answer a request, unless its client has gone away."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
