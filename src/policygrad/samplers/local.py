"""A sampler in this process, for any `AutoModelForCausalLM`: equal contexts are read once, finished rows leave the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from policygrad.models.routing import Routing
from policygrad.models.tokenizer import Tokenizer, padding_id
from policygrad.samplers.base import Generation, Request, Watch
from policygrad.weight_sync.base import Published
from policygrad.weight_sync.in_process import put_weights


class LocalSampler:
    """Decodes with the model it is given; when that is the learner's own model, `update` moves nothing."""

    _watch: Watch | None = None

    def __init__(self, model: nn.Module, end: frozenset[int], pad: int, routing: Routing | None = None) -> None:
        """routing: of the model, where its choices of experts shall be part of what is generated."""
        self.model, self.pad, self.version, self.routing = model, pad, 0, routing
        self.device = next(model.parameters()).device
        self.end = torch.tensor(sorted(end), device=self.device)
        self._shares: bool | None = None  # found out with the first request, when the model is what it will be

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Tokenizer, routing: Routing | None = None) -> LocalSampler:
        """For a model and its tokenizer, which names the end tokens."""
        return cls(model, tokenizer.end, padding_id(tokenizer), routing)

    async def update(self, weights: Published) -> None:
        """Copies the weights, except where they already are this model's own memory."""
        put_weights(weights.tensors, self.model)
        self.version = weights.version

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """As `Watchable`."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """A generation depends on its request and the weights, not on its neighbours (up to the rounding of a differently
        shaped matrix product)."""
        from policygrad.samplers.contexts import Shared, allows_sharing, check_decodes
        from policygrad.samplers.decoding import Decoding
        from policygrad.samplers.memory import Plain

        done: dict[int, Generation] = {}
        recording = nullcontext if self.routing is None else self.routing.recording
        if requests and self._shares is None:
            with recording():
                self._shares = allows_sharing(self.model, self.pad)
                if not self._shares:
                    check_decodes(self.model, self.pad)
        for sampling in dict.fromkeys(r.sampling for r in requests):
            places = [i for i, r in enumerate(requests) if r.sampling == sampling]
            memory = Shared(self.model, self.pad) if self._shares else Plain(self.model, self.pad)
            with recording():
                decoding = Decoding([requests[i] for i in places], self.end, self.pad, self.routing)
                done |= zip(places, decoding.run(memory, self.version, self._watch), strict=True)
        return [done[i] for i in range(len(requests))]
