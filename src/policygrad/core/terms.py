"""Additive terms: score terms k, which multiply ∇log π_θ beside w·Ψ, and loss terms with their own graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.aggregation import SequenceMean, TokenMean
from policygrad.core.base import Aggregation, LossTerm, ObjectiveTerm, State, Term
from policygrad.core.batch import Batch, Forward
from policygrad.core.divergences import Divergence, Others, Over, Owner
from policygrad.core.kl_controllers import AdaptiveBeta, PenaltyOnOld, Rule
from policygrad.core.metrics import Mean, Metric, Metrics
from policygrad.core.ratios import (
    SELECTED,
    bounded_exp,
    bounded_expm1,
    covariance,
    require_policy_output,
)
from policygrad.core.settings import ABOVE_0, SET, acts_with, check_setting, choice, setting
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm

KLForm = Literal["k2", "k3", "r*k1", "r*k3", "abs"]


def log_ratio(logp: Tensor, old: Tensor | None, mask: Tensor) -> Tensor:
    """Compute log(π_θ/π_old) [B, T] without graph; 0 where π_old is the policy itself."""
    logp = masked.apply_mask(logp.detach(), mask)
    return torch.zeros_like(logp) if old is None else logp - masked.apply_mask(old, mask)


def _find_uncorrected(term: ObjectiveTerm, algorithm: Algorithm) -> Iterator[str]:
    """Yield the conflict of a term without a ratio, which is all that the policy learns from, with a sampler as π_old."""
    if algorithm.old_policy == "sampler" and algorithm.has_zero_advantage:
        yield (
            f"old_policy='sampler' accounts for stale samples by the ratio, which {type(term).__name__} does not have, and Ψ is 0: "
            "set old_policy='learner', which corrects the term by TruncatedIS()"
        )


def _read_by_reference(batch: Batch) -> Tensor | None:
    """Return the completions that π_ref has read, [B, 1] bool; None for all."""
    return None if batch.has_reference is None else batch.has_reference[:, None]


@dataclass(frozen=True)
class KLToReference(AdaptiveBeta, Term):
    """KL to π_ref in the loss: k = −β·d, with u = log π_θ − log π_ref and r the token ratio.

    form   objective −β·…        d             direction
    k2     u²/2                  u             reverse KL of the state's distribution
    k3     e^{−u} + u − 1        1 − e^{−u}    forward-KL direction on-policy; GRPO as published
    r*k1   r·u                   r(u + 1)      reverse KL, also off-policy
    r*k3   r(e^{−u} + u − 1)     r·u           reverse KL, also off-policy
    abs    |u|                   sign(u)       no KL: the total variation Σ_a|π_θ − π_ref| on-policy

    k3's ratio is π_ref/π_θ. With `cap`, d has min(r, cap) in place of r: on tokens that have become more probable the objective
    goes on as the quadratic with that slope. Only completions that π_ref has read count (`Batch.has_reference`).
    With level='sequence', k2 is of the completion: (Σ_t u_t)²/2, so that d = Σ_t u_t at every token. Added to Ψ·log π_θ it is the
    regression of β·log(π_θ/π_ref) of the completion on Ψ.
    Source: Schulman 2020 (approximating KL); Shao et al. 2024 (GRPO), eq. 4; abs: verl, core_algos.py (`kl_penalty_forward`);
    `cap`: Hübotter et al. 2026 (SDPO, code); `level`: Brantley et al. 2025 (A*-PO), arXiv:2505.20686, and the authors' code.

    Raises:
        ConfigError: form k1, whose expected gradient is zero without the ratio; a rule without a target; a cap without a ratio; the
            level of completions for another form than k2.
    """

    beta: float = setting(0.04, "at least 0")
    form: KLForm = "k3"
    target: float | None = setting(None, "above 0", "nats per token, or None")
    """Target of `kl` (r·k3, mean over the updates) in nats per sampled token; β is adapted to it after each rollout."""
    rule: Rule | None = None
    """How β adapts to the target; None means proportional."""
    aggregation: Aggregation | None = None
    """The term's own average; None: the policy's. On the command line --algorithm.terms.kl-to-reference.aggregation TokenMean."""
    cap: float | None = setting(None, "at least 1", "or None", hint="r is 1 where the policy has not changed")
    """Upper bound of r; None: unbounded. For the forms with r."""
    level: Literal["token", "sequence"] = choice(token="each token's u", sequence="the completion's Σ u at every token")
    """token: u of each token; sequence: the completion's Σ u at every token, for form k2."""
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref"})
    multipliers: ClassVar[tuple[str, ...]] = ("beta",)

    @property
    def reference_penalty(self) -> float:
        return self.beta

    def __post_init__(self) -> None:
        if str(self.form) == "k1":
            raise ConfigError(
                "KLToReference(form='k1') does nothing: E[∇log π] = 0, so k1 alone in the loss has zero expected gradient. "
                "Use 'k2', 'k3' or 'r*k1' here, or put k1 in the reward with KLInReward"
            )
        check_setting(self, "form", self.form in get_args(KLForm), f"one of {', '.join(get_args(KLForm))}")
        if self.cap is not None and not self.form.startswith("r*"):
            raise ConfigError(
                f"KLToReference.cap={self.cap:g} bounds the ratio r, which form {self.form!r} does not have: set form='r*k3' or "
                "'r*k1', or cap=None"
            )
        possible = self.level == "token" or self.form == "k2"
        check_setting(self, "level", possible, f"'token' with form '{self.form}'", "only k2 is defined for completions")
        super().__post_init__()

    @property
    def formula(self) -> str:
        r = "r" if self.cap is None else f"min(r, {self.cap:g})"
        d = {
            "k2": "u" if self.level == "token" else "Σ_t u",
            "k3": "(1 − e^{−u})",
            "r*k1": f"{r}(u + 1)",
            "r*k3": f"{r}·u",
            "abs": "sign(u)",
        }[self.form]
        return f"−{self.beta:g}·{d},  u = log π_θ − log π_ref{self.describe_target()}"

    @property
    def learns_from_samples(self) -> bool:  # type: ignore[override]
        """The regression on Ψ is no penalty: its two halves belong to one square."""
        return self.level == "sequence"

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if not self.form.startswith("r*"):
            yield from _find_uncorrected(self, algorithm)

    def token_mask(self, batch: Batch) -> Tensor | None:
        return _read_by_reference(batch)

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Adapt β to the KL that the updates measured (`kl`)."""
        return self.adapt(state["beta"], metrics["kl"].value, "proportional") if "kl" in metrics else state

    def _u_and_change(self, out: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return u and log r, each [B, T]."""
        reference = masked.apply_mask(batch.require("logp_ref", self), batch.mask)
        u = masked.apply_mask(out.logp.detach(), batch.mask) - reference
        return u, log_ratio(out.logp, batch.logp_old, batch.mask)

    def _capped(self, r: Tensor) -> Tensor:
        return r if self.cap is None else r.clamp(max=self.cap)

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        u, change = self._u_and_change(out, batch)
        if self.form == "k2":
            return -self.beta * (u if self.level == "token" else u.sum(1, keepdim=True).expand_as(u))
        if self.form == "k3":
            return self.beta * bounded_expm1(-u)
        if self.form == "abs":
            return -self.beta * u.sign()
        r = self._capped(bounded_exp(change))
        return -self.beta * r * (u + 1 if self.form == "r*k1" else u)

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        u, change = self._u_and_change(out, batch)
        if self.level == "sequence":  # each token holds 1/|o| of the completion's
            return (-self.beta * u.sum(1).square() / 2 / batch.lengths.clamp(min=1))[:, None].expand_as(u)
        # `near` is u where r reaches its cap, and u itself before; `beyond` is what the objective gains from there on
        excess = torch.zeros_like(u) if self.cap is None else (change - math.log(self.cap)).clamp(min=0)
        near, r = u - excess, self._capped(bounded_exp(change))
        beyond = r * excess * (u + near) / 2
        k3 = bounded_expm1(-near) + near
        reverse = {"r*k1": r * near + beyond + r * excess, "r*k3": r * k3 + beyond}
        forms = {"k2": u * u / 2, "k3": k3, "abs": u.abs(), **reverse}
        return -self.beta * forms[self.form]


