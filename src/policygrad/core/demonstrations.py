"""Completions that the policy did not sample (`Batch.demonstration`), and the term that imitates them.

A part that names `demonstration` in `needs` takes them; in the others' averages they do not occur, and an algorithm without
such a part refuses a batch that has some.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.aggregates import TokenMean
from policygrad.core.batch import Batch, Forward, required
from policygrad.core.protocols import Aggregation, Term
from policygrad.errors import ConfigError


def shown(batch: Batch, part: object) -> Tensor:
    """[B, 1] bool; the demonstrations. Raises ConfigError for a batch that does not say which those are."""
    return required(batch.demonstration, part, "demonstration")[:, None]


@dataclass(frozen=True)
class DemonstrationNLL(Term):
    """μ·φ·log π_θ on the tokens of demonstrations, a mean over those tokens; φ = p(1 − p), p = π_θ (`phi`), or 1.

    φ is largest where the policy is in two minds (p = ½) and 0 where it is sure or has given up on a token.
    Source: Zhang et al. 2025 (CHORD), arXiv:2508.11408; φ = 1 is supervised fine-tuning beside reinforcement learning.
    """

    mu: float = 0.1
    phi: bool = True
    aggregate: Aggregation | None = field(default_factory=TokenMean)
    needs: ClassVar[frozenset[str]] = frozenset({"demonstration"})

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ConfigError(f"DemonstrationNLL.mu must be at least 0, not {self.mu}")

    @property
    def formula(self) -> str:
        return f"{self.mu:g}·{'p(1 − p)' if self.phi else '1'} on demonstrations" + (",  p = π_θ" if self.phi else "")

    def where(self, batch: Batch) -> Tensor:
        """[B, 1] bool; the demonstrations, in k and in its denominators."""
        return shown(batch, self)

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        p = ragged.masked(out.logp.detach(), batch.mask).clamp(max=0).exp()
        weight = p * (1 - p) if self.phi else torch.ones_like(p)
        return self.mu * ragged.masked(weight, shown(batch, self).expand(p.shape))

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.score(out, batch, psi) * ragged.masked(out.logp.detach(), batch.mask)
