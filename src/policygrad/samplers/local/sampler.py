"""A sampler in this process, for any `AutoModelForCausalLM`: equal contexts are read once, finished rows leave the batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from policygrad.models.moe_routing import Routing
from policygrad.models.tokenizer import Tokenizer, pad_token_id
from policygrad.samplers.base import CompletionCallback, Generation, Request
from policygrad.samplers.local.kv_cache import DecodeCache
from policygrad.samplers.local.sampling import check_finite_logits, philox_uniforms, sample_tokens
from policygrad.weight_sync.base import PublishedWeights, copy_weights_


class LocalSampler:
    """Decodes with the model it is given; when that is the learner's own model, `update` moves nothing."""

    _callback: CompletionCallback | None = None

    def __init__(self, model: nn.Module, end: frozenset[int], pad: int, routing: Routing | None = None) -> None:
        """routing: of the model, where its choices of experts shall be part of what is generated."""
        self.model, self.pad, self.version, self.routing = model, pad, 0, routing
        self.device = next(model.parameters()).device
        self.end = torch.tensor(sorted(end), device=self.device)
        self._shares: bool | None = None  # found out with the first request, when the model is what it will be

    @classmethod
    def from_tokenizer(cls, model: nn.Module, tokenizer: Tokenizer, routing: Routing | None = None) -> LocalSampler:
        """For a model and its tokenizer, which names the end tokens."""
        return cls(model, tokenizer.end_ids, pad_token_id(tokenizer), routing)

    async def update(self, weights: PublishedWeights) -> None:
        """Copies the weights, except where they already are this model's own memory."""
        copy_weights_(weights.tensors, self.model)
        self.version = weights.version

    @contextmanager
    def on_completion(self, callback: CompletionCallback) -> Iterator[None]:
        """As `SupportsStreaming`."""
        self._callback = callback
        try:
            yield
        finally:
            self._callback = None

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """A generation depends on its request and the weights, not on its neighbours (up to the rounding of a differently
        shaped matrix product)."""
        from policygrad.samplers.local.kv_cache import PlainDecodeCache
        from policygrad.samplers.local.shared_prefix import (
            SharedPrefixCache,
            check_batched_decoding,
            supports_shared_prefix,
        )

        done: dict[int, Generation] = {}
        recording = nullcontext if self.routing is None else self.routing.recording
        if requests and self._shares is None:
            with recording():
                self._shares = supports_shared_prefix(self.model, self.pad)
                if not self._shares:
                    check_batched_decoding(self.model, self.pad)
        for sampling in dict.fromkeys(r.sampling for r in requests):
            places = [i for i, r in enumerate(requests) if r.sampling == sampling]
            memory = SharedPrefixCache(self.model, self.pad) if self._shares else PlainDecodeCache(self.model, self.pad)
            with recording():
                decoding = DecodeLoop([requests[i] for i in places], self.end, self.pad, self.routing)
                done |= zip(places, decoding.run(memory, self.version, self._callback), strict=True)
        return [done[i] for i in range(len(requests))]


# The experts that tokens were sent to while rows were decoded, put together again completion by completion.


class RoutedExpertsRecorder:
    """Filled pass by pass; nothing is kept without a routing."""

    def __init__(self, routing: Routing | None, requests: Sequence[Request], budget: int) -> None:
        self.routing, self.requests, self.budget = routing, requests, budget
        self.prompts: dict[int, Tensor] = {}  # per completion, [P, layers, k]
        self.answers = torch.empty(0)  # [requests, budget, layers, k], -1 where nothing was read

    def read(self, completions: Sequence[int], repeats: Tensor, width: int) -> None:
        """After the contexts of these completions were read, each once, padded on the left to `width`."""
        if self.routing is None:
            return
        taken = self.routing.pop_recorded()
        read = taken.reshape(len(repeats), width, *taken.shape[1:]).repeat_interleave(repeats.cpu(), 0)
        for i, row in zip(completions, read, strict=True):
            self.prompts[i] = row[width - len(self.requests[i].prompt_ids) :]
        if not len(self.answers):
            self.answers = read.new_full((len(self.requests), self.budget, *read.shape[2:]), -1)

    def add(self, completions: Tensor, count: Tensor, rows: Tensor) -> None:
        """After each of the completions has read its token `count`, at `rows` of the forward pass."""
        if self.routing is not None:
            self.answers[completions.cpu(), count.cpu()] = self.routing.pop_recorded()[rows.cpu()]

    def for_row(self, i: int, size: int) -> Tensor | None:
        """[P + size, layers, k] of one completion."""
        return None if self.routing is None else torch.cat([self.prompts[i], self.answers[i, :size]])


# The decoding loop: rows take a slot each, leave it when they are over, and the next contexts of the queue take their places.

_REFILL = 0.25
"""Of the slots that have to be free before contexts are read while others go on: reading few at a time costs more than it saves."""


