"""A sampler that takes weights over in the midst of its answers, each time at the same token: what is left to chance in an engine
is fixed here, so that a run is the same every time."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from policygrad.models.tokenizer import Tokenizer
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.engines.base import concat_generations
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.weight_sync.base import PublishedWeights

PIECE = 3
"""Tokens that are drawn before the weights may change, and so on."""


class InFlight:
    """The answers of step s get their first tokens with the weights of step s - 2, those when the rollout before is whole, and
    the others with those of step s - 1: it waits for them, and they for it. One update makes a step's weights.

    alone: the last step whose rollout is drawn while nobody learns, or is there already; it waits for nothing. held: a step
    whose rollout has its first tokens and never gets any others. told: is called with "begun" and the step whose rollout has its
    first tokens, and with "published" and the version of the weights.
    """

    in_flight = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        *,
        last: int,
        alone: int = 1,
        held: int | None = None,
        told: Callable[[str, int], object] = lambda what, number: None,
    ) -> None:
        """last: the run's last step."""
        self.inner, self.told = LocalSampler.from_tokenizer(model, tokenizer), told
        self.last, self.alone, self.held = last, alone, held
        self.asked: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        """By step, the keys of what was asked for, in its order."""
        self.drawn: dict[tuple[int, ...], Generation] = {}
        """By key."""
        steps = range(last + 2)  # made at once: several threads look
        self.begun = {step: threading.Event() for step in steps}
        """By step, whether its rollout has its first tokens: then the one before it is whole."""
        self._begun = {step: asyncio.Event() for step in steps}
        self._updated = {step: asyncio.Event() for step in steps}

    async def update(self, weights: PublishedWeights) -> None:
        if self.alone < weights.version + 1 <= self.last:
            await self._begun[weights.version + 1].wait()
        self.told("published", weights.version)
        await self.inner.update(weights)
        for version in range(weights.version + 1):
            self._updated[version].set()

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        step = requests[0].key[2]
        self.asked[step] += [request.key for request in requests]
        parts: list[list[Generation]] = [[] for _ in requests]
        while left := [i for i, request in enumerate(requests) if _goes_on(request, parts[i])]:
            drawn = await self.inner.generate([_next(requests[i], parts[i]) for i in left])
            for i, part in zip(left, drawn, strict=True):
                parts[i].append(part)
            if not self.begun[step].is_set():
                await self._have_begun(step)
        self.drawn |= {request.key: concat_generations(parts[i]) for i, request in enumerate(requests)}
        return [self.drawn[request.key] for request in requests]

    async def _have_begun(self, step: int) -> None:
        """Its answers have their first tokens."""
        self.begun[step].set()
        self._begun[step].set()
        self.told("begun", step)
        if step == self.held:
            await asyncio.Event().wait()
        if step > self.alone:
            await self._updated[step - 1].wait()


def _goes_on(request: Request, parts: Sequence[Generation]) -> bool:
    ended = bool(parts) and parts[-1].finish_reason == "stop"
    return not ended and sum(len(part.tokens) for part in parts) < request.max_tokens


def _next(request: Request, parts: Sequence[Generation]) -> Request:
    """The request for what comes after these."""
    tokens = [part.tokens for part in parts]
    left = request.max_tokens - sum(map(len, tokens))
    key = (*request.key, 0, len(parts)) if parts else request.key
    return replace(request, prompt_ids=torch.cat([request.prompt_ids, *tokens]), key=key, max_tokens=min(PIECE, left))
