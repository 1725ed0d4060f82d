"""Ratios and corrections (lever 2, first half): r from log(π_θ/π_old) [B, T], under stop-gradient.

Exponents are bounded to just under half the dtype's range (±43 nats in float32), so that a weight and the product of two
weights stay finite. No ratio in a healthy run comes near.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Correction, Ratio
from policygrad.core.batch import Batch, Forward
from policygrad.core.settings import choice, setting
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


def _bounded(x: Tensor) -> Tensor:
    bound = 0.49 * math.log(torch.finfo(x.dtype).max)
    return x.clamp(-bound, bound)


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x) with x clipped to just under half the dtype's exponent range, so that the product of two is finite."""
    return _bounded(x).exp()


def bounded_expm1(x: Tensor) -> Tensor:
    """exp(x) − 1 under the same bound, accurate for small x (a KL of 1e-6 nats is about 1e-3 squared)."""
    return _bounded(x).expm1()


UNIT_RATIOS = (
    "with one update per rollout every ratio π_θ/π_old is 1, where all gates are 1. Set --algorithm.update-rule.minibatches (or "
    ".epochs) above 1, or leave it out"
)
"""Why nothing that depends on the ratio alone acts, with the remedy."""


class RatioOfPolicies(Ratio):
    """Base of the ratios here: where π_θ = π_old they are all 1."""

    def find_idle_settings(self, algorithm: Algorithm) -> Mapping[str, str]:
        return {"": UNIT_RATIOS} if algorithm.has_unit_ratios else {}


@dataclass(frozen=True)
class Token(RatioOfPolicies):
    """r_t = π_θ(o_t)/π_old(o_t), per token. Source: Schulman et al. 2017 (PPO), eq. 6."""

    per_token: ClassVar[bool] = True

    formula = "r_t = π_θ(o_t)/π_old(o_t)"

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return bounded_exp(masked.apply_mask(log_ratio, mask))


@dataclass(frozen=True)
class Sequence(RatioOfPolicies):
    """s_i = exp(mean_t log r_t), the geometric mean, for every token of completion i. Source: Zheng et al. 2025 (GSPO), eq. 7."""

    formula = "s_i = exp(mean_t log r_t)"

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        log_ratio = masked.apply_mask(log_ratio, mask)
        mean = log_ratio.sum(1) / mask.sum(1).clamp(min=1)
        return bounded_exp(mean)[:, None].expand(log_ratio.shape)


@dataclass(frozen=True)
class SequenceProduct(RatioOfPolicies):
    """Π_t r_t: the only unbiased ratio, with huge variance. Source: importance sampling of full completions.

    The objective per completion is Π_t r_t·Ψ, and so is its derivative in every log π_θ(o_t). In a sum over tokens each
    therefore holds 1/|o| of the value and the full weight (`joint`).
    """

    joint: ClassVar[bool] = True

    formula = "Π_t r_t"

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        log_ratio = masked.apply_mask(log_ratio, mask)
        return bounded_exp(log_ratio.sum(1))[:, None].expand(log_ratio.shape)


# Corrections for a sampler μ that is not π_old: factors on w from ρ = π_old/μ, per token or per completion (the product).

Level = Literal["token", "sequence"]
SAMPLER_FIELDS = frozenset({"logp_old", "logp_sampler"})
_SMALLEST_MEAN = (
    1e-8  # of weights that are divided by their mean: below it no sample is near the policy, and they stay as they are
)


def sampler_ratio(batch: Batch, part: object, level: Level) -> Tensor:
    """Compute ρ = π_old/μ, [B, T]; at level 'sequence' every token has the product over its completion."""
    # ρ is 1 for demonstrations, which the sampler did not generate.
    gap = masked.apply_mask(batch.require("logp_old", part) - batch.require("logp_sampler", part), batch.policy_tokens)
    return bounded_exp(gap if level == "token" else gap.sum(1, keepdim=True).expand(gap.shape))


