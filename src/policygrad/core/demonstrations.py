"""Completions that the policy did not sample (`Batch.demonstration`), and the term that imitates them.

A part that names `demonstration` in `needs` takes them; in the others' averages they do not occur, and an algorithm without
such a part refuses a batch that has some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.aggregates import TokenMean
from policygrad.core.batch import Batch, Forward, required
from policygrad.core.metrics import Mean, Metric, Metrics
from policygrad.core.protocols import Aggregation, State, Term
from policygrad.core.ranges import unit
from policygrad.errors import ConfigError


def shown(batch: Batch, part: object) -> Tensor:
    """[B, 1] bool; the demonstrations. Raises ConfigError for a batch that does not say which those are."""
    return required(batch.demonstration, part, "demonstration")[:, None]


@dataclass(frozen=True)
class DemonstrationNLL(Term):
    """μ·φ·log π_θ on the tokens of demonstrations, a mean over those tokens; φ = p(1 − p), p = π_θ (`phi`), or 1.

    The objective is a mixture, (1 − μ)·J + μ·this: the policy's Ψ is multiplied with 1 − μ. φ is largest where the policy is in
    two minds (p = ½) and 0 where it is sure or has given up on a token.
    Source: Zhang et al. 2025 (CHORD), arXiv:2508.11408; φ = 1 is supervised fine-tuning beside reinforcement learning.
    """

    mu: float = 0.1
    """The share of what is shown; of what is sampled there is 1 − μ."""
    phi: bool = True
    aggregate: Aggregation | None = field(default_factory=TokenMean)
    final: float | None = None
    """Where μ goes from `mu`, along half a cosine; None = it stays."""
    rollouts: int = 200
    """After which μ is `final`."""
    needs: ClassVar[frozenset[str]] = frozenset({"demonstration"})

    def __post_init__(self) -> None:
        unit(self, mu=self.mu)
        if self.final is not None:
            unit(self, final=self.final)
        if self.rollouts < 1:
            raise ConfigError(f"DemonstrationNLL.rollouts must be at least 1, not {self.rollouts}")

    @property
    def mixture(self) -> float:  # type: ignore[override]
        return self.mu

    @property
    def formula(self) -> str:
        mu = f"{self.mu:g}" if self.final is None else "μ"
        where = f"{mu}·{'p(1 − p)' if self.phi else '1'} on demonstrations" + (",  p = π_θ" if self.phi else "")
        return where + (
            "" if self.final is None else f",  μ from {self.mu:g} to {self.final:g} in {self.rollouts} rollouts"
        )

    def init(self) -> State | None:
        """The rollouts done, where μ moves."""
        return None if self.final is None else {"rollouts": 0}

    def update(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        return {"rollouts": state["rollouts"] + 1}

    def at(self, state: State) -> Self:
        assert self.final is not None
        done = min(1.0, state["rollouts"] / self.rollouts)
        return replace(self, mu=self.final + (self.mu - self.final) * (1 + math.cos(math.pi * done)) / 2)

    def report(self, batch: Batch) -> Metrics:
        """demonstrations/mu, where it moves."""
        return {} if self.final is None else {"demonstrations/mu": Mean(self.mu)}

    def where(self, batch: Batch) -> Tensor:
        """[B, 1] bool; the demonstrations, in k and in its denominators."""
        return shown(batch, self)

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        p = ragged.masked(out.logp.detach(), batch.mask).clamp(max=0).exp()
        weight = p * (1 - p) if self.phi else torch.ones_like(p)
        return self.mu * ragged.masked(weight, shown(batch, self).expand(p.shape))

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.score(out, batch, psi) * ragged.masked(out.logp.detach(), batch.mask)
