"""A sampler in this process, for any `AutoModelForCausalLM`: equal contexts are read once, finished rows leave the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.models.routing import Routing
from policygrad.models.tokenizer import Tokenizer, padding_id
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.draw import draw, uniforms
from policygrad.samplers.finite import check_drawable
from policygrad.samplers.routes import Routes
from policygrad.weight_sync.base import Published
from policygrad.weight_sync.in_process import put_weights


class LocalSampler:
    """Decodes with the model it is given; when that is the learner's own model, `update` moves nothing."""

    def __init__(self, model: nn.Module, end: frozenset[int], pad: int, routing: Routing | None = None) -> None:
        """routing: of the model, where its choices of experts shall be part of what is generated."""
        self.model, self.pad, self.version, self.routing = model, pad, 0, routing
        self.device = next(model.parameters()).device
        self.end = torch.tensor(sorted(end), device=self.device)

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Tokenizer, routing: Routing | None = None) -> LocalSampler:
        """For a model and its tokenizer, which names the end tokens."""
        return cls(model, tokenizer.end, padding_id(tokenizer), routing)

    async def update(self, weights: Published) -> None:
        """Copies the weights, except where they already are this model's own memory."""
        put_weights(weights.tensors, self.model)
        self.version = weights.version

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """A generation depends on its request and the weights, not on its neighbours (up to the rounding of a differently
        shaped matrix product)."""
        done: dict[int, Generation] = {}
        for sampling in dict.fromkeys(r.sampling for r in requests):
            rows = [i for i, r in enumerate(requests) if r.sampling == sampling]
            for chunk in _chunks(requests, rows, sampling.decode_rows):
                places = [i for group in chunk for i in group]
                with nullcontext() if self.routing is None else self.routing.recording():
                    done |= zip(places, self._decode([[requests[i] for i in group] for group in chunk]), strict=True)
        return [done[i] for i in range(len(requests))]

    def _prefill(self, contexts: Sequence[Tensor], repeats: Tensor, room: int) -> tuple[Tensor, dict[str, Any], Tensor]:
        """Reads each context once; logits [N, V], cache and attention mask [N, L + room] are then one row per completion.

        The cache stands under the name that the model's forward pass takes it by.
        """
        from policygrad.samplers.cache import cache_of, expand

        width = max(map(len, contexts))
        ids = torch.full((len(contexts), width), self.pad)
        attention = torch.zeros(len(contexts), width + room, dtype=torch.int64)
        for i, tokens in enumerate(contexts):
            ids[i, width - len(tokens) :] = tokens
            attention[i, width - len(tokens) :] = 1
        ids, attention = ids.to(self.device), attention.to(self.device)
        seen = attention[:, :width]
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        out = self.model(
            input_ids=ids,
            attention_mask=seen,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        )
        name, cache = cache_of(out)
        expand(cache, repeats, room)
        return out.logits[:, -1].repeat_interleave(repeats, 0), {name: cache}, attention.repeat_interleave(repeats, 0)

    @torch.no_grad()
    def _decode(self, groups: Sequence[Sequence[Request]]) -> list[Generation]:
        """The requests of a group have one context."""
        from policygrad.samplers.cache import select

        requests = [r for group in groups for r in group]
        repeats = torch.tensor([len(group) for group in groups], device=self.device)
        limit = torch.tensor([r.max_tokens for r in requests], device=self.device)
        budget, rows, sampling = int(limit.max()), len(requests), requests[0].sampling
        logits, cache, attention = self._prefill([group[0].tokens for group in groups], repeats, budget)
        width = attention.shape[1] - budget
        position = torch.tensor([len(r.tokens) for r in requests], device=self.device)
        u = uniforms([r.key for r in requests], budget).to(self.device)
        tokens = torch.full((rows, budget), self.pad, device=self.device)
        logps = torch.zeros(rows, budget, device=self.device)
        length = limit.clone()
        ended = torch.zeros(rows, dtype=torch.bool, device=self.device)
        over = ended  # ended, or at its limit
        routes = Routes.begun(self.routing, requests, repeats, width, budget)
        alive = torch.arange(rows, device=self.device)  # row of the decoding batch -> completion
        for t in range(budget):
            check_drawable(logits, sampling, self.model, partial(_text, requests, tokens, alive, t))
            token, logp = draw(logits, u[alive, t], sampling)
            fresh = ~over[alive]  # a row that is over may wait here until the batch is next compacted
            tokens[alive[fresh], t], logps[alive[fresh], t] = token[fresh], logp[fresh]
            stops = fresh & torch.isin(token, self.end)
            length[alive[stops]], ended[alive[stops]] = t + 1, True
            over = ended | (limit <= t + 1)
            going = ~over[alive]
            left = int(going.sum())
            if left == 0 or t + 1 == budget:
                break
            if left < 0.8 * len(alive):
                keep = going.nonzero().squeeze(1)
                for held in cache.values():
                    select(held, keep)
                alive, token, position, attention = alive[keep], token[keep], position[keep], attention[keep]
            out = self.model(
                input_ids=token[:, None],
                attention_mask=attention[:, : width + t + 1] if "past_key_values" in cache else None,
                position_ids=position[:, None],
                **cache,
                use_cache=True,
                return_dict=True,
            )
            routes.add(alive.cpu(), t)
            logits, position = (
                out.logits[:, -1],
                position + ~over[alive],
            )  # which waits stays within the model's context
        return [
            Generation(row[:size], p[:size], "stop" if done else "length", self.version, routes.of(i, size))
            for i, (row, p, size, done) in enumerate(
                zip(tokens.cpu(), logps.cpu(), length.tolist(), ended.tolist(), strict=True)
            )
        ]


def _text(requests: Sequence[Request], tokens: Tensor, alive: Tensor, t: int, row: int) -> Tensor:
    """[P + t] what a row of the decoding batch has read before its t-th token."""
    place = int(alive[row])
    return torch.cat([requests[place].tokens, tokens[place, :t].cpu()])


def _chunks(requests: Sequence[Request], rows: Sequence[int], size: int) -> Iterator[list[list[int]]]:
    """The places `rows` by context, contexts of similar length together, at most `size` requests (or one context) at a time."""
    contexts: dict[int, list[int]] = {}
    for i in rows:
        contexts.setdefault(id(requests[i].tokens), []).append(i)
    chunk, held = list[list[int]](), 0
    for group in sorted(contexts.values(), key=lambda group: len(requests[group[0]].tokens)):
        if chunk and held + len(group) > size:
            yield chunk
            chunk, held = [], 0
        chunk.append(group)
        held += len(group)
    if chunk:
        yield chunk
