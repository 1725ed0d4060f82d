"""Loss terms: what is no multiple of ∇log π_θ at the sampled tokens and so has a graph of its own, exact over the vocabulary.

All take the states as the rollout visited them: their gradient is that of each state's distribution, the visitation frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from policygrad.core import controllers
from policygrad.core.batch import Batch, Forward
from policygrad.core.controllers import AdaptiveBeta, Rule
from policygrad.core.metrics import Metric
from policygrad.core.protocols import Aggregation, LossTerm, State
from policygrad.core.terms import after_updates
from policygrad.errors import ConfigError


def computed(value: Tensor | None, part: object, name: str) -> Tensor:
    """The field `name` of a forward pass, or an error that says which part asked for it."""
    if value is None:
        raise ConfigError(
            f"{type(part).__name__} needs Forward.{name}, which is None: give `surrogate` a Forward(logp, {name}=…) with graph, "
            "or drop the part"
        )
    return value


@dataclass(frozen=True)
class ExactEntropy(LossTerm):
    """Entropy bonus η·H, H the entropy of π_θ over the whole vocabulary at the sampling temperature, differentiated itself.

    No variance from the sampled token, which `Entropy` has. Source: Williams & Peng 1991; Mnih et al. 2016 (A3C), sec. 4.
    """

    eta: float = 0.01
    aggregate: Aggregation | None = None
    forward_needs: ClassVar[frozenset[str]] = frozenset({"entropy"})

    @property
    def formula(self) -> str:
        return f"{self.eta:g}·∇H,  H = −Σ_a π_θ(a)·log π_θ(a)"

    def objective(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return self.eta * computed(out.entropy, self, "entropy")


@dataclass(frozen=True)
class ExactKLToOld(AdaptiveBeta, LossTerm):
    """−β·KL(π_old‖π_θ) over the whole vocabulary: Σ_a π_old(a)·log(π_old(a)/π_θ(a)) at each state of the rollout.

    The learner keeps the policy as it was when the updates began. Source: Schulman et al. 2017 (PPO), eq. 8 and sec. 4.
    """

    beta: float = 1.0
    target: float | None = None
    """Nats a sampled token: β is adapted after each rollout so that the KL its updates end at stays near."""
    rule: Rule | None = None
    """How β adapts to the target; doubling where it is left open."""
    aggregate: Aggregation | None = None
    forward_needs: ClassVar[frozenset[str]] = frozenset({"kl_old"})
    constrains: ClassVar[str | None] = "kl_old"

    def __post_init__(self) -> None:
        controllers.check(self)

    @property
    def formula(self) -> str:
        return f"−{self.beta:g}·∇KL(π_old‖π_θ) over the vocabulary{controllers.told(self)}"

    def update(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """By the KL at which the updates ended (`kl_old/last`)."""
        return after_updates(self, state, metrics)

    def objective(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return -self.beta * computed(out.kl_old, self, "kl_old")


@dataclass(frozen=True)
class ExactKLToReference(LossTerm):
    """−β·KL(π_θ‖π_ref) over the whole vocabulary: Σ_a π_θ(a)·log(π_θ(a)/π_ref(a)) at each state of the rollout.

    With a teacher for π_ref the reverse KL of on-policy distillation, without the variance of the sampled token; `KLToReference`
    and `TeacherLogRatio` take it from the samples. The learner asks π_ref in every update. Source: Agarwal et al. 2024 (GKD),
    eq. 2 to 4.
    """

    beta: float = 1.0
    aggregate: Aggregation | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref"})
    forward_needs: ClassVar[frozenset[str]] = frozenset({"kl_ref"})

    def __post_init__(self) -> None:
        if not self.beta >= 0:
            raise ConfigError(f"ExactKLToReference.beta must be at least 0, not {self.beta}")

    @property
    def formula(self) -> str:
        return f"−{self.beta:g}·∇KL(π_θ‖π_ref) over the vocabulary"

    def objective(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return -self.beta * computed(out.kl_ref, self, "kl_ref")
