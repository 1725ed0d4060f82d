"""What is done in a step: how many completions of which lengths, and what an algorithm asks of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from policygrad.errors import ConfigError

GOLDEN = 0.618


@dataclass(frozen=True)
class Asks:
    """What an algorithm asks for besides sampling and the policy's gradient."""

    name: str = ""
    trained: int = 1
    """Models that train: the policy, a critic with a backbone of its own, a reward model."""
    frozen: int = 0
    """Models beside them that only evaluate: the reference."""
    scores: int = 0
    """Times that a rollout is read by some model before it is learned: log π_old, log π_ref, values."""
    epochs: int = 1
    """Times that a rollout is learned from."""
    updates: int = 1
    """Optimiser steps of a rollout."""
    behind: int = 0
    """Times that it is read besides where samples are older than the weights: log π_old, to correct for that."""
    head_twice: bool = False
    """The logits are computed once more on the way back, as the gradient to log π is not known on the way there."""
    samples: int = 8
    """G, completions of a prompt, where nobody says otherwise."""
    uncounted: tuple[str, ...] = ()
    """What it does besides that no plan counts, in words."""

    def readings(self, staleness: int) -> int:
        """Passes over a rollout before it is learned."""
        return self.scores + (self.behind if staleness else 0)

    def twice(self, staleness: int) -> bool:
        """Whether logits are computed again on the way back."""
        return self.head_twice or (staleness > 0 and self.behind > 0)


@dataclass(frozen=True)
class Work:
    """A step's completions.

    Their lengths are those of a policy that ends with the same probability at every token, cut off at `budget`: geometric, or in
    the limit exponential, with the mean that is given. Equal quantiles of that stand for the draws.

    Raises:
        ConfigError: numbers below 1, or a mean above the budget.
    """

    prompts: int
    samples: int
    prompt: int
    """Mean tokens of a prompt."""
    completion: float
    """Mean tokens of a completion."""
    budget: int
    """Tokens of a completion, at most."""

    def __post_init__(self) -> None:
        for name in ("prompts", "samples", "prompt", "completion", "budget"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"a step's {name} must be at least 1, not {getattr(self, name):g}")
        if self.completion > self.budget:
            raise ConfigError(
                f"completions of {self.completion:g} tokens in the mean are more than the {self.budget} that one may have: give a "
                "larger --context, or a smaller --completion"
            )

    @property
    def completions(self) -> int:
        """Of a step."""
        return self.prompts * self.samples

    @property
    def context(self) -> int:
        """Tokens of the longest text."""
        return self.prompt + self.budget

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each completion, long and short ones mixed."""
        count, scale = self.completions, _scale(self.completion / self.budget) * self.budget
        ordered = [_quantile((i + 0.5) / count, scale, self.budget) for i in range(count)]
        stride = next(s for s in range(max(1, round(count * GOLDEN)), 2 * count + 2) if math.gcd(s, count) == 1)
        return tuple(ordered[i * stride % count] for i in range(count))

    @cached_property
    def sampled(self) -> int:
        """Tokens of all completions."""
        return sum(self.lengths)

    def tokens(self, shared: bool = True) -> Tokens:
        """That a learner computes, each prompt once for its group, or with every completion anew."""
        count, whole, squares = self.completions, self.sampled, sum(n * n for n in self.lengths)
        copies = self.prompts if shared else count
        nodes = copies * self.prompt + whole - count  # nobody asks what comes after the last token
        pairs = copies * self.prompt * (self.prompt + 1) / 2 + (whole - count) * self.prompt + (squares - whole) / 2
        return Tokens(nodes, pairs, copies + whole - count)

    @cached_property
    def seen(self) -> float:
        """Tokens that a drawn one attends to, in the mean over all that are drawn."""
        return self.prompt + sum(n * n for n in self.lengths) / (2 * self.sampled)


@dataclass(frozen=True)
class Tokens:
    """What is computed of some texts."""

    nodes: float
    """Tokens that go through the layers."""
    pairs: float
    """Of a token and one that it attends to."""
    states: float
    """Tokens that go through the head."""


def _quantile(q: float, scale: float, budget: int) -> int:
    """Of an exponential cut off at the budget; at least one token."""
    return budget if math.isinf(scale) else max(1, min(budget, round(-scale * math.log(1 - q))))


def _scale(share: float) -> float:
    """θ over the budget, of an exponential with mean θ (1 − e^(−1/θ)) when it is cut off there; by bisection."""
    if share >= 1 - 1e-9:
        return math.inf
    low, high = 1e-9, 1e9
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if -middle * math.expm1(-1 / middle) < share else (low, middle)
    return high
