"""LEVER 2, second half: the gate w(r, Ψ), under stop-gradient. Every gate's w at r = 1 is 1.

A gate knows its `weight` w and its `value`, the paper's objective per token; the derivative of the value in
log π_θ is w·Ψ. Where the paper writes `Ψ log π_θ`, the value is `Ψ(1 + log r)`: the same up to a constant of θ,
and Ψ at r = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.core.protocols import Gate
from policygrad.core.ranges import not_negative, positive
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class OnPolicy(Gate):
    """w = 1: the score function estimator; true only while π_θ = π_old. Source: Williams 1992."""

    on_policy: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return "1"

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return torch.ones_like(ratio)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return psi * (1 + ratio.log())


@dataclass(frozen=True)
class Importance(Gate):
    """w = r: the surrogate r·Ψ. Source: Schulman et al. 2015 (TRPO), eq. 14."""

    @property
    def formula(self) -> str:
        return "r"

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return ratio

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return ratio * psi


@dataclass(frozen=True)
class Clip(Gate):
    """w = r, or 0 once r has left [1 − low, 1 + high] in the direction Ψ pushes: min(rΨ, clip(r)Ψ).

    Source: Schulman et al. 2017 (PPO), eq. 7; `high` > `low` is clip-higher, Yu et al. 2025 (DAPO), eq. 10.
    """

    low: float = 0.2
    high: float = 0.2

    def __post_init__(self) -> None:
        not_negative(self, low=self.low, high=self.high)

    @property
    def formula(self) -> str:
        return f"r, or 0 where Ψ>0 and r>{1 + self.high:g}, or Ψ<0 and r<{1 - self.low:g}"

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where it cuts: (below, above), both [B, T] bool."""
        return (psi < 0) & (ratio < 1 - self.low), (psi > 0) & (ratio > 1 + self.high)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        below, above = self.clipped(ratio, psi, batch)
        return torch.where(below | above, torch.zeros_like(ratio), ratio)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return torch.minimum(ratio * psi, ratio.clamp(1 - self.low, 1 + self.high) * psi)


@dataclass(frozen=True)
class DualClip(Clip):
    """As Clip, and 0 when Ψ < 0 and r > c: for Ψ < 0 the value is max(min(rΨ, clip(r)Ψ), cΨ). Source: Ye et al. 2020, eq. 5."""

    c: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.c > 1:
            raise ConfigError(f"DualClip.c must be greater than 1, not {self.c}: it bounds r from above where Ψ < 0")

    @property
    def formula(self) -> str:
        return f"{super().formula}, or Ψ<0 and r>{self.c:g}"

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        below, above = super().clipped(ratio, psi, batch)
        return below, above | ((psi < 0) & (ratio > self.c))

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        value = super().value(ratio, psi, batch)
        return torch.where(psi < 0, torch.maximum(value, self.c * psi), value)


@dataclass(frozen=True)
class WeightCap(Gate):
    """w = clip(r, low, high), **absolute** bounds, not offsets; no token loses its gradient. low = 0 means no lower bound.

    Source: MiniMax-M1 2025 (CISPO), eq. 4 and 5.
    """

    low: float = 0.0
    high: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high:
            raise ConfigError(
                f"WeightCap bounds are absolute and must hold 0 ≤ low ≤ 1 ≤ high, not low = {self.low}, "
                f"high = {self.high}; an offset ε_high is written high = 1 + ε_high"
            )

    @property
    def formula(self) -> str:
        return f"clip(r, {self.low:g}, {self.high:g})"

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where it caps: (below, above), both [B, T] bool; a capped token keeps its gradient at the bound's weight."""
        return (psi != 0) & (ratio < self.low), (psi != 0) & (ratio > self.high)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return ratio.clamp(self.low, self.high)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return self.weight(ratio.detach(), psi, batch) * psi * (1 + ratio.log())


@dataclass(frozen=True)
class SoftGate(Gate):
    """w = 4p(1 − p)r with p = σ(τ(r − 1)), τ = tau_pos where Ψ > 0, else tau_neg: the value is σ(τ(r − 1))·4/τ·Ψ.

    Source: Gao et al. 2025 (SAPO), eq. 5 and 6.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        positive(self, tau_pos=self.tau_pos, tau_neg=self.tau_neg)

    @property
    def formula(self) -> str:
        return f"4p(1−p)r, p = σ(τ(r−1)), τ = {self.tau_pos:g} if Ψ>0 else {self.tau_neg:g}"

    def _tau(self, psi: Tensor) -> Tensor:
        return torch.where(psi > 0, psi.new_tensor(self.tau_pos), psi.new_tensor(self.tau_neg))

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        x = self._tau(psi) * (ratio - 1)
        return 4 * torch.sigmoid(x) * torch.sigmoid(-x) * ratio

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        tau = self._tau(psi)
        return torch.sigmoid(tau * (ratio - 1)) * 4 / tau * psi
