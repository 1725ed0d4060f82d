"""The decoding loop: rows take a slot each, leave it when they are over, and the next contexts of the queue take their places."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from policygrad.models.routing import Routing
from policygrad.samplers.base import Generation, Request, Watch
from policygrad.samplers.draw import draw, uniforms
from policygrad.samplers.finite import check_drawable
from policygrad.samplers.memory import Memory
from policygrad.samplers.routes import Routes

_REFILL = 0.25
"""Of the slots that have to be free before contexts are read while others go on: reading few at a time costs more than it saves."""


class Decoding:
    """Requests of one sampling. What a request draws depends on it and the weights alone, up to the rounding of other shapes."""

    def __init__(self, requests: Sequence[Request], end: Tensor, pad: int, routing: Routing | None) -> None:
        self.requests, self.end, self.device = requests, end, end.device
        self.sampling, rows = requests[0].sampling, len(requests)
        self.limit = torch.tensor([r.max_tokens for r in requests], device=self.device)
        self.size = torch.tensor([len(r.tokens) for r in requests], device=self.device)
        budget = max(r.max_tokens for r in requests)
        self.tokens = torch.full((rows, budget), pad, device=self.device)
        self.logps = torch.zeros(rows, budget, device=self.device)
        self.u = torch.empty(rows, budget, dtype=torch.float64, device=self.device)
        self.length = self.limit.clone()
        self.ended = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.routes = Routes(routing, requests, budget)
        self.queue = deque(_by_context(requests))
        self.alive = self.size.new_empty(0)  # [N]: which completion each row is
        self.count = self.size.new_empty(0)  # [N]: tokens that it has drawn

    @torch.no_grad()
    def run(self, memory: Memory, version: int, watch: Watch | None = None) -> list[Generation]:
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
            Generation(row, p, "stop" if end else "length", version, self.routes.of(i, n))
            for i, (row, p, n, end) in enumerate(found)
        ]

    def _due(self, memory: Memory) -> list[list[int]]:
        """The next contexts of the queue, as far as there are slots: at most `decode_rows` rows, or one context."""
        slots, held = self.sampling.decode_rows, len(self.alive)
        if held and (not memory.refills or slots - held < _REFILL * slots):
            return []
        due = list[list[int]]()
        while self.queue and (held == 0 or held + len(self.queue[0]) <= slots):
            due.append(self.queue.popleft())
            held += len(due[-1])
        return due

    def _admit(self, memory: Memory, groups: Sequence[Sequence[int]]) -> Tensor:
        """Reads the contexts of these completions: logits [N, V] for them."""
        new = [i for group in groups for i in group]
        rows, room = torch.tensor(new, device=self.device), max(self.requests[i].max_tokens for i in new)
        repeats = torch.tensor([len(group) for group in groups], device=self.device)
        logits, width = memory.read([self.requests[group[0]].tokens for group in groups], repeats, room)
        self.routes.read(new, repeats, width)
        self.u[rows, :room] = uniforms([self.requests[i].key for i in new], room).to(self.device)
        self.alive, self.count = torch.cat([self.alive, rows]), torch.cat([self.count, torch.zeros_like(rows)])
        return logits

    def _text(self, row: int) -> Tensor:
        """[P + t] what a row has read."""
        place, drawn = int(self.alive[row]), int(self.count[row])
        return torch.cat([self.requests[place].tokens, self.tokens[place, :drawn].cpu()])

    def _draw(self, memory: Memory, logits: Tensor) -> Tensor:
        """One token for each row; those that are over leave, and the tokens [N] of the others are returned."""
        alive, count = self.alive, self.count
        check_drawable(logits, self.sampling, memory.model, self._text)
        token, logp = draw(logits, self.u[alive, count], self.sampling)
        self.tokens[alive, count], self.logps[alive, count] = token, logp.to(self.logps.dtype)
        count = count + 1
        stops = torch.isin(token, self.end)
        over = stops | (count >= self.limit[alive])
        if over.any():
            self.length[alive[over]], self.ended[alive[over]] = count[over], stops[over]
            order = memory.keep((~over).nonzero().squeeze(1))
            alive, count, token = alive[order], count[order], token[order]
        self.alive, self.count = alive, count
        return token


def _by_context(requests: Sequence[Request]) -> list[list[int]]:
    """The requests by context, the shortest contexts first, so that those that are read together need little padding."""
    contexts: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        contexts.setdefault(id(request.tokens), []).append(i)
    return sorted(contexts.values(), key=lambda group: len(requests[group[0]].tokens))