@dataclass(frozen=True)
class Entropy(Term):
    """Entropy bonus from the sampled tokens: k = −η·r·log π_θ, whose expectation is η∇H of each state's distribution.

    The derivative of −log π at the sample has zero expectation and is not used. `ExactEntropy` needs no sampled estimate, but a
    pass over the vocabulary. Source: Williams & Peng 1991.
    """

    eta: float = 0.01
    aggregation: Aggregation | None = None
    multipliers: ClassVar[tuple[str, ...]] = ("eta",)

    @property
    def formula(self) -> str:
        return f"−{self.eta:g}·r·log π_θ"

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        r = bounded_exp(log_ratio(out.logp, batch.logp_old, batch.mask))
        return -self.eta * r * masked.apply_mask(out.logp.detach(), batch.mask)

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.score(out, batch, psi)


@dataclass(frozen=True)
class KLToOld(PenaltyOnOld, Term):
    """−β·KL(π_old‖π_θ) from the sampled tokens.

    form   objective −β·…    k
    k3     r − 1 − log r     β(1 − r)
    k2     (log r)²/2        −β·log r: slow where a token's probability has multiplied

    With a `cap`, k3's gradient is bounded, k = −β·min(r − 1, cap): beyond r = 1 + cap the objective continues with constant
    slope, so that a token whose probability has multiplied does not dominate the update. With π_old = μ (`old_policy="sampler"`),
    k2 is the squared log-ratio penalty of direct reward optimisation, and of prime-rl's default loss, whose kl_tau is β/2.
    `ExactKLToOld` computes the KL over the full vocabulary.
    Source: Schulman et al. 2017 (PPO), eq. 8 and sec. 4; Schulman 2020 (approximating KL); Richemond et al. 2024 (DRO),
    arXiv:2405.19107, for k2; Liu et al. 2025 (CPGD), arXiv:2505.12504, for the cap.
    """

    beta: float = setting(1.0, "at least 0")
    form: Literal["k3", "k2"] = choice(k3="r − 1 − log r", k2="(log r)²/2")
    cap: float | None = setting(None, "above 0", hint="it bounds r − 1 from above")
    """Upper bound of r − 1 in k3's gradient; None: no bound."""
    target: float | None = setting(None, "above 0", "nats per token, or None")
    """Target of the KL after the last update in nats per sampled token; β is adapted to it after each rollout."""
    rule: Rule | None = None
    """How β adapts to the target; None means doubling."""
    aggregation: Aggregation | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"logp_old"})
    multipliers: ClassVar[tuple[str, ...]] = ("beta",)

    def __post_init__(self) -> None:
        super().__post_init__()
        possible = self.cap is None or self.form == "k3"
        check_setting(self, "cap", possible, "None with form 'k2'", "the gradient of k2 grows only with log r")

    @property
    def formula(self) -> str:
        k3 = f"{self.beta:g}·(1 − r)" if self.cap is None else f"−{self.beta:g}·min(r − 1, {self.cap:g})"
        return (k3 if self.form == "k3" else f"−{self.beta:g}·log r") + self.describe_target()

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        change = log_ratio(out.logp, batch.logp_old, batch.mask)
        if self.form == "k2":
            return -self.beta * change
        return -self.beta * bounded_expm1(change).clamp(max=math.inf if self.cap is None else self.cap)

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        change = log_ratio(out.logp, batch.logp_old, batch.mask)
        if self.form == "k2":
            return -self.beta * change * change / 2
        if self.cap is None:
            return -self.beta * (bounded_expm1(change) - change)
        near = change.clamp(max=math.log1p(self.cap))
        return -self.beta * (bounded_expm1(near) - near + self.cap * (change - near))


