"""Corrections for a sampler μ that is not π_old: factors on w from ρ = π_old/μ, per token or per completion (the product)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch, required
from policygrad.core.protocols import Correction
from policygrad.core.ratios import bounded_exp
from policygrad.errors import ConfigError

Level = Literal["token", "sequence"]
NEEDS = frozenset({"logp_old", "logp_sampler"})


def sampler_ratio(batch: Batch, part: object, level: Level) -> Tensor:
    """ρ [B, T]; at level 'sequence' the product over the completion, at each of its tokens."""
    old, sampled = required(batch.logp_old, part, "logp_old"), required(batch.logp_sampler, part, "logp_sampler")
    gap = ragged.masked(old - sampled, batch.own)  # what others wrote no sampler of ours drew: ρ = 1
    return bounded_exp(gap if level == "token" else gap.sum(1, keepdim=True).expand(gap.shape))


def _check(part: object, level: str) -> None:
    if level not in ("token", "sequence"):
        raise ConfigError(f"{type(part).__name__}.level must be 'token' or 'sequence', not {level!r}")


@dataclass(frozen=True)
class TruncatedIS(Correction):
    """× min(ρ, cap): bounded, biased where it caps. Source: Ionides 2008; Yao et al. 2025 (off-policy RL with rollout engines)."""

    cap: float = 2.0
    level: Level = "token"
    needs: ClassVar[frozenset[str]] = NEEDS

    def __post_init__(self) -> None:
        _check(self, self.level)
        if not self.cap >= 1:
            raise ConfigError(f"TruncatedIS.cap must be at least 1, not {self.cap}: ρ is 1 where the sampler agrees")

    @property
    def formula(self) -> str:
        return f"× min(ρ, {self.cap:g}),  ρ = π_old/μ per {self.level}"

    def __call__(self, batch: Batch, psi: Tensor) -> Tensor:
        return sampler_ratio(batch, self, self.level).clamp(max=self.cap)


@dataclass(frozen=True)
class MaskedIS(Correction):
    """× ρ where low ≤ ρ ≤ high, × 0 outside: tokens the two engines disagree on teach nothing. Source: IcePop (Ling 2025)."""

    low: float = 0.5
    high: float = 5.0
    level: Level = "token"
    needs: ClassVar[frozenset[str]] = NEEDS

    def __post_init__(self) -> None:
        _check(self, self.level)
        if not 0 <= self.low <= 1 <= self.high:
            raise ConfigError(f"MaskedIS needs 0 ≤ low ≤ 1 ≤ high, not low = {self.low}, high = {self.high}")

    @property
    def formula(self) -> str:
        return f"× ρ if {self.low:g} ≤ ρ ≤ {self.high:g} else 0,  ρ = π_old/μ per {self.level}"

    def __call__(self, batch: Batch, psi: Tensor) -> Tensor:
        rho = sampler_ratio(batch, self, self.level)
        return torch.where((rho >= self.low) & (rho <= self.high), rho, torch.zeros_like(rho))
