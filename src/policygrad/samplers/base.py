"""What a sampler is: requests in, generations out, token ids both ways. An engine is one file that does this."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from policygrad.core.metrics import Metrics
from policygrad.errors import ConfigError
from policygrad.weight_sync.base import PublishedWeights


@dataclass(frozen=True)
class SamplingParams:
    """The distribution completions are drawn from. The policy *is* this distribution: log-probabilities are taken under it."""

    temperature: float = 1.0
    """Divides the logits; 0 = greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability; 1 = all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 = all."""
    max_tokens: int = 32
    """Generation budget, sampled tokens per completion."""
    decode_rows: int = 512
    """Completions decoded at a time: fewer take less memory, more are faster; the draws are the same."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"sampling.temperature must be at least 0 and finite, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling.top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"sampling.top_k must be at least 0 (0 = all tokens), not {self.top_k}")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.decode_rows < 1:
            raise ConfigError(f"decode_rows must be at least 1, not {self.decode_rows}")

    @property
    def is_truncated(self) -> bool:
        """Whether tokens of the policy can never be drawn."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, eq=False)
class Request:
    """One completion to draw. Requests that share their `tokens` (the same tensor) are read once by a sampler that can."""

    prompt_ids: Tensor
    """[P] int64, at least one: everything before what is to be drawn."""
    key: tuple[int, ...]
    """Names its random numbers: the same key and weights draw the same, whatever else is asked beside it."""
    sampling: SamplingParams
    max_tokens: int
    """Tokens that may be drawn, at least one."""


@dataclass(frozen=True, eq=False)
class Generation:
    """What was drawn for a request."""

    tokens: Tensor
    """[n] int64, the end token included where it was sampled."""
    logp: Tensor
    """[n] nats, under the distribution that was really sampled from."""
    finish_reason: Literal["stop", "length"]
    """stop: the policy ended it; length: the budget did."""
    version: int | Tensor
    """Of the weights that drew it; [n] int64 where they changed on the way."""
    routed_experts: Tensor | None = None
    """[P + n, layers, k] int16; the experts that each token of the request and of the answer was sent to, -1 where it was not
    read (the last one). None = a model without experts, or nobody asked."""


@runtime_checkable
class Sampler(Protocol):
    """Draws completions under some version of the policy."""

    async def generate(self, requests: Sequence[Request]) -> Sequence[Generation]:
        """One generation per request, in their order."""
        ...

    async def update(self, weights: PublishedWeights) -> Metrics | None:
        """Returns when what is drawn from now on is drawn with these weights, and its version says so.

        What it returns are metrics of the step, if any.
        """
        ...


@runtime_checkable
class AsyncCloseable(Protocol):
    """A sampler that has something to end with the run: connections, servers."""

    async def close(self) -> None:
        """Ends it."""
        ...


@runtime_checkable
class SupportsInFlightUpdates(Sampler, Protocol):
    """A sampler that may be given weights while it generates, where it says so: what is drawn from then on is drawn with them, and
    each token says its version."""

    in_flight: bool


CompletionCallback = Callable[[Sequence[tuple[Request, Tensor]]], None]
"""Looks in after every token of a batch, with the requests that are over with it, be they none, and their tokens [n] int64."""


@runtime_checkable
class SupportsStreaming(Sampler, Protocol):
    """A sampler that says what is over while it goes on with others, so that it can be judged meanwhile. None need be one."""

    def on_completion(self, callback: CompletionCallback) -> AbstractContextManager[object]:
        """What is generated inside is told to `watch`; what it raises ends the generating."""
        ...
