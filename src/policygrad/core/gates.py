"""Gates (lever 2, second half): the weight w(r, Ψ), under stop-gradient. Every gate has w = 1 at r = 1.

A gate has a `weight` w and a `value`, the paper's objective per token, whose derivative in log π_θ is w·Ψ. Where a paper writes
`Ψ log π_θ`, the value is `Ψ(1 + log r)`, which differs by a constant in θ and is Ψ at r = 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.advantages import ClassLabels
from policygrad.core.base import Gate
from policygrad.core.batch import Batch, Forward
from policygrad.core.masked import Groups
from policygrad.core.precision import widen, widest_dtype
from policygrad.core.ratios import (
    SELECTED,
    UNIT_RATIOS,
    Sequence,
    bounded_exp,
    covariance,
    require_policy_output,
)
from policygrad.core.settings import check_setting, choice, setting
from policygrad.core.terms import demonstration_mask, log_ratio
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


class RatioGate(Gate):
    """Base of the gates here, whose w is 1 at r = 1: where all ratios are 1, neither the gate nor its settings act."""

    @property
    def ratio_settings(self) -> tuple[str, ...]:
        """Settings that act through the ratio alone; "" stands for the choice of the gate."""
        return ("", *(f.name for f in fields(self)))  # type: ignore[arg-type]  # its subclasses are dataclasses

    def find_idle_settings(self, algorithm: Algorithm) -> Mapping[str, str]:
        return dict.fromkeys(self.ratio_settings, UNIT_RATIOS) if algorithm.has_unit_ratios else {}


@dataclass(frozen=True)
class UnitWeight(RatioGate):
    """w = 1 for every ratio: the Ψ-weighted likelihood of samples from any policy; on-policy it is REINFORCE.

    Unlike `OnPolicy`, it is meant for several updates per rollout and for stale samples: ∇E_{o∼μ}[Ψ log π_θ(o)] is the gradient of
    its own objective, not an estimate of ∇E_{o∼π_θ}[Ψ]. Source: Arnal et al. 2025 (AsymRE), arXiv:2506.20520.
    """

    reads_ratio: ClassVar[bool] = False
    formula = "1, whatever r"

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return torch.ones_like(ratio)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return psi * (1 + ratio.log())


@dataclass(frozen=True)
class OnPolicy(UnitWeight):
    """w = 1: the score-function estimator, correct only while π_θ = π_old. Source: Williams 1992."""

    on_policy: ClassVar[bool] = True
    formula = "1"


@dataclass(frozen=True)
class Importance(RatioGate):
    """w = r: the surrogate r·Ψ. Source: Schulman et al. 2015 (TRPO), eq. 14."""

    formula = "r"

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return ratio

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return ratio * psi


@dataclass(frozen=True)
class Clip(RatioGate):
    """w = r, or 0 once r has left [1 − low, 1 + high] in the direction that Ψ pushes: min(rΨ, clip(r)Ψ).

    With `c`, the dual clip, w = 0 also where Ψ < 0 and r > c: there the value is max(min(rΨ, clip(r)Ψ), cΨ).
    Source: Schulman et al. 2017 (PPO), eq. 7; for `high` > `low`, clip-higher, Yu et al. 2025 (DAPO), eq. 10; for `c`, Ye et al.
    2020, eq. 5.
    """

    low: float = setting(0.2, "at least 0", unbounded=True)
    high: float = setting(0.2, "at least 0", unbounded=True)
    c: float | None = setting(None, "above 1", hint="it bounds r from above where Ψ < 0", unbounded=True)
    """Bound on r where Ψ < 0 (dual clip); None: no bound."""

    @property
    def formula(self) -> str:
        dual = "" if self.c is None else f", or Ψ<0 and r>{self.c:g}"
        return f"r, or 0 where Ψ>0 and r>{1 + self.high:g}, or Ψ<0 and r<{1 - self.low:g}{dual}"

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        below, above = (psi < 0) & (ratio < 1 - self.low), (psi > 0) & (ratio > 1 + self.high)
        return below, above if self.c is None else above | ((psi < 0) & (ratio > self.c))

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        below, above = self.clipped(ratio, psi, batch)
        return torch.where(below | above, torch.zeros_like(ratio), ratio)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        value = torch.minimum(ratio * psi, ratio.clamp(1 - self.low, 1 + self.high) * psi)
        return value if self.c is None else torch.where(psi < 0, torch.maximum(value, self.c * psi), value)


@dataclass(frozen=True)
class ClippedImportance(RatioGate):
    """w = clip(r, low, high) with **absolute** bounds, not offsets. Every token keeps its gradient; low = 0 means no lower bound.

    Source: MiniMax-M1 2025 (CISPO), eq. 4 and 5.
    """

    low: float = setting(0.0, "at least 0")
    high: float = setting(5.0, "at least 1", unbounded=True)

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high:
            raise ConfigError(
                f"ClippedImportance takes absolute bounds with 0 ≤ low ≤ 1 ≤ high, not low = {self.low}, "
                f"high = {self.high}; an offset ε_high is written high = 1 + ε_high"
            )

    @property
    def formula(self) -> str:
        return f"clip(r, {self.low:g}, {self.high:g})"

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the capped tokens, which keep a gradient that the bound weights."""
        return (psi != 0) & (ratio < self.low), (psi != 0) & (ratio > self.high)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return ratio.clamp(self.low, self.high)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return self.weight(ratio.detach(), psi, batch) * psi * (1 + ratio.log())


