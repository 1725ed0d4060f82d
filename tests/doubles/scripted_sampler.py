"""A sampler that says what is written for it, in token ids, and certain of it; and `conversation`, which plays an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from policygrad.models.tokenizer import Tokenizer
from policygrad.rollout.episodes import run_episodes
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.tasks.base import Example


class ScriptedSampler:
    """`say(key, context)` is the turn's text, which an end token follows where the budget has room; or all of its ids."""

    def __init__(self, tokenizer: Tokenizer, say: Callable[[tuple[int, ...], str], str | list[int]]) -> None:
        self.tokenizer, self.say = tokenizer, say
        self.asked: list[Request] = []

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.asked += requests
        return [self._one(request) for request in requests]

    def generate_arriving(
        self, requests: Sequence[Request], take: Any, finish: Callable[[Request, Generation], None]
    ) -> None:
        for request in requests:
            finish(request, self._one(request))

    def _one(self, request: Request) -> Generation:
        text = self.say(request.key, self.tokenizer.hf.decode(request.prompt_ids))
        ids = text
        if isinstance(ids, str):
            ids = [*self.tokenizer.hf(ids, add_special_tokens=False)["input_ids"], min(self.tokenizer.end_ids)]
        cut = len(ids) > request.max_tokens
        tokens = torch.tensor(ids[: request.max_tokens])
        return Generation(tokens, torch.zeros(len(tokens)), "length" if cut else "stop", 0)

    async def update(self, weights: Any) -> None:
        pass


def conversation(
    tokenizer: Tokenizer,
    environment: Any,
    example: Example,
    turns: Sequence[str | list[int]],
    *,
    max_tokens: int = 1000,
    samples: int = 1,
) -> tuple[EpisodeGroup, ScriptedSampler]:
    """The group of episodes in which the policy says these turns."""
    sampler = ScriptedSampler(tokenizer, lambda key, context: turns[key[5] if len(key) > 5 else 0])
    starts = [EpisodeSpec(example, (0, TRAIN, 1, 0), max_tokens)]
    work = run_episodes(
        starts,
        samples,
        SamplingParams(max_tokens=max_tokens),
        sampler=sampler,
        encoder=tokenizer,
        environment=environment,
    )
    return asyncio.run(work)[0], sampler
