"""The interface of a sampler: requests in, generations out, token ids in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import SamplingMask, TopTokens
from policygrad.core.media import TextMedia
from policygrad.core.metrics import Metrics
from policygrad.core.validation import check_sampling
from policygrad.errors import ConfigError
from policygrad.utils.field_types import check_field_types
from policygrad.weight_sync.base import PublishedWeights


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What a model says of n given tokens."""

    logp: Tensor
    """[n] float32 nats, the log-probability of each."""
    top: TopTokens | None = None
    """The likeliest tokens in place of each, where these were asked for."""


@dataclass(frozen=True)
class SamplingParams:
    """The distribution that completions are sampled from. It is the policy: log-probabilities are taken under it."""

    temperature: float = 1.0
    """Divides the logits; 0 = greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability; 1 = all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 = all."""
    max_tokens: int = 32
    """Maximum sampled tokens per completion."""
    decode_rows: int = 512
    """Completions decoded at a time: fewer use less memory, more are faster. The samples do not depend on it."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion: </answer>. It ends with the token that completes one, and is finished, not truncated."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"sampling.temperature must be finite and at least 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling.top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"sampling.top_k must be at least 0 (0 = all tokens), not {self.top_k}")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not all(self.stop):
            raise ConfigError(f"sampling.stop must be texts with at least one character each, not {self.stop!r}")
        if self.decode_rows < 1:
            raise ConfigError(f"decode_rows must be at least 1, not {self.decode_rows}")

    def check(self, algorithm: Algorithm, samples_per_prompt: int) -> None:
        """Raise ConfigError for samples that the algorithm cannot learn from."""
        check_sampling(algorithm, samples_per_prompt, self.temperature)
        if self.temperature == 0:
            raise ConfigError("temperature=0 makes all samples of a prompt equal: set --temperature above 0")
        if self.top_k == 1:
            raise ConfigError(
                f"top_k=1 leaves the most probable token alone, so that all samples of a prompt are equal and temperature="
                f"{self.temperature:g} has no effect: set --top-k to 0 (all tokens), or above 1"
            )
        if not self.is_truncated:
            return
        unsupported = {
            type(algorithm.update_rule).__name__: not algorithm.update_rule.uses_lr,
            "OptimalBaseline(norm='exact')": "grad_logp_sq_norm" in algorithm.needs,
        }
        for name in (name for name, is_used in unsupported.items() if is_used):
            raise ConfigError(
                f"{name} evaluates the policy over the whole vocabulary, and top_p or top_k leave a part of it: leave top_p = 1 "
                "and top_k = 0, or choose an algorithm without it, such as grpo"
            )

    @property
    def is_truncated(self) -> bool:
        """True if top-k or top-p gives some tokens probability 0."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, eq=False)
class Request:
    """One completion to sample. A sampler may read a prompt once for all requests that share the same `prompt_ids` tensor."""

    prompt_ids: Tensor
    """[P] int64, P ≥ 1: everything before the completion."""
    key: tuple[int, ...]
    """Seeds the random numbers: the same key and weights give the same completion, whatever else is in the batch."""
    sampling: SamplingParams
    max_tokens: int
    """Maximum tokens to sample, at least 1."""
    continues: bool = False
    """A later prompt may continue this text, as in a conversation: the sampler may keep what it has computed of it."""
    needs_mask: bool = False
    """`Generation.sampling_mask` is needed: the completion is trained on, and top-k or top-p is in use."""
    media: TextMedia = ()
    """The prompt's pictures."""
    compact_ids: Tensor | None = None
    """[P'] int64; the prompt with one mark for each picture, for an engine that expands it. None = no pictures."""
    stop: frozenset[int] | None = None
    """Token ids that end the completion; None = the tokenizer's end tokens."""


@runtime_checkable
class CachesTexts(Protocol):
    """A sampler that keeps what it has computed of texts that may be continued."""

    def clear_texts(self) -> None:
        """Free it: no text will be continued."""


@runtime_checkable
class LendsMemory(Protocol):
    """A sampler on the learner's own GPU, which can give its memory to the learner while the learner learns."""

    async def lend_memory(self) -> Metrics:
        """Free it. The next `update`, or the next `generate`, takes it back.

        Returns:
            Metrics of the step, if any.
        """


@dataclass(frozen=True, eq=False)
class Generation:
    """The completion of one request."""

    tokens: Tensor
    """[n] int64, including the end token if it was sampled."""
    logp: Tensor
    """[n] nats, under the distribution that was actually sampled from."""
    finish_reason: Literal["stop", "length"]
    """stop: the policy sampled an end token, or completed a stop text; length: `max_tokens` was reached."""
    version: int | Tensor
    """Version of the weights; [n] int64 if they changed during the completion."""
    routed_experts: Tensor | None = None
    """[P + n, layers, k] int16: the experts that each token of prompt and completion was routed to, -1 for a token that was not
    read (the last one). None = no experts, or not recorded."""
    sampling_mask: SamplingMask | None = None
    """The tokens that top-k and top-p left at each of the n; None = all, or not recorded."""


@runtime_checkable
class Sampler(Protocol):
    """Samples completions from some version of the policy."""

    async def generate(self, requests: Sequence[Request]) -> Sequence[Generation]:
        """Return one generation per request, in order."""

    async def update(self, weights: PublishedWeights) -> Metrics | None:
        """Load these weights; everything sampled after the return is sampled with them and has their version.

        Returns:
            Metrics of the step, if any.
        """


@runtime_checkable
class AsyncCloseable(Protocol):
    """A sampler that holds resources until the run ends: connections, servers."""

    async def close(self) -> None:
        """Release them."""


@runtime_checkable
class SupportsInFlightUpdates(Sampler, Protocol):
    """A sampler whose weights may be updated while it generates, if `in_flight` is true. Later tokens are sampled with the new
    weights, and each token has its own version."""

    in_flight: bool


@runtime_checkable
class SupportsConcurrentCalls(Sampler, Protocol):
    """A sampler that answers a call of `generate` while others are pending, if `serves_concurrently` is true."""

    serves_concurrently: bool


RowsCallback = Callable[[Sequence[Request]], None]
"""Called with the request that each row of a batch belongs to."""

CompletionCallback = Callable[[Sequence[tuple[Request, Tensor]]], None]
"""Called with the completions finished since the last call, [(request, tokens [n] int64)], and from time to time with none."""


@runtime_checkable
class SupportsStreaming(Sampler, Protocol):
    """A sampler that reports completions as they finish, so that they can be scored while others are still being sampled."""

    def on_completion(self, callback: CompletionCallback) -> AbstractContextManager[object]:
        """Call `callback` while the context is active. An exception raised by it ends `generate`."""
