"""Gates that hold the policy near by another measure than the token's ratio: its divergence, its log, a completion's mean.

As in `gates.py`, each knows its `weight` w, 1 at r = 1, and its `value`, whose derivative in log π_θ is w·Ψ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch
from policygrad.core.protocols import Gate
from policygrad.core.ranges import positive
from policygrad.core.ratios import bounded_exp
from policygrad.errors import ConfigError

Divergence = Literal["tv", "kl"]
_NEVER_ZERO = 1e-8
"""Added to 1 − π in the binary KL, as the authors' code has it: a token that is certain has no rest to compare."""


@dataclass(frozen=True)
class GeometricMean(Gate):
    """w = g_i, or 0 for a token whose own log-ratio has left [−low, high] in Ψ's direction; g_i = exp(mean_t ℓ_t), ℓ_t that
    log-ratio, held at the bound it has left.

    The value of a completion is g_i·Ψ: its ratios' geometric mean, each clipped before the mean is taken, where GSPO clips
    after. It is exact where Ψ is one number per completion; a Ψ per token is weighed as GSPO-token weighs it. `low` and `high`
    are nats. Source: Zhao et al. 2025 (GMPO), sec. 3 and 4.
    """

    low: float = 0.4
    high: float = 0.4
    token_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive(self, low=self.low, high=self.high)

    @property
    def formula(self) -> str:
        bounds = f"{self.high:g} where Ψ>0, at −{self.low:g} where Ψ<0, and w = 0 there"
        return f"exp(mean_t ℓ_t), ℓ_t = log r_t held at {bounds}"

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Tokens that move the mean no further: (below, above), both [B, T] bool."""
        change = ratio.log()
        return (psi < 0) & (change < -self.low), (psi > 0) & (change > self.high)

    def _mean(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(g_i at each token, where a token is clipped)."""
        below, above = self.clipped(ratio, psi, batch)
        change = torch.where(below, -self.low, torch.where(above, self.high, ratio.log()))
        mean = ragged.masked(change, batch.mask).sum(1) / batch.lengths.clamp(min=1)
        return bounded_exp(mean)[:, None].expand(ratio.shape), below | above

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        mean, cut = self._mean(ratio, psi, batch)
        return ragged.masked(mean, ~cut)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return self._mean(ratio, psi, batch)[0] * psi


@dataclass(frozen=True)
class DivergenceClip(Gate):
    """w = r, or 0 where π_θ has gone from π_old in Ψ's direction and D(π_old‖π_θ) of the state is above δ.

    D is taken of what the token's own probability shows, a draw of it against all others: the binary total variation
    |π_θ − π_old|, or the binary KL in nats. Both are lower bounds of the vocabulary's. A rare token may multiply, a common one
    may not move far: a bound on the ratio does the opposite. Source: Qi et al. 2026 (DPPO), eq. 13 and 14.
    """

    measure: Divergence = "tv"
    delta: float = 0.15
    """0.15 of total variation; the authors give the binary KL 0.05."""
    token_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.measure not in get_args(Divergence):
            raise ConfigError(
                f"DivergenceClip.measure must be 'tv' (|π_θ − π_old|) or 'kl' (binary, in nats), not {self.measure!r}"
            )
        positive(self, delta=self.delta)
        if self.measure == "tv" and self.delta >= 1:
            raise ConfigError(
                f"DivergenceClip.delta must be below 1 for 'tv', not {self.delta}: no total variation is more"
            )

    @property
    def formula(self) -> str:
        d = "|π_θ − π_old|" if self.measure == "tv" else "binary KL(π_old‖π_θ)"
        return f"r, or 0 where D>{self.delta:g} and Ψ>0, r>1 or Ψ<0, r<1;  D = {d}"

    def divergence(self, ratio: Tensor, batch: Batch) -> Tensor:
        """D [B, T]; 0 where π_old is the policy itself."""
        if batch.logp_old is None:
            return torch.zeros_like(ratio)
        old = ragged.masked(batch.logp_old, batch.mask).to(ratio.dtype)
        now = (old + ratio.log()).clamp(max=0)  # rounding must not make a probability of more than 1
        q, p = old.exp(), now.exp()
        if self.measure == "tv":
            return (p - q).abs()
        return q * (old - now) + (1 - q) * ((1 - q + _NEVER_ZERO) / (1 - p + _NEVER_ZERO)).log()

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where it cuts: (below, above), both [B, T] bool."""
        far = self.divergence(ratio, batch) > self.delta
        return far & (psi < 0) & (ratio < 1), far & (psi > 0) & (ratio > 1)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        below, above = self.clipped(ratio, psi, batch)
        return ragged.masked(ratio, ~(below | above))

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        """M·r·Ψ with the mask M under stop-gradient: a masked token counts 0."""
        return self.weight(ratio, psi, batch) * psi


@dataclass(frozen=True)
class GammaKernel(Gate):
    """w = r^k·e^{λ(1 − r)}, with k and λ of Ψ's sign: largest at r = k/λ, and 0 far away on either side.

    With `SequenceProduct`, the ratio of whole completions, it is VESPO's kernel: what an importance weight becomes when the
    proposal is to stay between the sampler and the policy and the weights' variance is bounded.
    Source: Shen et al. 2026 (VESPO), sec. 3.4.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        positive(self, k_pos=self.k_pos, lambda_pos=self.lambda_pos, k_neg=self.k_neg, lambda_neg=self.lambda_neg)

    @property
    def formula(self) -> str:
        return (
            f"r^k·e^{{λ(1−r)}}, (k, λ) = ({self.k_pos:g}, {self.lambda_pos:g}) where Ψ≥0, ({self.k_neg:g}, {self.lambda_neg:g})"
            " where Ψ<0"
        )

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        def by_sign(up: float, down: float) -> Tensor:
            return torch.where(psi >= 0, ratio.new_tensor(up), ratio.new_tensor(down))

        k, decay = by_sign(self.k_pos, self.k_neg), by_sign(self.lambda_pos, self.lambda_neg)
        return (k * ratio.log() + decay * (1 - ratio)).exp()

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return self.weight(ratio.detach(), psi, batch) * psi * (1 + ratio.log())


@dataclass(frozen=True)
class LogClip(Gate):
    """w = 1, or 0 once r has left [1 − low, 1 + high] in Ψ's direction: Ψ·log π_θ, clipped, and no ratio to multiply with.

    The value is min(Ψ·log r, Ψ·clip(log r, log(1 − low), log(1 + high))) + Ψ. Source: Liu et al. 2025 (CPGD), arXiv:2505.12504.
    """

    low: float = 0.2
    high: float = 0.2

    def __post_init__(self) -> None:
        positive(self, low=self.low, high=self.high)
        if self.low >= 1:
            raise ConfigError(f"LogClip.low must be below 1, not {self.low}: log(1 − low) is the lower bound of log r")

    @property
    def formula(self) -> str:
        return f"1, or 0 where Ψ>0 and r>{1 + self.high:g}, or Ψ<0 and r<{1 - self.low:g}"

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where it cuts: (below, above), both [B, T] bool."""
        return (psi < 0) & (ratio < 1 - self.low), (psi > 0) & (ratio > 1 + self.high)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        below, above = self.clipped(ratio, psi, batch)
        return (~(below | above)).to(ratio.dtype)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        change = ratio.log()
        held = change.clamp(math.log1p(-self.low), math.log1p(self.high))
        return torch.minimum(psi * change, psi * held) + psi
