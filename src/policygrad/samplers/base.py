"""What a rollout is made of: prompts in, groups of completions out; token ids all the way, never re-tokenised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from policygrad.weight_sync.base import Published


@dataclass(frozen=True)
class Sampling:
    """The distribution completions are drawn from. The policy *is* this distribution: log-probabilities are taken under it."""

    temperature: float = 1.0
    """Divides the logits; 0 = greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability; 1 = all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 = all."""
    max_tokens: int = 32
    """Generation budget, tokens per completion."""
    decode_rows: int = 512
    """Completions decoded at a time: fewer take less memory, more are faster; the draws are the same."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"sampling.temperature must be at least 0 and finite, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k must be at least 0 (0 = all tokens), not {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.decode_rows < 1:
            raise ValueError(f"decode_rows must be at least 1, not {self.decode_rows}")

    @property
    def cuts_off(self) -> bool:
        """Whether tokens of the policy can never be drawn."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt (or a prompt and a prefix of its answer) as token ids, and the key its samples draw their numbers from."""

    tokens: Tensor
    """[P] int64, at least one."""
    key: tuple[int, ...]
    """(seed, stream, step, prompt), and of a prefix (…, sample, position); sample j draws from key + (j,)."""
    max_tokens: int | None = None
    """What a prefix leaves of the generation budget, in tokens; None = all of it."""

    def budget(self, sampling: Sampling) -> int:
        """Tokens that a completion may take."""
        return sampling.max_tokens if self.max_tokens is None else min(self.max_tokens, sampling.max_tokens)


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled answer."""

    tokens: Tensor
    """[n] int64, the end token included where it was sampled."""
    logp: Tensor
    """[n] nats, under the distribution that was really sampled from."""
    truncated: bool
    """Stopped by the budget."""


@dataclass(frozen=True, eq=False)
class Group:
    """The completions of one prompt."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    version: int
    """Of the weights that sampled it."""


class Sampler(Protocol):
    """Turns prompts into groups of completions."""

    def sample(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> list[Group]:
        """n completions of each prompt, in the order of `prompts`."""
        ...

    def load(self, weights: Published) -> None:
        """Samples from these weights from now on."""
        ...
