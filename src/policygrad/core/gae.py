"""Advantages from a critic's values V_t, the value before token t.

A chain can start with one of these instead of the reward. They step over a completion's *sampled* tokens: the state after token t
is the one before the next sampled token t', so tool output between two actions is no step. The terminal reward is on the last
sampled token; the value after it is 0, or `Batch.bootstrap`. `δ_t = r_t + γV_{t'} − V_t`.

By default a completion that the token budget truncated counts as ended: its reward, and nothing after it. That is right where the
budget is part of the task. With `bootstrap` the critic fills `Batch.bootstrap`, for the advantage and for its own targets: V of the
state after the last token where truncated, 0 where ended (partial-episode bootstrapping, Pardo et al. 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Advantage
from policygrad.core.batch import Batch
from policygrad.core.chains import Stage
from policygrad.core.metrics import Max, Mean, Metrics, Min
from policygrad.core.settings import setting


class ValueAdvantage(Advantage):
    """Base of the advantages from a critic's values."""

    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "tokens"
    value_fields: ClassVar[frozenset[str]] = frozenset({"values"})
    """The fields of `Batch` that it needs without `bootstrap`."""
    bootstrap: bool

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.value_fields | {"bootstrap"} if self.bootstrap else self.value_fields

    def describe_bootstrap(self) -> str:
        """Return the suffix of `formula` that tells what follows the last token."""
        return ",  V(end) = V_φ where truncated" if self.bootstrap else ""


@dataclass(frozen=True, eq=False)
class CompactTokens:
    """A batch's sampled tokens moved to the left, so that the next action is in the next column."""

    reward: Tensor  # [B, N] per token, with the terminal reward on the last
    value: Tensor  # [B, N]
    next_value: Tensor  # [B, N] V_{t'} of the next token; after the last, 0 or the bootstrap
    mask: Tensor  # [B, N] bool; columns that hold tokens
    order: Tensor  # [B, T] original position of each column

    @classmethod
    def of(cls, batch: Batch, part: object, bootstrap: bool = False) -> CompactTokens:
        """Compact a batch. Raises ConfigError if it has no values, or no `bootstrap` although `bootstrap` is set."""
        if bootstrap:
            batch.require("bootstrap", part)
        values = masked.apply_mask(batch.require("values", part), batch.mask).to(batch.reward.dtype)
        order = torch.sort((~batch.mask).int(), dim=1, stable=True).indices
        mask = batch.mask.gather(1, order)
        last = mask & (torch.arange(mask.shape[1], device=mask.device) == mask.sum(1, keepdim=True) - 1)
        reward = masked.apply_mask(batch.reward[:, None].expand(mask.shape), last)
        if batch.token_reward is not None:
            reward = reward + masked.apply_mask(batch.token_reward, batch.mask).gather(1, order)
        value = values.gather(1, order)
        after = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
        if batch.bootstrap is not None:
            after = torch.where(last, batch.bootstrap[:, None].to(value.dtype), after)
        return cls(reward, value, after, mask, order)

    def delta(self, gamma: float | Tensor) -> Tensor:
        """Compute δ_t = r_t + γV_{t'} − V_t, [B, N]; γ is a number or [B, N]."""
        return masked.apply_mask(self.reward + gamma * self.next_value - self.value, self.mask)

    def scatter_back(self, x: Tensor) -> Tensor:
        """Move columns back to their positions [B, T]; 0 elsewhere."""
        return torch.zeros_like(x).scatter(1, self.order, masked.apply_mask(x, self.mask))


