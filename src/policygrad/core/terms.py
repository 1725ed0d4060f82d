"""Score terms k, which multiply ∇log π_θ beside w·Ψ. Terms with a graph of their own are in `loss_terms.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from policygrad.core import controllers, ragged
from policygrad.core.aggregates import TokenMean
from policygrad.core.batch import Batch, Forward, required
from policygrad.core.controllers import AdaptiveBeta, Rule, adapted
from policygrad.core.metrics import Metric
from policygrad.core.protocols import Aggregation, State, Term
from policygrad.core.ratios import bounded_exp, bounded_expm1
from policygrad.errors import ConfigError

KLForm = Literal["k2", "k3", "r*k1", "r*k3"]


def log_ratio(logp: Tensor, old: Tensor | None, mask: Tensor) -> Tensor:
    """log(π_θ/π_old) [B, T], without graph; 0 where π_old is the policy itself."""
    logp = ragged.masked(logp.detach(), mask)
    return torch.zeros_like(logp) if old is None else logp - ragged.masked(old, mask)


@dataclass(frozen=True)
class KLToReference(AdaptiveBeta, Term):
    """KL to π_ref in the loss: k = −β·d, with u = log π_θ − log π_ref and r the token ratio.

    form   objective −β·…        d             direction
    k2     u²/2                  u             reverse KL of the state's distribution
    k3     e^{−u} + u − 1        1 − e^{−u}    forward-KL direction on-policy; GRPO as published
    r*k1   r·u                   r(u + 1)      reverse KL, also off-policy
    r*k3   r(e^{−u} + u − 1)     r·u           reverse KL, also off-policy

    k3's ratio is π_ref/π_θ. Source: Schulman 2020 (approximating KL); Shao et al. 2024 (GRPO), eq. 4.

    Raises:
        ConfigError: k1 without the ratio, whose expected gradient is zero; a rule without a target.
    """

    beta: float = 0.04
    form: KLForm = "k3"
    target: float | None = None
    """Nats a sampled token: β is adapted after each rollout so that its `kl` (r·k3, the mean over its updates) stays near."""
    rule: Rule | None = None
    """How β adapts to the target; proportional where it is left open."""
    aggregate: Aggregation | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref"})

    def __post_init__(self) -> None:
        if str(self.form) == "k1":
            raise ConfigError(
                "KLToReference(form='k1') does nothing: E[∇log π] = 0, so k1 alone in the loss has zero expected gradient. "
                "Use 'k2', 'k3' or 'r*k1' here, or put k1 in the reward with KLInReward"
            )
        if self.form not in get_args(KLForm):
            raise ConfigError(f"KLToReference.form must be one of {', '.join(get_args(KLForm))}, not {self.form!r}")
        controllers.check(self)

    @property
    def formula(self) -> str:
        d = {"k2": "u", "k3": "(1 − e^{−u})", "r*k1": "r(u + 1)", "r*k3": "r·u"}[self.form]
        return f"−{self.beta:g}·{d},  u = log π_θ − log π_ref{controllers.told(self)}"

    def update(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """By the KL that the rollout's updates measured (`kl`)."""
        return adapted(self, state["beta"], metrics["kl"].value, "proportional") if "kl" in metrics else state

    def _u_and_r(self, out: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
        reference = ragged.masked(required(batch.logp_ref, self, "logp_ref"), batch.mask)
        u = ragged.masked(out.logp.detach(), batch.mask) - reference
        return u, bounded_exp(log_ratio(out.logp, batch.logp_old, batch.mask))

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        u, r = self._u_and_r(out, batch)
        if self.form == "k2":
            return -self.beta * u
        if self.form == "k3":
            return self.beta * bounded_expm1(-u)
        return -self.beta * r * (u + 1 if self.form == "r*k1" else u)

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        u, r = self._u_and_r(out, batch)
        k3 = bounded_expm1(-u) + u
        return -self.beta * {"k2": u * u / 2, "k3": k3, "r*k1": r * u, "r*k3": r * k3}[self.form]


@dataclass(frozen=True)
class Entropy(Term):
    """Entropy bonus from the sampled tokens: k = −η·r·log π_θ, whose expectation is η∇H of each state's distribution.

    Differentiating −log π at the sample is not it: that has zero expectation. `ExactEntropy` needs no sampling, and a pass
    over the vocabulary. Source: Williams & Peng 1991.
    """

    eta: float = 0.01
    aggregate: Aggregation | None = None

    @property
    def formula(self) -> str:
        return f"−{self.eta:g}·r·log π_θ"

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        r = bounded_exp(log_ratio(out.logp, batch.logp_old, batch.mask))
        return -self.eta * r * ragged.masked(out.logp.detach(), batch.mask)

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.score(out, batch, psi)


@dataclass(frozen=True)
class KLToOld(AdaptiveBeta, Term):
    """−β·KL(π_old‖π_θ) from the sampled tokens: k = β(1 − r), the derivative of −β(r − 1 − log r).

    `ExactKLToOld` takes it over the whole vocabulary. Source: Schulman et al. 2017 (PPO), eq. 8 and sec. 4.
    """

    beta: float = 1.0
    target: float | None = None
    """Nats a sampled token: β is adapted after each rollout so that the KL its updates end at stays near."""
    rule: Rule | None = None
    """How β adapts to the target; doubling where it is left open."""
    aggregate: Aggregation | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"logp_old"})
    constrains: ClassVar[str | None] = "kl_old"

    def __post_init__(self) -> None:
        controllers.check(self)

    @property
    def formula(self) -> str:
        return f"{self.beta:g}·(1 − r){controllers.told(self)}"

    def update(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """By the KL at which the updates ended (`kl_old/last`)."""
        return after_updates(self, state, metrics)

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return -self.beta * bounded_expm1(log_ratio(out.logp, batch.logp_old, batch.mask))

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        change = log_ratio(out.logp, batch.logp_old, batch.mask)
        return -self.beta * (bounded_expm1(change) - change)


def after_updates(part: AdaptiveBeta, state: State, metrics: Mapping[str, Metric]) -> State:
    """The next β of a penalty on KL(π_old‖π_θ): from the β of a rollout's last round, where an update rule reports one, by the
    KL at which the updates ended."""
    if "kl_old/last" not in metrics:
        return state
    used = metrics.get(f"{controllers.metric_name(part)}/last")
    return adapted(part, state["beta"] if used is None else used.value, metrics["kl_old/last"].value, "doubling")


@dataclass(frozen=True)
class PositiveNLL(Term):
    """μ·log π_θ on the tokens of correct completions (reward ≥ threshold), c = 1/Σ of those tokens.

    Source: Yue et al. 2025 (VAPO), sec. 4.3.
    """

    mu: float = 0.1
    threshold: float = 1.0
    aggregate: Aggregation | None = field(default_factory=TokenMean)

    @property
    def formula(self) -> str:
        return f"{self.mu:g} where R ≥ {self.threshold:g}"

    def where(self, batch: Batch) -> Tensor:
        """[B, 1] bool; the completions whose tokens count, in k and in its denominators."""
        return (batch.reward >= self.threshold)[:, None]

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.mu * self.where(batch).expand(batch.mask.shape).to(batch.reward.dtype)

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.score(out, batch, psi) * ragged.masked(out.logp.detach(), batch.mask)
