"""Gates that are bounded like a clip and weigh tokens otherwise: a gradient beyond the clip, and a ratio that is turned over."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.core.gates import Clip, RatioGate
from policygrad.core.settings import setting


@dataclass(frozen=True)
class GradientPreservingClip(RatioGate):
    """`Clip`, but beyond a bound w is β times the bound instead of 0: tokens that a clip drops keep a gradient of bounded size.

    w = beta_low·(1 − low) where Ψ < 0 and r < 1 − low, beta_high·(1 + high) where Ψ > 0 and r > 1 + high, else r. Clipped tokens
    are mostly unlikely ones: those with Ψ > 0 raise the entropy and those with Ψ < 0 lower it, so that the two factors steer it.
    With 0 for both it is `Clip`. Where Ψ < 0, r > c still has w = 0 (dual clip).
    Source: Su et al. 2025 (CE-GPPO), arXiv:2509.20712; the authors' code, verl/trainer/ppo/core_algos.py
    (`compute_gppo_loss_general_beta`).
    """

    low: float = setting(0.2, "in [0, 1]")
    high: float = setting(0.2, "at least 0", unbounded=True)
    beta_low: float = setting(0.75, "at least 0")
    """β₁, of tokens with Ψ < 0 that have become less likely than the clip allows."""
    beta_high: float = setting(1.0, "at least 0")
    """β₂, of tokens with Ψ > 0 that have become more likely than the clip allows."""
    c: float = setting(10.0, "above 1", hint="it bounds r from above where Ψ < 0", unbounded=True)
    """Bound on r where Ψ < 0 (dual clip); inf: none."""

    @property
    def formula(self) -> str:
        dual = "" if self.c == math.inf else f", 0 where Ψ<0 and r>{self.c:g}"
        low, high = f"{1 - self.low:g}", f"{1 + self.high:g}"
        return f"r, or {self.beta_high:g}·{high} where Ψ>0 and r>{high}, {self.beta_low:g}·{low} where Ψ<0 and r<{low}{dual}"

    @property
    def _clip(self) -> Clip:
        return Clip(self.low, self.high, self.c)

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the tokens beyond a bound, which keep a gradient that β weights, except those of the dual clip."""
        return self._clip.clipped(ratio, psi, batch)

    def _beyond(self, ratio: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
        """Return where a bound is passed, [B, T] bool, and w there."""
        below, above = (psi < 0) & (ratio < 1 - self.low), (psi > 0) & (ratio > 1 + self.high)
        at_low, at_high = self.beta_low * (1 - self.low), self.beta_high * (1 + self.high)
        bound = torch.where(below, ratio.new_tensor(at_low), ratio.new_tensor(at_high))
        return below | above, bound

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        is_beyond, bound = self._beyond(ratio, psi)
        return torch.where(is_beyond, bound, self._clip.weight(ratio, psi, batch))

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        is_beyond, bound = self._beyond(ratio, psi)
        inner = self._clip.value(ratio, psi, batch)
        return torch.where(is_beyond, bound * psi * ratio / ratio.detach(), inner)


@dataclass(frozen=True)
class FlippedImportance(RatioGate):
    """w = min(1/r, c) where Ψ > 0 and min(r, c) where Ψ < 0; 0 once r has left [1 − low, 1 + high] in the direction that Ψ pushes.

    With w = r a token with Ψ > 0 counts the more, the likelier it has already become. Turned over, those that have become less
    likely catch up first. c bounds the weight and keeps the gradient (soft dual clip).
    Source: Wang et al. 2025 (ASPO), arXiv:2510.06062; the authors' code, verl/trainer/ppo/core_algos.py
    (`compute_policy_loss_archer`).
    """

    low: float = setting(0.2, "in [0, 1]")
    high: float = setting(0.2, "at least 0", unbounded=True)
    c: float = setting(3.0, "above 1", unbounded=True)
    """Largest weight."""

    @property
    def formula(self) -> str:
        c, low, high = f"{self.c:g}", f"{1 - self.low:g}", f"{1 + self.high:g}"
        return f"min(1/r, {c}) where Ψ>0, 0 beyond r = {high}; min(r, {c}) where Ψ<0, 0 below r = {low}"

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return (psi < 0) & (ratio < 1 - self.low), (psi > 0) & (ratio > 1 + self.high)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        below, above = self.clipped(ratio, psi, batch)
        weight = torch.where(psi > 0, 1 / ratio, ratio).clamp(max=self.c)
        return torch.where(below | above, torch.zeros_like(ratio), weight)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return self.weight(ratio.detach(), psi, batch) * psi * (1 + ratio.log())
