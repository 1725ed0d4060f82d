"""Score terms k, which multiply ∇log π_θ beside w·Ψ, and loss terms, which have a graph of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.ratios import bounded_exp, bounded_expm1
from policygrad.core.types import Aggregation, Batch, Forward

KLForm = Literal["k2", "k3", "r*k1", "r*k3"]


def log_ratio(logp: Tensor, old: Tensor | None, mask: Tensor) -> Tensor:
    """log(π_θ/π_old) [B, T], without graph; 0 where π_old is the policy itself."""
    logp = ragged.masked(logp.detach(), mask)
    return torch.zeros_like(logp) if old is None else logp - ragged.masked(old, mask)


def required(value: Tensor | None, part: object, name: str) -> Tensor:
    """The batch field `name`, or an error that says which part asked for it."""
    if value is None:
        raise ValueError(
            f"{type(part).__name__} needs Batch.{name}, which is None: fill it (a learner's `score` does), or drop the part"
        )
    return value


@dataclass(frozen=True)
class KLToReference:
    """KL to π_ref in the loss: k = −β·d, with u = log π_θ − log π_ref and r the token ratio.

    form   objective −β·…        d             direction
    k2     u²/2                  u             reverse KL of the state's distribution
    k3     e^{−u} + u − 1        1 − e^{−u}    forward-KL direction on-policy; GRPO as published
    r*k1   r·u                   r(u + 1)      reverse KL, also off-policy
    r*k3   r(e^{−u} + u − 1)     r·u           reverse KL, also off-policy

    k3's ratio is π_ref/π_θ. Source: Schulman 2020 (approximating KL); Shao et al. 2024 (GRPO), eq. 4.

    Raises:
        ValueError: k1 without the ratio, whose expected gradient is zero.
    """

    beta: float = 0.04
    form: KLForm = "k3"
    aggregate: Aggregation | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref"})

    def __post_init__(self) -> None:
        if str(self.form) == "k1":
            raise ValueError(
                "KLToReference(form='k1') does nothing: E[∇log π] = 0, so k1 alone in the loss has zero expected gradient. "
                "Use 'k2', 'k3' or 'r*k1' here, or put k1 in the reward with KLInReward"
            )
        if self.form not in get_args(KLForm):
            raise ValueError(f"KLToReference.form must be one of {', '.join(get_args(KLForm))}, not {self.form!r}")
        if not self.beta >= 0:
            raise ValueError(f"KLToReference.beta must be at least 0, not {self.beta}")

    @property
    def formula(self) -> str:
        d = {"k2": "u", "k3": "(1 − e^{−u})", "r*k1": "r(u + 1)", "r*k3": "r·u"}[self.form]
        return f"−{self.beta:g}·{d},  u = log π_θ − log π_ref"

    def _u_and_r(self, out: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
        reference = ragged.masked(required(batch.logp_ref, self, "logp_ref"), batch.mask)
        u = ragged.masked(out.logp.detach(), batch.mask) - reference
        return u, bounded_exp(log_ratio(out.logp, batch.logp_old, batch.mask))

    def score(self, out: Forward, batch: Batch) -> Tensor:
        u, r = self._u_and_r(out, batch)
        if self.form == "k2":
            return -self.beta * u
        if self.form == "k3":
            return self.beta * bounded_expm1(-u)
        return -self.beta * r * (u + 1 if self.form == "r*k1" else u)

    def value(self, out: Forward, batch: Batch) -> Tensor:
        u, r = self._u_and_r(out, batch)
        k3 = bounded_expm1(-u) + u
        return -self.beta * {"k2": u * u / 2, "k3": k3, "r*k1": r * u, "r*k3": r * k3}[self.form]


@dataclass(frozen=True)
class Entropy:
    """Entropy bonus from the sampled tokens: k = −η·r·log π_θ, whose expectation is η∇H of each state's distribution.

    Differentiating −log π at the sample is not it: that has zero expectation. Source: Williams & Peng 1991.
    """

    eta: float = 0.01
    aggregate: Aggregation | None = None

    @property
    def formula(self) -> str:
        return f"−{self.eta:g}·r·log π_θ"

    def score(self, out: Forward, batch: Batch) -> Tensor:
        r = bounded_exp(log_ratio(out.logp, batch.logp_old, batch.mask))
        return -self.eta * r * ragged.masked(out.logp.detach(), batch.mask)

    def value(self, out: Forward, batch: Batch) -> Tensor:
        return self.score(out, batch)
