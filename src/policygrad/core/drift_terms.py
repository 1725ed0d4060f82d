"""Penalties on the policy's drift from π_old: bounded in their pull, or at a few tokens only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch, Forward
from policygrad.core.protocols import Aggregation, Term
from policygrad.core.ratios import bounded_expm1
from policygrad.core.selection import SELECTED, check_share, chosen, covariance, largest, policy_now
from policygrad.core.terms import log_ratio
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class PolicyDrift(Term):
    """−β·KL(π_old‖π_θ) from the sampled tokens, with a pull that is bounded: k = −β·min(r − 1, cap).

    Up to r = 1 + cap it is `KLToOld`, −β(r − 1 − log r); beyond, the objective goes on with the slope it has there, so that no
    token whose probability has multiplied rules the step. Source: Liu et al. 2025 (CPGD), arXiv:2505.12504.
    """

    beta: float = 0.001
    cap: float = 2.0
    aggregate: Aggregation | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"logp_old"})
    constrains: ClassVar[str | None] = "kl_old"

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ConfigError(f"PolicyDrift.cap must be above 0, not {self.cap}: it bounds r − 1 where r has grown")

    @property
    def formula(self) -> str:
        return f"−{self.beta:g}·min(r − 1, {self.cap:g})"

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        change = log_ratio(out.logp, batch.logp_old, batch.mask)
        return -self.beta * bounded_expm1(change).clamp(max=self.cap)

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        change = log_ratio(out.logp, batch.logp_old, batch.mask)
        bend = math.log1p(self.cap)
        near = change.clamp(max=bend)
        return -self.beta * (bounded_expm1(near) - near + self.cap * (change - near))


Penalty = Literal["abs", "k3"]


@dataclass(frozen=True)
class KLCov(Term):
    """−β·KL(π_old‖π_θ) at the share of tokens of highest covariance of log π_θ with Ψ, and nowhere else.

    form   objective −β·…      k
    abs    |log r|             −β·sign(log r): what the authors ran
    k3     r − 1 − log r       β(1 − r): an estimate of the KL that the paper writes

    Source: Cui et al. 2025 (KL-Cov), arXiv:2505.22617, sec. 4.
    """

    beta: float = 1.0
    share: float = 2e-3
    """Of all tokens of the update; at least one."""
    form: Penalty = "abs"
    aggregate: Aggregation | None = None
    needs: ClassVar[frozenset[str]] = SELECTED | {"logp_old"}
    select_needs: ClassVar[frozenset[str]] = frozenset({"logp"})
    constrains: ClassVar[str | None] = "kl_old"

    def __post_init__(self) -> None:
        check_share(self, self.share)
        if self.form not in get_args(Penalty):
            raise ConfigError(f"KLCov.form must be 'abs' (|log r|) or 'k3' (r − 1 − log r), not {self.form!r}")

    @property
    def formula(self) -> str:
        k = f"−{self.beta:g}·sign(log r)" if self.form == "abs" else f"{self.beta:g}·(1 − r)"
        return f"{k} at the {self.share:g} of tokens of highest cov(log π_θ, Ψ)"

    def select(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        """The tokens that are held; of equal covariances the first, as many tokens are at log π = 0 late in a run."""
        cov = covariance(ragged.masked(policy_now(out, self), batch.mask), psi, batch.mask)
        return largest(cov, batch.mask, max(1, int(self.share * int(batch.mask.sum()))))

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        change = log_ratio(out.logp, batch.logp_old, batch.mask)
        k = -change.sign() if self.form == "abs" else -bounded_expm1(change)
        return self.beta * ragged.masked(k, chosen(batch, self))

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        change = log_ratio(out.logp, batch.logp_old, batch.mask)
        kl = change.abs() if self.form == "abs" else bounded_expm1(change) - change
        return -self.beta * ragged.masked(kl, chosen(batch, self))