@dataclass(frozen=True)
class SigmoidGate(RatioGate):
    """w = 4p(1 − p)r with p = σ(τ(r − 1)), τ = tau_pos where Ψ > 0, else tau_neg: the value is σ(τ(r − 1))·4/τ·Ψ.

    Source: Gao et al. 2025 (SAPO), eq. 5 and 6.
    """

    tau_pos: float = setting(1.0, "above 0")
    tau_neg: float = setting(1.05, "above 0")

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


# A gate for off-policy samples: the importance weight on one side only.


@dataclass(frozen=True)
class TaperedImportance(RatioGate):
    """w = 1 where Ψ ≥ 0 and min(r, 1) where Ψ < 0: imitates successes, and tapers failures as the policy moves away from them.

    The value is Ψ(1 + log r), and Ψr where Ψ < 0 and r ≤ 1. It is bounded above, whereas unweighted failures drive log π to −∞.
    Published with the ratio of full completions (`SequenceProduct`). Source: Le Roux et al. 2025 (TOPR), arXiv:2503.14286, eq. 8.
    """

    formula = "1 where Ψ≥0, min(r, 1) where Ψ<0"

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return torch.where(psi < 0, ratio.clamp(max=1), torch.ones_like(ratio))

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return torch.where((psi < 0) & (ratio <= 1), ratio, 1 + ratio.log()) * psi

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the capped tokens, which keep a gradient of weight 1."""
        return torch.zeros_like(psi, dtype=torch.bool), (psi < 0) & (ratio > 1)


# A gate for batches with demonstrations: it clips sampled tokens and reweights demonstrated ones by π_θ.


@dataclass(frozen=True)
class PolicyShaping(Clip):
    """Clip for sampled tokens; for demonstrations the value f(x)Ψ, f(x) = x/(x + γ), x = π_θ/π_φ, π_φ their author's policy.

    On demonstrations w = γx/(x + γ)²: about x/γ for tokens that π_θ finds unlikely, more than the plain importance weight x, and
    never clipped. An unknown π_φ counts as 1 (`Batch.logp_sampler` is 0). The ratio must be `Token()`.
    Source: Yan et al. 2025 (LUFFY), arXiv:2504.14945, policy shaping.
    """

    gamma: float = setting(0.1, "above 0", hint="at 0, f is 1 for all x")
    requires_token_ratio: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"demonstration", "logp_old", "logp_sampler"})

    @property
    def ratio_settings(self) -> tuple[str, ...]:
        return ("low", "high", "c")

    @property
    def formula(self) -> str:
        return f"{super().formula}; demonstrations: {self.gamma:g}x/(x + {self.gamma:g})², x = π_θ/π_φ"

    def _logit(self, ratio: Tensor, batch: Batch) -> Tensor:
        """log(x/γ); its logistic function is f(x)."""
        old = masked.apply_mask(batch.require("logp_old", self), batch.mask)
        author = masked.apply_mask(batch.require("logp_sampler", self), batch.mask)
        return ratio.log() + (old - author) - math.log(self.gamma)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        clipped, where = super().weight(ratio, psi, batch), demonstration_mask(batch, self)
        if not bool(where.any()):
            return clipped
        z = self._logit(ratio, batch)
        return torch.where(where, torch.sigmoid(z) * torch.sigmoid(-z), clipped)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        clipped, where = super().value(ratio, psi, batch), demonstration_mask(batch, self)
        if not bool(where.any()):
            return clipped
        return torch.where(where, torch.sigmoid(self._logit(ratio, batch)) * psi, clipped)

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the clipped tokens among the sampled ones."""
        (below, above), sampled = super().clipped(ratio, psi, batch), ~demonstration_mask(batch, self)
        return below & sampled, above & sampled