@dataclass(frozen=True)
class TruncatedIS(Correction):
    """× min(ρ, cap): bounded, and biased where capped. Source: Ionides 2008; Yao et al. 2025 (off-policy RL with engines).

    With `low` it is max(min(ρ, cap), low), as in OpenRLHF (models/loss.py) and NeMo-RL (loss_functions.py). With `normalise` the
    factors of an update have the mean 1: over its tokens, or over its completions at level 'sequence', as verl's
    rollout_is_batch_normalize does over a rollout (trainer/ppo/rollout_corr_helper.py). At level 'mean' each token has the mean of
    the bounded ρ over its completion's tokens, which says how far the completion is from π_old and not how likely it is: as in the
    code of SDFT (Shenfeld et al. 2026, distil_trainer.py).
    """

    cap: float = setting(2.0, "at least 1", hint="ρ is 1 where sampler and learner agree", unbounded=True)
    level: Literal["token", "sequence", "mean"] = choice(
        token="each its own", sequence="the product over a completion", mean="the mean of its tokens' bounded ρ"
    )
    low: float = setting(0.0, "in [0, 1]", hint="ρ is 1 where sampler and learner agree")
    """Lower bound; 0: none."""
    normalise: bool = False
    """Divide by the update's mean."""
    needs: ClassVar[frozenset[str]] = SAMPLER_FIELDS
    reweights: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        bounded = f"clip(ρ, {self.low:g}, {self.cap:g})" if self.low else f"min(ρ, {self.cap:g})"
        bounded = "ρ" if (self.low, self.cap) == (0, math.inf) else bounded
        over = "tokens" if self.level == "token" else "completions"
        mean = f"/mean over {over}" if self.normalise else ""
        if self.level == "mean":
            return f"× mean_t {bounded}{mean},  ρ = π_old/μ per token"
        return f"× {bounded}{mean},  ρ = π_old/μ per {self.level}"

    def normaliser(self, batch: Batch) -> Tensor | None:
        if not self.normalise:
            return None
        factor, sampled = self._bounded(batch), batch.policy_tokens
        is_sequence = self.level != "token"
        mean = masked.mean(
            factor[:, :1] if is_sequence else factor, sampled.any(1, keepdim=True) if is_sequence else sampled
        )
        return torch.where(mean > _SMALLEST_MEAN, mean, 1)

    def _bounded(self, batch: Batch) -> Tensor:
        if self.level != "mean":
            return sampler_ratio(batch, self, self.level).clamp(self.low, self.cap)
        sampled, factor = batch.policy_tokens, sampler_ratio(batch, self, "token").clamp(self.low, self.cap)
        mean = masked.apply_mask(factor, sampled).sum(1) / sampled.sum(1).clamp(min=1)
        return torch.where(sampled.any(1), mean, 1)[:, None].expand(factor.shape)

    def __call__(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self._bounded(batch)


@dataclass(frozen=True)
class MaskedIS(Correction):
    """× ρ where low ≤ ρ ≤ high, else × 0: no gradient from tokens on which the two engines disagree. Source: IcePop (Ling 2025)."""

    low: float = setting(0.5, "in [0, 1]")
    high: float = setting(5.0, "at least 1", unbounded=True)
    level: Level = choice(token="", sequence="")
    needs: ClassVar[frozenset[str]] = SAMPLER_FIELDS
    reweights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low <= 1 <= self.high:
            raise ConfigError(f"MaskedIS needs 0 ≤ low ≤ 1 ≤ high, not low = {self.low}, high = {self.high}")

    @property
    def formula(self) -> str:
        return f"× ρ if {self.low:g} ≤ ρ ≤ {self.high:g} else 0,  ρ = π_old/μ per {self.level}"

    def __call__(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        rho = sampler_ratio(batch, self, self.level)
        return torch.where((rho >= self.low) & (rho <= self.high), rho, torch.zeros_like(rho))


@dataclass(frozen=True)
class OffPolicySequenceMask(Correction):
    """× 0 for completions with Ψ < 0 whose mean_t log(μ/π_θ) exceeds δ, else × 1; denominators count all tokens.

    μ is the policy that sampled, as the engine reports it, so that the mask sees both an older version of the weights and a
    difference between engines. Failures far from the policy teach little and disturb most; successes are never masked.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, eq. 8 and 9.
    """

    delta: float = setting(0.5, "above 0")
    """δ: mean over a completion's sampled tokens, in nats."""
    needs: ClassVar[frozenset[str]] = frozenset({"logp_sampler"})
    corrects_sampler: ClassVar[bool] = False
    reads_psi: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return f"× 0 where Ψ<0 and mean_t log(μ/π_θ)>{self.delta:g}, else 1"

    def __call__(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        sampled = batch.policy_tokens
        change = masked.apply_mask(batch.require("logp_sampler", self) - out.logp.detach(), sampled)
        far = change.sum(1) / sampled.sum(1).clamp(min=1) > self.delta
        return (~(far[:, None] & (psi < 0))).to(psi.dtype)


# Helpers of the parts that choose among all tokens of an update (`select_tokens`). The choice is made once per update and stored
# in `Batch.selected`, however the update is split. It depends on values only, not on the order of tokens: equal values are
# chosen together, except by `KLCov`, which takes an exact number.

SELECTED = frozenset({"selected"})


def require_policy_output(out: Forward | None, part: object, name: str = "logp") -> Tensor:
    """Return a field of the current policy's forward pass, [B, T]; ConfigError if it is missing."""
    value = None if out is None else getattr(out, name)
    if value is None:
        raise ConfigError(
            f"{type(part).__name__} selects tokens by the current policy's {name}, which the forward pass lacks: give "
            f"`surrogate` a policygrad.Forward with {name} (a learner does)"
        )
    return value  # type: ignore[no-any-return]


def covariance(logp: Tensor, psi: Tensor, mask: Tensor) -> Tensor:
    """(log π_θ − mean log π_θ)(Ψ − mean Ψ) [B, T], means over all tokens: how much each token lowers the entropy.

    Source: Cui et al. 2025, arXiv:2505.22617, sec. 4.
    """
    return masked.apply_mask((logp - masked.mean(logp, mask)) * (psi - masked.mean(psi, mask)), mask)


# Corrections that are masks: they choose which tokens learn, and do not account for a sampler that is not π_old.


@dataclass(frozen=True)
class HighEntropy(Correction):
    """× 1 at the fraction of tokens where the policy's entropy is highest, else × 0; denominators count all tokens.

    of='current' takes the entropy of the policy at each update, which costs a forward pass; of='old' takes that of π_old, from
    the evaluation of the rollout. Source: Wang et al. 2025 (80/20), arXiv:2506.01939, sec. 5.
    """

    fraction: float = setting(0.2, "above 0 and at most 1")
    of: Literal["current", "old"] = choice(current="π_θ at each update", old="π_old")
    corrects_sampler: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return SELECTED | ({"entropy"} if self.of == "old" else frozenset())

    @property
    def forward_needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"entropy"} if self.of == "current" else ())

    @property
    def formula(self) -> str:
        return f"× 1 at the {self.fraction:g} of tokens of highest entropy of {'π_θ' if self.of == 'current' else 'π_old'}, else 0"

    def select_tokens(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        """Select the tokens at or above the entropy quantile 1 − fraction."""
        entropy = batch.require("entropy", self) if self.of == "old" else require_policy_output(out, self, "entropy")
        sampled = entropy[batch.mask]
        if not len(sampled):
            return batch.mask
        return batch.mask & (entropy >= sampled.topk(1 + int(self.fraction * (len(sampled) - 1))).values[-1])

    def __call__(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return batch.require("selected", self).to(psi.dtype)