@dataclass(frozen=True)
class PositiveNLL(Term):
    """μ·log π_θ on the tokens of correct completions (the task's reward ≥ threshold), averaged over those tokens.

    Source: Yue et al. 2025 (VAPO), sec. 4.3.
    """

    mu: float = 0.1
    threshold: float = 1.0
    aggregation: Aggregation | None = field(default_factory=TokenMean)
    multipliers: ClassVar[tuple[str, ...]] = ("mu",)

    @property
    def learns_from_samples(self) -> bool:  # type: ignore[override]
        """Its completions are the policy's samples, imitated as `RejectionSampling` does."""
        return True

    @property
    def formula(self) -> str:
        return f"{self.mu:g} where R ≥ {self.threshold:g}"

    def token_mask(self, batch: Batch) -> Tensor:
        """Return the correct completions, [B, 1] bool."""
        return (batch.outcomes >= self.threshold)[:, None]

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.mu * self.token_mask(batch).expand(batch.mask.shape).to(batch.reward.dtype)

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.score(out, batch, psi) * masked.apply_mask(out.logp.detach(), batch.mask)


# Loss terms: exact over the vocabulary, so they are no multiple of ∇log π_θ at the sampled tokens and need their own graph. Their
# gradient is that of each visited state's distribution, for fixed visits.