# Gates that bound the policy's change by another measure than a token's ratio: its divergence, its log, a completion's mean.

_SAFE_INFLUENCE = (0.8, 1.0)  # bounds of `FutureKL`'s influence where an unlikely token must not be pushed down further
_EPS = 1e-8  # added to 1 − π in the binary KL, as in the authors' code: 1 − π is 0 for a certain token


@dataclass(frozen=True)
class GeometricMean(RatioGate):
    """w = g_i, or 0 for a token whose log-ratio has left [−low, high] in Ψ's direction. g_i = exp(mean_t ℓ_t), ℓ_t the log-ratios
    clipped at those bounds.

    The value of a completion is g_i·Ψ: the geometric mean of its ratios, each clipped before the mean (GSPO clips after it).
    This is exact if Ψ is one number per completion; a per-token Ψ is weighted as in GSPO-token. `low` and `high` are in nats.
    Source: Zhao et al. 2025 (GMPO), sec. 3 and 4.
    """

    low: float = setting(0.4, "above 0")
    high: float = setting(0.4, "above 0")
    requires_token_ratio: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        bounds = f"{self.high:g} where Ψ>0, at −{self.low:g} where Ψ<0, and w = 0 there"
        return f"exp(mean_t ℓ_t), ℓ_t = log r_t clipped at {bounds}"

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        change = ratio.log()
        return (psi < 0) & (change < -self.low), (psi > 0) & (change > self.high)

    def _mean(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (g_i at each token, clipped tokens)."""
        below, above = self.clipped(ratio, psi, batch)
        change = torch.where(below, -self.low, torch.where(above, self.high, ratio.log()))
        mean = masked.apply_mask(change, batch.mask).sum(1) / batch.lengths.clamp(min=1)
        return bounded_exp(mean)[:, None].expand(ratio.shape), below | above

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        mean, cut = self._mean(ratio, psi, batch)
        return masked.apply_mask(mean, ~cut)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return self._mean(ratio, psi, batch)[0] * psi


@dataclass(frozen=True)
class DivergenceClip(RatioGate):
    """w = r, or 0 where π_θ has moved from π_old in Ψ's direction and the state's D(π_old‖π_θ) exceeds δ.

    D compares the sampled token with all others together: the binary total variation |π_θ − π_old|, or the binary KL in nats,
    both lower bounds of the vocabulary's. A rare token may multiply its probability while a common one may not move far; a bound
    on the ratio does the opposite. Source: Qi et al. 2026 (DPPO), eq. 13 and 14; for `c`, sec. 5.4 and the authors' code in verl,
    verl/trainer/ppo/core_algos.py (`compute_policy_loss_dppo_tv`).
    """

    measure: Literal["tv", "kl"] = choice(tv="|π_θ − π_old|", kl="binary, in nats")
    delta: float = setting(0.15, "above 0")
    """For the total variation; the authors use 0.05 for the binary KL."""
    c: float = setting(math.inf, "above 1", unbounded=True)
    """Largest weight: where r is larger, w = c, for either sign of Ψ. A low one is a bias; inf: none."""
    requires_token_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        possible = self.measure != "tv" or self.delta < 1
        check_setting(self, "delta", possible, "below 1 for 'tv'", "a total variation is at most 1")

    @property
    def formula(self) -> str:
        d = "|π_θ − π_old|" if self.measure == "tv" else "binary KL(π_old‖π_θ)"
        r = "r" if self.c == math.inf else f"min(r, {self.c:g})"
        return f"{r}, or 0 where D>{self.delta:g} and Ψ>0, r>1 or Ψ<0, r<1;  D = {d}"

    def divergence(self, ratio: Tensor, batch: Batch) -> Tensor:
        """Return D [B, T]; 0 where π_old is the policy itself."""
        if batch.logp_old is None:
            return torch.zeros_like(ratio)
        old = masked.apply_mask(batch.logp_old, batch.mask).to(ratio.dtype)
        now = (old + ratio.log()).clamp(max=0)  # rounding must not give a probability above 1
        q, p = old.exp(), now.exp()
        if self.measure == "tv":
            return (p - q).abs()
        return q * (old - now) + (1 - q) * ((1 - q + _EPS) / (1 - p + _EPS)).log()

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        far = self.divergence(ratio, batch) > self.delta
        return far & (psi < 0) & (ratio < 1), far & (psi > 0) & (ratio > 1)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        below, above = self.clipped(ratio, psi, batch)
        return masked.apply_mask(ratio.clamp(max=self.c), ~(below | above))

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        """M·r·Ψ with the mask M under stop-gradient; M·c·(1 + log(r/c))·Ψ where r > c."""
        excess = (ratio / self.c).clamp(min=1).log()
        return self.weight(ratio, psi, batch) * (1 + excess) * psi


@dataclass(frozen=True)
class GammaKernel(RatioGate):
    """w = r^k·e^{λ(1 − r)} with k and λ by the sign of Ψ: largest at r = k/λ, vanishing far from it on either side.

    With `SequenceProduct`, the ratio of full completions, it is VESPO's kernel: the importance weight for a proposal between
    sampler and policy with bounded variance of the weights.
    Source: Shen et al. 2026 (VESPO), sec. 3.4.
    """

    k_pos: float = setting(2.0, "above 0")
    lambda_pos: float = setting(3.0, "above 0")
    k_neg: float = setting(3.0, "above 0")
    lambda_neg: float = setting(2.0, "above 0")

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
class LogClip(RatioGate):
    """w = 1, or 0 once r has left [1 − low, 1 + high] in Ψ's direction: Ψ·log π_θ, clipped, without an importance weight.

    The value is min(Ψ·log r, Ψ·clip(log r, log(1 − low), log(1 + high))) + Ψ. Source: Liu et al. 2025 (CPGD), arXiv:2505.12504.
    """

    low: float = setting(0.2, "between 0 and 1", hint="log(1 − low) is the lower bound of log r")
    high: float = setting(0.2, "above 0")

    @property
    def formula(self) -> str:
        return f"1, or 0 where Ψ>0 and r>{1 + self.high:g}, or Ψ<0 and r<{1 - self.low:g}"

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return (psi < 0) & (ratio < 1 - self.low), (psi > 0) & (ratio > 1 + self.high)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        below, above = self.clipped(ratio, psi, batch)
        return (~(below | above)).to(ratio.dtype)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        change = ratio.log()
        return torch.minimum(psi * change, psi * change.clamp(math.log1p(-self.low), math.log1p(self.high))) + psi


@dataclass(frozen=True)
class FutureKL(Clip):
    """Clip times f, the influence of a token on what follows: f_t = clip(exp(Σ_{s≥t} γ^{s−t} log r_s), f_low, f_high).

    Tokens with r > c, the dual clip's bound, are left out of the sum. Its half-life is `half_life` positions, γ = 2^(−1/half_life),
    those of the environment's tokens included. Where Ψ < 0 and r exceeds `safe_ratio`, f is at most 1 and at least 0.8. f is under
    stop-gradient. A completion with more than `max_bounded` tokens at the dual clip's bound has weight 0 everywhere.
    Source: Ma et al. 2026 (FIPO), arXiv:2603.19835, and the authors' code, verl/trainer/ppo/core_algos.py
    (`compute_policy_loss_future_kl`), with the settings of recipe/fipo/run_fipo_qwen2.5_32b.sh.
    """

    c: float | None = setting(10.0, "above 1", hint="it bounds r from above where Ψ < 0", unbounded=True)
    half_life: float = setting(32.0, "above 0")
    """Positions after which a later token's change counts half."""
    f_low: float = setting(1.0, "in [0, 1]")
    f_high: float = setting(1.2, "at least 1")
    safe_ratio: float = setting(10.0, "at least 1")
    """Ratio above which tokens with Ψ < 0 are not amplified."""
    max_bounded: int = setting(1, "at least 0")
    """Tokens with Ψ < 0 and r > c that a completion may have before it is left out."""
    requires_token_ratio: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        influence = f"clip(exp(Σ_{{s≥t}} 2^{{−(s−t)/{self.half_life:g}}} log r_s), {self.f_low:g}, {self.f_high:g})"
        return f"({super().formula}) × f_t,  f_t = {influence},  in [0.8, 1] where Ψ<0 and r>{self.safe_ratio:g}" + (
            ""
            if self.c is None
            else f";  0 in a completion with more than {self.max_bounded} tokens where Ψ<0 and r>{self.c:g}"
        )

    def _influence(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        counted = batch.mask if self.c is None else batch.mask & (ratio <= self.c)
        change = masked.apply_mask(ratio.detach().log(), counted)
        positions = torch.ones_like(batch.mask)
        future = masked.discounted_reverse_cumsum(change, positions, 2 ** (-1 / self.half_life))
        influence = bounded_exp(future).clamp(self.f_low, self.f_high)
        influence = torch.where((psi < 0) & (ratio > self.safe_ratio), influence.clamp(*_SAFE_INFLUENCE), influence)
        if self.c is None:
            return influence
        bounded = ((psi < 0) & (ratio > self.c) & batch.mask).sum(1, keepdim=True)
        return torch.where(bounded > self.max_bounded, 0.0, influence)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return self._influence(ratio, psi, batch) * super().weight(ratio, psi, batch)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return self._influence(ratio, psi, batch) * super().value(ratio, psi, batch)


# Gates that weigh a completion among those of its group.


@dataclass(frozen=True)
class ClassificationWeight(RatioGate):
    """w = (1 + n)·e^{−s/τ}/(1 + Σ_j e^{−s_j/τ}) where Ψ > 0, with s = log r; e^{s/τ} where Ψ < 0. j runs over the n samples of the
    group with the same sign.

    Bounded, and largest for the samples that are classified worst: successes that have become less likely, failures that have
    become more likely. The 1 is an anchor logit of 0. With the ratio of `Sequence` and Ψ of `ClassLabels`, the objective is −τ
    times log(1 + Σ_+ e^{−s/τ}) + log(1 + Σ_− e^{s/τ}) per prompt. Source: Zhai et al. 2026 (REAL), arXiv:2602.05630.
    """

    tau: float = setting(0.5, "above 0")
    """τ: temperature of the logits s/τ."""
    requires_full_groups: ClassVar[bool] = True

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        links, ratio = algorithm.advantage, algorithm.ratio
        if not links or not all(isinstance(link, ClassLabels) for link in links):
            chain = ", ".join(type(link).__name__ for link in links) or "empty"
            yield f"ClassificationWeight classifies samples by a label, and advantage is {chain}: set advantage=(ClassLabels(),)"
        if ratio is not None and not isinstance(ratio, Sequence):
            name = type(ratio).__name__
            yield f"ClassificationWeight takes a completion's mean log-ratio, and ratio is {name}: set ratio=Sequence()"

    @property
    def formula(self) -> str:
        return f"(1 + n)·e^{{∓s/τ}}/(1 + Σ_j e^{{∓s_j/τ}}),  s = log r, τ = {self.tau:g}, j of Ψ's sign"

    def _classify(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits −s/τ or s/τ, log(1 + Σ_j e^{logit_j}), and n, each [B, 1]."""
        sign = masked.first_valid(psi, batch.mask).sign()
        logit = -sign * masked.first_valid(ratio.log(), batch.mask) / self.tau
        normaliser, number = torch.zeros_like(logit), torch.zeros_like(logit)
        for side in (1, -1):
            same = sign == side
            groups = Groups(batch.group, same)
            largest = groups.max(logit).clamp(min=0)
            total = torch.exp(-largest) + groups.sum(torch.exp(logit - largest))
            normaliser = torch.where(same, largest + total.log(), normaliser)
            number = torch.where(same, groups.size.to(logit.dtype), number)
        return logit[:, None], normaliser[:, None], number[:, None]

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        logit, normaliser, number = self._classify(ratio, psi, batch)
        return ((1 + number) * torch.exp(logit - normaliser)).expand(ratio.shape)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        """The group's −τ·log(1 + Σ_j …), shared equally by its n samples of one sign, in units of |Ψ|/(1 + n)."""
        _, normaliser, number = self._classify(ratio, psi, batch)
        return -self.tau * psi.abs() * normaliser * (1 + number) / number.clamp(min=1)


# Gates that drop some of an update's tokens, chosen among all of them (`select_tokens`).


@dataclass(frozen=True)
class SecondMomentFilter(RatioGate):
    """w = r, or 0 for the fewest tokens whose removal brings the mean of (log r)² down to τ.

    Only tokens whose ratio moved as Ψ pushes (Ψ > 0 and r > 1, or Ψ < 0 and r < 1) count in that mean and can be dropped, the
    furthest first. Nothing else is clipped. Source: Zheng et al. 2025 (M2PO), arXiv:2510.01161, algorithm 1.
    """

    threshold: float = setting(0.04, "at least 0")
    """τ, nats²."""
    requires_token_ratio: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = SELECTED
    forward_needs: ClassVar[frozenset[str]] = frozenset({"logp"})

    @property
    def formula(self) -> str:
        return (
            f"r, or 0 for the fewest tokens with mean (log r)² ≤ {self.threshold:g} over the others that moved with Ψ"
        )

    def select_tokens(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        """Choose the dropped tokens."""
        change = widen(log_ratio(require_policy_output(out, self), batch.logp_old, batch.mask))
        pushed = batch.mask & (((psi > 0) & (change > 0)) | ((psi < 0) & (change < 0)))
        square = change**2
        ordered = square[pushed].sort().values
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
        beyond = ordered[means > self.threshold]  # the means grow, so that these are the largest
        return pushed & (square >= beyond[0]) if len(beyond) else torch.zeros_like(pushed)

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        cut = batch.require("selected", self)
        return cut & (psi < 0), cut & (psi > 0)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return masked.apply_mask(ratio, ~batch.require("selected", self))

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return self.weight(ratio, psi, batch) * psi


@dataclass(frozen=True)
class ClipCov(RatioGate):
    """`Clip`, with w = 0 also for a small fraction of the tokens whose covariance of log π_θ with Ψ is in (cov_low, cov_high).

    The authors sample that fraction at random from the band. Here it is spaced evenly in order of covariance, which gives the same
    result for any order of tokens, any split, and in a resumed run.
    Source: Cui et al. 2025 (Clip-Cov), arXiv:2505.22617, sec. 4.
    """

    low: float = setting(1.0, "at least 0", unbounded=True)
    """As published, the ratio is not clipped from below: 1 − low = 0."""
    high: float = setting(1.0, "at least 0", unbounded=True)
    fraction: float = setting(2e-4, "above 0 and at most 1")
    """Fraction of all tokens of the update; at least one token, if the band is not empty."""
    cov_low: float = setting(1.0, "a number", unbounded=True)
    cov_high: float = setting(5.0, "a number", unbounded=True)
    requires_token_ratio: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = SELECTED
    forward_needs: ClassVar[frozenset[str]] = frozenset({"logp"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting(self, "cov_low", self.cov_low < self.cov_high, f"below ClipCov.cov_high = {self.cov_high}")

    @property
    def ratio_settings(self) -> tuple[str, ...]:
        return ("low", "high")

    @property
    def formula(self) -> str:
        band = f"{self.cov_low:g}<cov(log π_θ, Ψ)<{self.cov_high:g}"
        return f"{self._clip.formula}, or at {self.fraction:g} of all tokens, some of those with {band}"

    @property
    def _clip(self) -> Clip:
        return Clip(self.low, self.high)

    def select_tokens(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        """Choose the dropped tokens among those that the ratio does not already clip."""
        logp = masked.apply_mask(require_policy_output(out, self), batch.mask)
        ratio = bounded_exp(log_ratio(logp, batch.logp_old, batch.mask))
        below, above = self._clip.clipped(ratio, psi, batch)
        cov = covariance(logp, psi, batch.mask)
        band = batch.mask & (cov > self.cov_low) & (cov < self.cov_high) & ~(below | above)
        ordered, count = cov[band].sort().values, max(1, int(self.fraction * int(batch.mask.sum())))
        ranks = torch.arange(min(count, len(ordered)), device=cov.device, dtype=widest_dtype(cov.device)) + 0.5
        sampled = ordered[(ranks * (len(ordered) / max(1, len(ranks)))).long()]
        return band & torch.isin(cov, sampled)

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        below, above = self._clip.clipped(ratio, psi, batch)
        cut = batch.require("selected", self)
        return below | (cut & (psi < 0)), above | (cut & (psi > 0))

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return masked.apply_mask(self._clip.weight(ratio, psi, batch), ~batch.require("selected", self))

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return masked.apply_mask(self._clip.value(ratio, psi, batch), ~batch.require("selected", self))
