"""LEVER 2 for completions that somebody else wrote: a gate on π_θ itself beside the clip of what the policy sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch, required
from policygrad.core.demonstrations import shown
from policygrad.core.gates import Clip
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class PolicyShaping(Clip):
    """Clip for what the policy sampled, and for demonstrations f(x)Ψ, f(x) = x/(x + γ), x = π_θ/π_φ, π_φ whoever wrote them.

    So w = γx/(x + γ)²: of a token that π_θ finds unlikely it is about x/γ, more than the x of a plain importance weight, and
    nothing clips it. Where nobody has said π_φ (`Batch.logp_sampler` is 0) it is 1. The ratio is `Token()`.
    Source: Yan et al. 2025 (LUFFY), arXiv:2504.14945, policy shaping.
    """

    gamma: float = 0.1
    token_ratio: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"demonstration", "logp_old", "logp_sampler"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gamma > 0:
            raise ConfigError(f"PolicyShaping.gamma must be greater than 0, not {self.gamma}: at 0, f is 1 for all x")

    @property
    def formula(self) -> str:
        return f"{super().formula}; demonstrations: {self.gamma:g}x/(x + {self.gamma:g})², x = π_θ/π_φ"

    def _logit(self, ratio: Tensor, batch: Batch) -> Tensor:
        """log(x/γ), whose logistic function is f(x)."""
        old = ragged.masked(required(batch.logp_old, self, "logp_old"), batch.mask)
        wrote = ragged.masked(required(batch.logp_sampler, self, "logp_sampler"), batch.mask)
        return ratio.log() + (old - wrote) - math.log(self.gamma)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        own, where = super().weight(ratio, psi, batch), shown(batch, self)
        if not bool(where.any()):
            return own
        z = self._logit(ratio, batch)
        return torch.where(where, torch.sigmoid(z) * torch.sigmoid(-z), own)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        own, where = super().value(ratio, psi, batch), shown(batch, self)
        if not bool(where.any()):
            return own
        return torch.where(where, torch.sigmoid(self._logit(ratio, batch)) * psi, own)

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where it cuts, among what the policy sampled."""
        below, above = super().clipped(ratio, psi, batch)
        return below & ~shown(batch, self), above & ~shown(batch, self)