@dataclass(frozen=True)
class ExactEntropy(LossTerm):
    """Entropy bonus η·H with the exact gradient: H is the entropy of π_θ over the full vocabulary at the sampling temperature.

    Unlike `Entropy`, it has no variance from the sampled token. Source: Williams & Peng 1991; Mnih et al. 2016 (A3C), sec. 4.

    With a `target`, η adapts: after each rollout η + step if the entropy measured in its updates is below the target, else
    η − step, within [0, max_eta]; and the bonus acts only while the last measured entropy is below the target.
    Source: He et al. 2025 (Skywork-OR1), arXiv:2505.22312, adaptive entropy control, as in the authors' code.
    """

    eta: float = 0.01
    aggregation: Aggregation | None = None
    target: float | None = setting(None, "above 0", "nats per token, or None")
    """Entropy below which the bonus acts, in nats per sampled token; None: η is constant."""
    step: float = acts_with(setting(1e-4, "above 0"), target=SET)
    """Change of η after each rollout."""
    max_eta: float = acts_with(setting(0.005, "above 0"), target=SET)
    """Largest η that adaptation can reach."""
    forward_needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    multipliers: ClassVar[tuple[str, ...]] = ("eta", "target")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is not None:
            requirement = f"from 0 to max_eta = {self.max_eta:g} with a target"
            check_setting(self, "eta", 0 <= self.eta <= self.max_eta, requirement, "adaptation keeps it in this range")

    @property
    def formula(self) -> str:
        adapted = "" if self.target is None else f",  η ± {self.step:g} towards H = {self.target:g}, 0 above it"
        return f"{self.eta:g}·∇H,  H = −Σ_a π_θ(a)·log π_θ(a){adapted}"

    def init_state(self) -> State | None:
        return None if self.target is None else {"eta": self.eta, "active": True}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Adapt η to the entropy that the updates measured (`entropy/exact`)."""
        if "entropy/exact" not in metrics or self.target is None:
            return state
        is_low = metrics["entropy/exact"].value < self.target
        eta = state["eta"] + self.step if is_low else state["eta"] - self.step
        return {"eta": min(max(eta, 0.0), self.max_eta), "active": is_low}

    def with_state(self, state: State) -> Self:
        return replace(self, eta=state["eta"] if state["active"] else 0.0)

    def report(self, batch: Batch) -> Metrics:
        """entropy/eta, the bonus's coefficient in this rollout, if it adapts."""
        return {} if self.target is None else {"entropy/eta": Mean(self.eta)}

    def objective(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.eta * out.require("entropy", self)


@dataclass(frozen=True)
class ExactKLToOld(PenaltyOnOld, LossTerm):
    """−β·KL(π_old‖π_θ) over the full vocabulary: Σ_a π_old(a)·log(π_old(a)/π_θ(a)) at each state of the rollout.

    The learner keeps a copy of the policy from before the updates. Source: Schulman et al. 2017 (PPO), eq. 8 and sec. 4.
    """

    beta: float = setting(1.0, "at least 0")
    target: float | None = setting(None, "above 0", "nats per token, or None")
    """Target of the KL after the last update in nats per sampled token; β is adapted to it after each rollout."""
    rule: Rule | None = None
    """How β adapts to the target; None means doubling."""
    aggregation: Aggregation | None = None
    forward_needs: ClassVar[frozenset[str]] = frozenset({"kl_old"})
    multipliers: ClassVar[tuple[str, ...]] = ("beta",)

    @property
    def formula(self) -> str:
        return f"−{self.beta:g}·∇KL(π_old‖π_θ) over the vocabulary{self.describe_target()}"

    def objective(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return -self.beta * out.require("kl_old", self)


@dataclass(frozen=True)
class ExactKLToReference(LossTerm):
    """−β·D over the full vocabulary, D a divergence of π_θ and π_ref at each state of the rollout.

    alpha          D
    1              KL(π_θ‖π_ref) = Σ_a π_θ(a)·log(π_θ(a)/π_ref(a)), the reverse KL
    0              KL(π_ref‖π_θ), the forward KL
    between them   α·KL(π_ref‖M) + (1 − α)·KL(π_θ‖M),  M = α·π_ref + (1 − α)·π_θ, the generalised Jensen–Shannon divergence

    With a teacher as π_ref it is on-policy distillation without the variance of the sampled token, which `KLToReference` and
    `TeacherLogRatio` have. The learner evaluates π_ref in every update, or a server tells π_ref's likeliest tokens
    once. Only completions that π_ref has read count
    (`Batch.has_reference`). Stale samples are corrected where the policy learns from this term, as the authors of SDPO do. D is
    exact in each state, so that a token's own ratio has mean 1 there and only lowers or raises its share; how likely the states
    are is in the product over a completion, `TruncatedIS(level="sequence")`.

    With `top_k` D is of two smaller distributions: the k likeliest tokens, and the others as one or left out. It takes no less
    time here, where both models are evaluated; it is what the authors of SDPO train with (alpha 0.5, 100 tokens, cap 2).
    Source: Agarwal et al. 2024 (GKD), eq. 1 to 4; `top_k`, `cap`: Hübotter et al. 2026 (SDPO), arXiv:2601.20802, and their code.
    """

    beta: float = setting(1.0, "at least 0")
    alpha: float = setting(1.0, "in [0, 1]")
    """1: reverse KL; 0: forward KL; between them the Jensen–Shannon divergence with this weight of π_ref."""
    aggregation: Aggregation | None = None
    top_k: int = setting(0, "at least 0")
    """Compare only this many tokens one by one, the likeliest of one of the two; 0: the whole vocabulary."""
    top_of: Owner = acts_with(choice(policy="π_θ's likeliest", reference="π_ref's"), top_k=ABOVE_0)
    others: Others = acts_with(choice(one="as one token", none="left out, the likeliest renormalised"), top_k=ABOVE_0)
    """one: all other tokens together count as one. none: they are left out, and the others' probabilities sum to 1."""
    cap: float | None = setting(None, "above 0", "or None")
    """Multiply D at a token by min(π_θ/π_old, cap) of the sampled token; None: no ratio."""
    over: Over = choice(sampled="the tokens that top-k and top-p leave", vocabulary="all tokens")
    """sampled: where completions are sampled by top-k or top-p, over the tokens that these leave, as every other part does.
    vocabulary: over all tokens, so that only the states are those of the narrower sampler."""
    forward_needs: ClassVar[frozenset[str]] = frozenset({"kl_ref"})
    multipliers: ClassVar[tuple[str, ...]] = ("beta",)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"logp_ref"} if self.cap is None else {"logp_ref", "logp_old"})

    @property
    def reference_penalty(self) -> float:
        return self.beta

    @property
    def divergence(self) -> Divergence:
        return Divergence(self.alpha, self.top_k, self.top_of, self.others, self.over)

    @property
    def formula(self) -> str:
        named = {1.0: "KL(π_θ‖π_ref)", 0.0: "KL(π_ref‖π_θ)"}
        owner = "π_θ" if self.top_of == "policy" else "π_ref"
        likeliest = f"{owner}'s {self.top_k} likeliest tokens" + ", and the others as one" * (self.others == "one")
        ratio = "" if self.cap is None else f"min(r, {self.cap:g})·"
        return f"−{self.beta:g}·{ratio}∇{named.get(self.alpha, f'JSD_{self.alpha:g}(π_ref, π_θ)')} over " + (
            likeliest if self.top_k else "the vocabulary"
        )

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if self.cap is None:
            yield from _find_uncorrected(self, algorithm)
        if len({term.divergence for term in algorithm.terms if "kl_ref" in term.forward_needs}) > 1:
            yield "several ExactKLToReference have different alphas or tokens, and a pass computes one divergence: make them equal"

    def token_mask(self, batch: Batch) -> Tensor | None:
        return _read_by_reference(batch)

    def objective(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        divergence = out.require("kl_ref", self)
        if self.cap is None:
            return -self.beta * divergence
        return (
            -self.beta * bounded_exp(log_ratio(out.logp, batch.logp_old, batch.mask)).clamp(max=self.cap) * divergence
        )


@dataclass(frozen=True)
class KLCov(Term):
    """−β·KL(π_old‖π_θ) on the fraction of tokens with the highest covariance of log π_θ with Ψ.

    form   objective −β·…      k
    abs    |log r|             −β·sign(log r): used by the authors
    k3     r − 1 − log r       β(1 − r): an estimate of the KL in the paper

    Source: Cui et al. 2025 (KL-Cov), arXiv:2505.22617, sec. 4.
    """

    beta: float = 1.0
    fraction: float = setting(2e-3, "above 0 and at most 1")
    """Fraction of all tokens of the update; at least one token."""
    form: Literal["abs", "k3"] = choice(abs="|log r|", k3="r − 1 − log r")
    aggregation: Aggregation | None = None
    needs: ClassVar[frozenset[str]] = SELECTED | {"logp_old"}
    forward_needs: ClassVar[frozenset[str]] = frozenset({"logp"})
    constrained_kl: ClassVar[str | None] = "kl_old"
    multipliers: ClassVar[tuple[str, ...]] = ("beta",)

    @property
    def formula(self) -> str:
        k = f"−{self.beta:g}·sign(log r)" if self.form == "abs" else f"{self.beta:g}·(1 − r)"
        return f"{k} at the {self.fraction:g} of tokens of highest cov(log π_θ, Ψ)"

    def select_tokens(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        """Choose the penalised tokens. Of equal covariances it takes the first: late in a run many tokens have log π = 0."""
        mask = batch.mask
        cov = covariance(masked.apply_mask(require_policy_output(out, self), mask), psi, mask)[mask]
        highest = cov.sort(descending=True, stable=True).indices[: max(1, int(self.fraction * len(cov)))]
        chosen = torch.zeros_like(cov, dtype=torch.bool)
        chosen[highest] = True
        return torch.zeros_like(mask).masked_scatter(mask, chosen)

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        change = log_ratio(out.logp, batch.logp_old, batch.mask)
        k = -change.sign() if self.form == "abs" else -bounded_expm1(change)
        return self.beta * masked.apply_mask(k, batch.require("selected", self))

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        change = log_ratio(out.logp, batch.logp_old, batch.mask)
        kl = change.abs() if self.form == "abs" else bounded_expm1(change) - change
        return -self.beta * masked.apply_mask(kl, batch.require("selected", self))


# Demonstrations (`Batch.demonstration`). Parts with `demonstration` in `needs` use them, all others average without them, and an
# algorithm without such a part rejects a batch that contains some.


def demonstration_mask(batch: Batch, part: object) -> Tensor:
    """Return the demonstrations, [B, 1] bool; ConfigError if the batch does not mark them."""
    return batch.require("demonstration", part)[:, None]


@dataclass(frozen=True)
class DemonstrationNLL(Term):
    """μ·φ·log π_θ, averaged over the tokens of demonstrations; φ = p(1 − p) with p = π_θ (`token_weighting`), or 1.

    The objective is a mixture, (1 − μ)·J + μ·this: the policy's Ψ is multiplied by 1 − μ. φ is largest where the policy is
    undecided (p = ½) and 0 where p is 0 or 1.
    Source: Zhang et al. 2025 (CHORD), arXiv:2508.11408; φ = 1 is supervised fine-tuning beside reinforcement learning.
    """

    mu: float = setting(0.1, "in [0, 1]")
    """μ: the weight of demonstrations in the objective; samples have 1 − μ."""
    token_weighting: bool = True
    aggregation: Aggregation | None = field(default_factory=TokenMean)
    final_mu: float | None = setting(None, "in [0, 1]")
    """μ at the end of a half-cosine schedule that starts at `mu`; None keeps it constant."""
    decay_rollouts: int = acts_with(setting(200, "at least 1"), final_mu=SET)
    """Rollouts until μ reaches `final_mu`."""
    needs: ClassVar[frozenset[str]] = frozenset({"demonstration"})
    multipliers: ClassVar[tuple[str, ...]] = ("mu", "final_mu")

    @property
    def mixture_weight(self) -> float:  # type: ignore[override]
        return self.mu

    @property
    def final_mixture_weight(self) -> float:
        return self.mu if self.final_mu is None else self.final_mu

    @property
    def formula(self) -> str:
        phi, where = ("p(1 − p)", ",  p = π_θ") if self.token_weighting else ("1", "")
        if self.final_mu is None:
            return f"{self.mu:g}·{phi} on demonstrations{where}"
        schedule = f"μ from {self.mu:g} to {self.final_mu:g} in {self.decay_rollouts} rollouts"
        return f"μ·{phi} on demonstrations{where},  {schedule}"

    def init_state(self) -> State | None:
        return None if self.final_mu is None else {"rollouts": 0}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        return {"rollouts": state["rollouts"] + 1}

    def with_state(self, state: State) -> Self:
        assert self.final_mu is not None
        done = min(1.0, state["rollouts"] / self.decay_rollouts)
        return replace(self, mu=self.final_mu + (self.mu - self.final_mu) * (1 + math.cos(math.pi * done)) / 2)

    def report(self, batch: Batch) -> Metrics:
        """demonstrations/mu, if it has a schedule."""
        return {} if self.final_mu is None else {"demonstrations/mu": Mean(self.mu)}

    def token_mask(self, batch: Batch) -> Tensor:
        """Return the demonstrations, [B, 1] bool."""
        return demonstration_mask(batch, self)

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        p = masked.apply_mask(out.logp.detach(), batch.mask).clamp(max=0).exp()
        weight = p * (1 - p) if self.token_weighting else torch.ones_like(p)
        return self.mu * masked.apply_mask(weight, demonstration_mask(batch, self).expand(p.shape))

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.score(out, batch, psi) * masked.apply_mask(out.logp.detach(), batch.mask)


# Observations (`Batch.observation`): what tools and environments wrote into a conversation.


@dataclass(frozen=True)
class ObservationNLL(Term):
    """λ·log π_θ of the tokens that the environment wrote: the policy learns to predict what its actions lead to.

    The tokens are in the rollout already and their log-probabilities in the same forward pass. They have a denominator of their
    own: the mean over a completion's observed tokens, then over the completions that have some. The weights of sampled tokens
    (`Batch.weight`) do not apply to them.
    Source: Shrivastava et al. 2026 (ECHO), arXiv:2605.24517, the environment's loss.
    """

    coefficient: float = setting(0.05, "at least 0")
    """λ, for a policy term of weight 1."""
    aggregation: Aggregation | None = field(default_factory=SequenceMean)
    needs: ClassVar[frozenset[str]] = frozenset({"observation"})
    multipliers: ClassVar[tuple[str, ...]] = ("coefficient",)

    @property
    def formula(self) -> str:
        return f"{self.coefficient:g} on the environment's tokens"

    def token_mask(self, batch: Batch) -> Tensor:
        """Return the environment's tokens, [B, T] bool."""
        batch.require("observation", self)
        return batch.observed_tokens

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.coefficient * self.token_mask(batch).to(batch.reward.dtype)

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.coefficient * masked.apply_mask(out.logp.detach(), self.token_mask(batch))


# Mixtures: some terms take a share of the objective (`mixture_weight`); the policy term keeps the rest.


def policy_share(terms: Iterable[ObjectiveTerm]) -> float:
    """Return 1 − Σ mixture_weight over the terms."""
    return 1 - sum(term.mixture_weight for term in terms)


def describe_policy_share(terms: Iterable[ObjectiveTerm]) -> str:
    """Return the suffix of the printed Ψ that shows its share of a mixture."""
    shared = [term for term in terms if term.mixture_weight]
    if any(term.init_state() is not None for term in shared):
        return "; × (1 − μ)"
    return f"; × {policy_share(shared):g}" if shared else ""