@dataclass(frozen=True)
class NStep(ValueAdvantage):
    """A_t = Σ_{k<n} γ^k r_{t+k} + γ^n V_{t+n} − V_t. n = 1 is TD(0); n = 0 sums all rewards to the end (Monte Carlo).

    Source: Mnih et al. 2016 (A3C), sec. 4, where k counts the steps after the first: n = k + 1.
    """

    n: int = setting(5, "at least 0", hint="0 is Monte Carlo, the sum of all rewards to the end")
    gamma: float = setting(1.0, "in [0, 1]")
    bootstrap: bool = False
    """Continue a truncated completion with the critic's value of its last state."""

    @property
    def formula(self) -> str:
        if self.n == 0:
            return "Σ_k γ^k r_{t+k} − V_t" + self.describe_bootstrap()
        sums = f"Σ_{{k<{self.n}}} γ^k r_{{t+k}} + γ^{self.n} V_{{t+{self.n}}} − V_t,  γ = {self.gamma:g}"
        return sums + self.describe_bootstrap()

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        p = CompactTokens.of(batch, self, self.bootstrap)
        width, delta = p.mask.shape[1], p.delta(self.gamma)
        if self.n == 0 or self.n >= width:
            return p.scatter_back(masked.reverse_recursion(delta, p.mask, self.gamma))
        padded = torch.cat([delta, delta.new_zeros(len(delta), self.n)], 1)
        total = torch.zeros_like(delta)
        for k in range(self.n):  # intermediate values cancel: Σ_{k<n} γ^k δ_{t+k} is the n-step advantage
            total = total + self.gamma**k * padded[:, k : k + width]
        return p.scatter_back(total)


@dataclass(frozen=True)
class GAE(ValueAdvantage):
    """A_t = Σ_l (γλ)^l δ_{t+l}: the geometric mixture of n-step advantages. Source: Schulman et al. 2016, eq. 16."""

    gamma: float = setting(1.0, "in [0, 1]")
    lam: float = setting(0.95, "in [0, 1]")
    bootstrap: bool = False
    """Continue a truncated completion with the critic's value of its last state."""

    @property
    def formula(self) -> str:
        delta = f"δ_t = r_t + {self.gamma:g}·V_{{t+1}} − V_t"
        return f"Σ_l ({self.gamma:g}·{self.lam:g})^l δ_{{t+l}},  {delta}{self.describe_bootstrap()}"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        p = CompactTokens.of(batch, self, self.bootstrap)
        return p.scatter_back(masked.reverse_recursion(p.delta(self.gamma), p.mask, self.gamma * self.lam))


@dataclass(frozen=True)
class LengthAdaptiveGAE(ValueAdvantage):
    """GAE with λ = max(0, 1 − 1/(α·l)), l the completion's sampled tokens. Source: Yue et al. 2025 (VAPO), sec. 4.2.

    λ is 0 up to l = 1/α tokens (20 at α = 0.05), so short completions need a larger α.
    """

    alpha: float = setting(0.05, "above 0")
    gamma: float = setting(1.0, "in [0, 1]")
    bootstrap: bool = False
    """Continue a truncated completion with the critic's value of its last state."""

    @property
    def formula(self) -> str:
        lam = f"λ = max(0, 1 − 1/({self.alpha:g}·|o|))"
        return f"Σ_l ({self.gamma:g}·λ)^l δ_{{t+l}},  {lam}{self.describe_bootstrap()}"

    def lam(self, batch: Batch) -> Tensor:
        """λ [B]."""
        length = batch.lengths.clamp(min=1).to(batch.reward.dtype)
        return (1 - 1 / (self.alpha * length)).clamp(min=0)

    def report(self, batch: Batch) -> Metrics:
        """lambda/min, /mean and /max over the completions; all 0 if α is too small for their lengths."""
        lam = self.lam(batch)[batch.mask.any(1)].double()
        if not len(lam):
            return {}
        mean = Mean(lam.sum(), float(len(lam)))
        return {"lambda/min": Min(lam.min()), "lambda/max": Max(lam.max()), "lambda/mean": mean}

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        p = CompactTokens.of(batch, self, self.bootstrap)
        return p.scatter_back(masked.reverse_recursion(p.delta(self.gamma), p.mask, self.gamma * self.lam(batch)))


@dataclass(frozen=True)
class Whiten(Advantage):
    """Ψ ← (Ψ − mean)/√(var + eps), ddof 1, over the rollout's sampled tokens; exactly 0 if Ψ is constant.

    Source: Huang et al. 2022 (PPO details), whitening of advantages; verl's `masked_whiten`, eps under the root.
    """

    eps: float = setting(1e-8, "at least 0")
    gives: ClassVar[Stage | None] = "tokens"

    formula = ";  whitened over the rollout"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        centred = psi - masked.mean(psi, batch.mask)
        scale = (masked.std(psi, batch.mask, 1) ** 2 + self.eps).rsqrt()
        return masked.apply_mask(centred * scale, batch.mask & ~masked.is_constant(psi, batch.mask))