class DecodeLoop:
    """Requests of one sampling. What a request draws depends on it and the weights alone, up to the rounding of other shapes."""

    def __init__(self, requests: Sequence[Request], end: Tensor, pad: int, routing: Routing | None) -> None:
        self.requests, self.end, self.device = requests, end, end.device
        self.sampling, rows = requests[0].sampling, len(requests)
        self.limit = torch.tensor([r.max_tokens for r in requests], device=self.device)
        self.size = torch.tensor([len(r.prompt_ids) for r in requests], device=self.device)
        budget = max(r.max_tokens for r in requests)
        self.tokens = torch.full((rows, budget), pad, device=self.device)
        self.logps = torch.zeros(rows, budget, device=self.device)
        self.u = torch.empty(rows, budget, dtype=torch.float64, device=self.device)
        self.length = self.limit.clone()
        self.ended = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.routes = RoutedExpertsRecorder(routing, requests, budget)
        self.queue = deque(_by_context(requests))
        self.alive = self.size.new_empty(0)  # [N]: which completion each row is
        self.count = self.size.new_empty(0)  # [N]: tokens that it has drawn

    @torch.no_grad()
    def run(self, memory: DecodeCache, version: int, watch: CompletionCallback | None = None) -> list[Generation]:
        """In the order of the requests."""
        logits: Tensor | None = None
        while self.queue or len(self.alive):
            if more := self._due(memory):
                new = self._admit(memory, more)
                logits = new if logits is None else torch.cat([logits, new])
            assert logits is not None  # requests are due as soon as no row is left
            rows = self.alive
            token = self._draw(memory, logits)
            logits = None
            if watch is not None:
                watch(self._over(rows))
            if len(self.alive):
                logits = memory.step(token, self.size[self.alive] + self.count - 1)
                self.routes.add(self.alive, self.count - 1, memory.rows)
        return self._found(version)

    def _over(self, rows: Tensor) -> list[tuple[Request, Tensor]]:
        """Those of the rows that have just left."""
        places = rows[torch.isin(rows, self.alive, invert=True)]
        found = zip(places.tolist(), self.tokens[places].cpu(), self.length[places].tolist(), strict=True)
        return [(self.requests[place], tokens[:n]) for place, tokens, n in found]

    def _found(self, version: int) -> list[Generation]:
        lengths = self.length.tolist()
        drawn = torch.arange(self.tokens.shape[1], device=self.device) < self.length[:, None]
        tokens, logps = (torch.split(x[drawn].cpu(), lengths) for x in (self.tokens, self.logps))
        found = zip(tokens, logps, lengths, self.ended.tolist(), strict=True)
        return [
            Generation(row, p, "stop" if end else "length", version, self.routes.for_row(i, n))
            for i, (row, p, n, end) in enumerate(found)
        ]

    def _due(self, memory: DecodeCache) -> list[list[int]]:
        """The next contexts of the queue, as far as there are slots: at most `decode_rows` rows, or one context."""
        slots, held = self.sampling.decode_rows, len(self.alive)
        if held and (not memory.supports_refill or slots - held < _REFILL * slots):
            return []
        due = list[list[int]]()
        while self.queue and (held == 0 or held + len(self.queue[0]) <= slots):
            due.append(self.queue.popleft())
            held += len(due[-1])
        return due

    def _admit(self, memory: DecodeCache, groups: Sequence[Sequence[int]]) -> Tensor:
        """Reads the contexts of these completions: logits [N, V] for them."""
        new = [i for group in groups for i in group]
        rows, room = torch.tensor(new, device=self.device), max(self.requests[i].max_tokens for i in new)
        repeats = torch.tensor([len(group) for group in groups], device=self.device)
        logits, width = memory.read([self.requests[group[0]].prompt_ids for group in groups], repeats, room)
        self.routes.read(new, repeats, width)
        self.u[rows, :room] = philox_uniforms([self.requests[i].key for i in new], room).to(self.device)
        self.alive, self.count = torch.cat([self.alive, rows]), torch.cat([self.count, torch.zeros_like(rows)])
        return logits

    def _text(self, row: int) -> Tensor:
        """[P + t] what a row has read."""
        place, drawn = int(self.alive[row]), int(self.count[row])
        return torch.cat([self.requests[place].prompt_ids, self.tokens[place, :drawn].cpu()])

    def _draw(self, memory: DecodeCache, logits: Tensor) -> Tensor:
        """One token for each row; those that are over leave, and the tokens [N] of the others are returned."""
        alive, count = self.alive, self.count
        check_finite_logits(logits, self.sampling, memory.model, self._text)
        token, logp = sample_tokens(logits, self.u[alive, count], self.sampling)
        self.tokens[alive, count], self.logps[alive, count] = token, logp.to(self.logps.dtype)
        count = count + 1
        stops = torch.isin(token, self.end)
        over = stops | (count >= self.limit[alive])
        if over.any():
            self.length[alive[over]], self.ended[alive[over]] = count[over], stops[over]
            order = memory.keep_rows((~over).nonzero().squeeze(1))
            alive, count, token = alive[order], count[order], token[order]
        self.alive, self.count = alive, count
        return token


def _by_context(requests: Sequence[Request]) -> list[list[int]]:
    """The requests by context, the shortest contexts first, so that those that are read together need little padding."""
    contexts: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        contexts.setdefault(id(request.prompt_ids), []).append(i)
    return sorted(contexts.values(), key=lambda group: len(requests[group[0]].prompt_ids))
