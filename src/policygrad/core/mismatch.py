"""A mask by how far a token or completion is from the policy that sampled it: kept or dropped, without a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Correction
from policygrad.core.batch import Batch, Forward
from policygrad.core.metrics import Metrics, masked_mean
from policygrad.core.precision import widen
from policygrad.core.ratios import SAMPLER_FIELDS, bounded_exp, bounded_expm1
from policygrad.core.settings import acts_with, check_setting, choice, setting

_MEASURES = {
    "ratio": "ρ",
    "k2": "(log ρ)²/2",
    "k3": "ρ − 1 − log ρ",
    "tv": "|π − μ|",
}


@dataclass(frozen=True)
class MismatchMask(Correction):
    """× 1 where the policy is within bounds of μ, which sampled, else × 0: samples from too far away are rejected, none reweighted.

    measure   of a token        bounds
    ratio     ρ = π/μ           low ≤ ρ ≤ high; low None: 1/high
    k2        (log ρ)²/2        at most high
    k3        ρ − 1 − log ρ     at most high: its mean estimates KL(μ‖π)
    tv        |π − μ|           at most high

    level='mean' rejects a completion by the mean over its sampled tokens, of ρ the geometric one; 'sum' by the sum, of ρ the
    product; 'any' if one of its tokens is out of bounds; 'token' rejects tokens. of='old' takes π_old for π. of='current' takes
    π_θ at each update, a window that holds through several updates, also with old_policy='sampler'. Add `TruncatedIS` to weigh what
    is kept: with an unbounded cap that is OpenRLHF's seq-mask-tis.

    denominators='all' counts rejected tokens too, so that the step becomes smaller, as in SkyRL, OpenRLHF and NeMo-RL; 'kept'
    leaves them out of every average, also of the terms, as in verl. Their rewards count in the statistics either way.
    Source: Liu et al. 2025 (When Speed Kills Stability), richardli.xyz/rl-collapse; verl, trainer/ppo/rollout_corr_helper.py
    (`compute_rollout_rejection_mask`, whose k1 bounds 1/ρ); SkyRL, off_policy_correction_utils.py (`compute_sequence_mask`,
    `compute_outlier_token_mask`, `compute_token_mask`); for of='current' and tv, prime-rl, trainer/rl/loss.py (`ipo_loss_fn`).
    """

    measure: Literal["ratio", "k2", "k3", "tv"] = choice(
        ratio="ρ = π/μ", k2="(log ρ)²/2", k3="ρ − 1 − log ρ", tv="|π − μ|"
    )
    level: Literal["mean", "sum", "any", "token"] = choice(
        mean="over a completion's tokens", sum="of them", any="one token out of bounds", token="each by itself"
    )
    high: float = setting(1.01, "above 0", unbounded=True)
    low: float | None = acts_with(setting(None, "in [0, 1]"), measure="ratio")
    """Lower bound of ρ; None: 1/high. 0: none."""
    of: Literal["old", "current"] = choice(old="π_old", current="π_θ at each update")
    denominators: Literal["all", "kept"] = choice(all="of all tokens", kept="of those that are kept")

    def __post_init__(self) -> None:
        super().__post_init__()
        is_ratio = self.measure == "ratio"
        check_setting(
            self, "low", self.low is None or is_ratio, f"None with '{self.measure}'", "it is at least 0, and 0 at π = μ"
        )
        check_setting(self, "high", self.high >= 1 or not is_ratio, "at least 1 with 'ratio'", "ρ is 1 at π = μ")
        check_setting(
            self,
            "denominators",
            self.denominators == "all" or self.of == "old",
            "'all' with of='current'",
            "π_θ is not known when an update's denominators are counted",
        )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return SAMPLER_FIELDS if self.of == "old" else frozenset({"logp_sampler"})

    @property
    def corrects_sampler(self) -> bool:  # type: ignore[override]
        """A bound on π_old/μ is what the user has chosen for stale samples instead of weights."""
        return self.of == "old"

    @property
    def formula(self) -> str:
        x, low, high = _MEASURES[self.measure], self._low, f"{self.high:.4g}"
        if self.measure == "ratio":
            x = {"mean": "exp(mean_t log ρ)", "sum": "Π_t ρ", "any": "every ρ", "token": "ρ"}[self.level]
        elif self.level != "token":
            x = f"{'max' if self.level == 'any' else self.level}_t {x if self.measure == 'tv' else f'({x})'}"
        bounds = f"{low:.4g} ≤ {x} ≤ {high}" if low else f"{x} ≤ {high}"
        policy = "π_old" if self.of == "old" else "π_θ"
        what = f"π = {policy}" if self.measure == "tv" else f"ρ = {policy}/μ"
        return f"× 1 if {bounds}, else 0{', not counted' if self.denominators == 'kept' else ''};  {what}"

    @property
    def _low(self) -> float:
        """The lower bound of ρ."""
        return 0.0 if self.measure != "ratio" else 1 / self.high if self.low is None else self.low

    def keeps(self, logp: Tensor, batch: Batch) -> Tensor:
        """Return the tokens that are kept, [B, T] bool; those that μ did not sample always are."""
        sampled = batch.policy_tokens
        mu = masked.apply_mask(batch.require("logp_sampler", self), sampled)
        change = masked.apply_mask(logp, sampled) - mu
        if self.measure == "ratio" and self.level in ("mean", "sum"):
            total = change.sum(1, keepdim=True)
            count = sampled.sum(1, keepdim=True).clamp(min=1) if self.level == "mean" else 1
            return self._is_within(bounded_exp(total / count)).expand(sampled.shape) | ~sampled
        if self.measure == "tv":
            x = masked.apply_mask((mu + change).exp() - mu.exp(), sampled).abs()
        elif self.measure == "k2":
            x = change**2 / 2
        else:
            x = bounded_exp(change) if self.measure == "ratio" else bounded_expm1(change) - change
        if self.level in ("token", "any"):
            passes = self._is_within(x) | ~sampled
            return passes if self.level == "token" else passes.all(1, keepdim=True).expand(passes.shape) | ~sampled
        total = masked.apply_mask(x, sampled).sum(1, keepdim=True)
        count = sampled.sum(1, keepdim=True).clamp(min=1) if self.level == "mean" else 1
        return self._is_within(total / count).expand(sampled.shape) | ~sampled

    def _is_within(self, x: Tensor) -> Tensor:
        return (x >= self._low) & (x <= self.high)

    def counted_tokens(self, batch: Batch) -> Tensor | None:
        return self.keeps(batch.require("logp_old", self), batch) if self.denominators == "kept" else None

    def report(self, batch: Batch) -> Metrics:
        """mismatch/rejected: fraction of the sampled tokens that are rejected."""
        if self.of == "current" or batch.logp_old is None or batch.logp_sampler is None:
            return {}
        return {"mismatch/rejected": masked_mean(widen(~self.keeps(batch.logp_old, batch)), batch.policy_tokens)}

    def __call__(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        logp = batch.require("logp_old", self) if self.of == "old" else out.logp.detach()
        return self.keeps(logp, batch).to(psi.dtype)
