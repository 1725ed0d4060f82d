"""LEVER 2, first half: the importance ratio r from per-token log-ratios log(π_θ/π_old) [B, T], under stop-gradient.

Exponents are bounded to a little under half the range of the dtype (±43 nats in float32), so that a weight and its
product with another stay finite; no ratio a run can survive comes near.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Correction, Ratio
from policygrad.core.batch import Batch, Forward, require_field
from policygrad.errors import ConfigError


def _bounded(x: Tensor) -> Tensor:
    bound = 0.49 * math.log(torch.finfo(x.dtype).max)
    return x.clamp(-bound, bound)


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x) with x clipped to just under half the dtype's exponent range: finite, and so is the product of two of them."""
    return _bounded(x).exp()


def bounded_expm1(x: Tensor) -> Tensor:
    """exp(x) − 1 under the same bound, exact also where x is small (a KL of 1e-6 nats is a square of 1e-3)."""
    return _bounded(x).expm1()


@dataclass(frozen=True)
class Token(Ratio):
    """r_t = π_θ(o_t)/π_old(o_t), token by token. Source: Schulman et al. 2017 (PPO), eq. 6."""

    @property
    def formula(self) -> str:
        return "r_t = π_θ(o_t)/π_old(o_t)"

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return bounded_exp(masked.apply_mask(log_ratio, mask))


@dataclass(frozen=True)
class Sequence(Ratio):
    """s_i = exp(mean_t log r_t), the geometric mean, for every token of completion i. Source: Zheng et al. 2025 (GSPO), eq. 7."""

    @property
    def formula(self) -> str:
        return "s_i = exp(mean_t log r_t)"

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        log_ratio = masked.apply_mask(log_ratio, mask)
        mean = log_ratio.sum(1) / mask.sum(1).clamp(min=1)
        return bounded_exp(mean)[:, None].expand(log_ratio.shape)


@dataclass(frozen=True)
class SequenceProduct(Ratio):
    """Π_t r_t: the only unbiased ratio, of huge variance; for study. Source: importance sampling of whole completions.

    The objective per completion is Π_t r_t·Ψ, whose derivative in every log π_θ(o_t) is Π_t r_t·Ψ itself: in sums over
    tokens each holds 1/|o| of the value and the whole of the weight (`joint`).
    """

    joint: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return "Π_t r_t"

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        log_ratio = masked.apply_mask(log_ratio, mask)
        return bounded_exp(log_ratio.sum(1))[:, None].expand(log_ratio.shape)


# Corrections for a sampler μ that is not π_old: factors on w from ρ = π_old/μ, per token or per completion (the product).

Level = Literal["token", "sequence"]
SAMPLER_FIELDS = frozenset({"logp_old", "logp_sampler"})


def sampler_ratio(batch: Batch, part: object, level: Level) -> Tensor:
    """ρ [B, T]; at level 'sequence' the product over the completion, at each of its tokens."""
    old, sampled = (
        require_field(batch.logp_old, part, "logp_old"),
        require_field(batch.logp_sampler, part, "logp_sampler"),
    )
    gap = masked.apply_mask(old - sampled, batch.policy_tokens)  # what others wrote no sampler of ours drew: ρ = 1
    return bounded_exp(gap if level == "token" else gap.sum(1, keepdim=True).expand(gap.shape))


def _check(part: object, level: str) -> None:
    if level not in ("token", "sequence"):
        raise ConfigError(f"{type(part).__name__}.level must be 'token' or 'sequence', not {level!r}")


@dataclass(frozen=True)
class TruncatedIS(Correction):
    """× min(ρ, cap): bounded, biased where it caps. Source: Ionides 2008; Yao et al. 2025 (off-policy RL with rollout engines)."""

    cap: float = 2.0
    level: Level = "token"
    needs: ClassVar[frozenset[str]] = SAMPLER_FIELDS

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
    needs: ClassVar[frozenset[str]] = SAMPLER_FIELDS

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


# Choosing among all tokens of an update: what the parts with a `select` have in common.
#
# `select` is asked once per update, under the policy as it is then, and what it says is `Batch.selected`, whatever the update is
# split into. A choice depends on numbers alone, never on the order of the tokens: what is equal is chosen together,
# except by `largest`, which takes an exact number.

SELECTED = frozenset({"selected"})


def check_fraction(part: object, fraction: float) -> None:
    """Raises ConfigError unless it is a share of something."""
    if not 0 < fraction <= 1:
        raise ConfigError(
            f"{type(part).__name__}.share must be above 0 and at most 1, not {fraction}: a share of the tokens"
        )


def selected_tokens(batch: Batch, part: object) -> Tensor:
    """[B, T] bool; what `part` has selected."""
    return require_field(batch.selected, part, "selected")


def require_policy_output(out: Forward | None, part: object, name: str = "logp") -> Tensor:
    """A field of the policy's forward pass as it is now [B, T]."""
    value = None if out is None else getattr(out, name)
    if value is None:
        raise ConfigError(
            f"{type(part).__name__} chooses by the {name} of the policy as it is now, and the forward pass has none: give "
            f"`surrogate` a policygrad.Forward with {name} (a learner does)"
        )
    return value  # type: ignore[no-any-return]


def top_k_mask(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """[B, T] bool; the `count` largest of x on the mask, and what equals the least of them."""
    if not bool(mask.any()):
        return mask
    return mask & (x >= x[mask].topk(min(count, int(mask.sum()))).values[-1])


def exact_top_k_mask(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """Choose exactly `count` of the largest x on the mask, or all of it where it has fewer: [B, T] bool. Of equals, the first."""
    order = x[mask].sort(descending=True, stable=True).indices
    among = torch.zeros_like(x[mask], dtype=torch.bool)
    among[order[:count]] = True
    return torch.zeros_like(mask).masked_scatter(mask, among)


def covariance(logp: Tensor, psi: Tensor, mask: Tensor) -> Tensor:
    """(log π_θ − mean log π_θ)(Ψ − mean Ψ) [B, T], means over all tokens: by how much each makes the entropy fall.

    Source: Cui et al. 2025, arXiv:2505.22617, sec. 4.
    """
    return masked.apply_mask((logp - masked.mean(logp, mask)) * (psi - masked.mean(psi, mask)), mask)


# Corrections that are masks: which tokens learn. They say nothing of a sampler that is not π_old.


@dataclass(frozen=True)
class HighEntropy(Correction):
    """× 1 at the share of tokens where the policy's entropy is highest, × 0 at all others; denominators stay those of all.

    The entropies are those of the policy as it is at each update, which costs a forward pass; of='old' takes those of π_old,
    from when the rollout was evaluated. Source: Wang et al. 2025 (80/20), arXiv:2506.01939, sec. 5.
    """

    fraction: float = 0.2
    of: Literal["current", "old"] = "current"
    corrects_sampler: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fraction(self, self.fraction)
        if self.of not in ("current", "old"):
            raise ConfigError(
                f"HighEntropy.of must be 'current' (π_θ at each update) or 'old' (π_old), not {self.of!r}"
            )

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
        """The tokens that learn: those at or above the quantile 1 − share."""
        entropy = (
            require_field(batch.entropy, self, "entropy")
            if self.of == "old"
            else require_policy_output(out, self, "entropy")
        )
        return top_k_mask(entropy, batch.mask, 1 + int(self.fraction * (int(batch.mask.sum()) - 1)))

    def __call__(self, batch: Batch, psi: Tensor) -> Tensor:
        return selected_tokens(batch, self).to(psi.dtype)
