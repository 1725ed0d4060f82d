"""Asking a sampler directly, as a rollout does: n completions of each context."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from policygrad.samplers.base import Generation, Request, Sampler, SamplingParams


@dataclass(frozen=True, eq=False)
class Context:
    """What completions go on from."""

    tokens: Tensor
    key: tuple[int, ...]
    max_tokens: int | None = None
    """None = what the sampling allows."""

    def budget(self, sampling: SamplingParams) -> int:
        return sampling.max_tokens if self.max_tokens is None else self.max_tokens


def sample(sampler: Sampler, contexts: Sequence[Context], n: int, sampling: SamplingParams) -> list[list[Generation]]:
    """n completions of each context, in their order."""
    requests = [Request(c.tokens, (*c.key, j), sampling, c.budget(sampling)) for c in contexts for j in range(n)]
    result = asyncio.run(_ask(sampler, requests))
    return [result[i : i + n] for i in range(0, len(result), n)]


async def _ask(sampler: Sampler, requests: Sequence[Request]) -> list[Generation]:
    return list(await sampler.generate(requests))
