"""How the parameters move, once the gradient is known. A step is handed a `Problem` and never sees a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from policygrad.core.metrics import Metrics, merge
from policygrad.errors import ConfigError


class Problem(Protocol):
    """What a step may ask of a learner about one rollout, or one minibatch of it.

    The first three are first order: they work on the learner's own gradients and optimiser. The others speak of θ as one
    vector of P parameters that train, in the precision the learner keeps them in, around θ_old, where it stands until
    `commit`: all that a trust region needs.
    """

    def split(self, epoch: int, minibatches: int) -> Sequence[Problem]:
        """The rollout's groups, shuffled for this epoch, as minibatches of whole groups."""
        ...

    def some(self, share: float) -> Problem:
        """This share of the groups, at least one: the same ones whenever this problem is asked."""
        ...

    def accumulate(self) -> Metrics:
        """Adds this problem's gradient of the loss to the learner's; returns what was measured on the way."""
        ...

    def descend(self) -> Metrics:
        """Clips the gradient, takes one optimiser step and clears it."""
        ...

    def gradient(self) -> tuple[Tensor, Metrics]:
        """([P] gradient of the surrogate objective at θ_old, the direction in which it grows; what was measured on the way)."""
        ...

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        """[P] F v, where F is the Hessian of mean KL(π_old‖π_θ) at θ_old, E[∇log π ∇log πᵀ] under the policy.

        The mean is over the sampled tokens' states; in each, the expectation is exact over the vocabulary, or, if
        `sampled`, the token that was sampled stands for it.
        """
        ...

    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        """(surrogate objective, mean KL(π_old‖π_θ) in nats a sampled token) at θ_old + delta. The parameters stay as they are."""
        ...

    def commit(self, delta: Tensor) -> None:
        """Moves the parameters to θ_old + delta, to the bit where `evaluate` looked."""
        ...

    def fit(self) -> Metrics:
        """One optimiser step of the critic alone; nothing without one."""
        ...

    def measured(self) -> Metrics:
        """What `accumulate` would measure with the parameters as they are; nothing while a critic is fitted first."""
        ...

    def adapted(self, metrics: Metrics) -> Problem | None:
        """The same rollout with each β that adapts to KL(π_old‖π_θ) moved by `kl_old/last`; None once all are in their band."""
        ...


class Step(Protocol):
    """How the parameters move."""

    @property
    def updates(self) -> int:
        """Steps of the policy per rollout."""
        ...

    @property
    def value_updates(self) -> int:
        """Optimiser steps of the critic per rollout, where there is one."""
        ...

    @property
    def uses_lr(self) -> bool:
        """Whether the policy's learning rate means anything."""
        ...

    @property
    def formula(self) -> str:
        """In a few words."""
        ...

    def __call__(self, problem: Problem) -> Metrics:
        """One rollout's steps."""
        ...


@dataclass(frozen=True)
class FirstOrder:
    """K = epochs × minibatches gradient steps per rollout; a minibatch is a share of whole groups."""

    epochs: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"FirstOrder.{name} must be at least 1, not {getattr(self, name)}")

    @property
    def updates(self) -> int:
        """K, optimiser steps per rollout."""
        return self.epochs * self.minibatches

    @property
    def value_updates(self) -> int:
        """Policy and critic step together."""
        return self.updates

    @property
    def uses_lr(self) -> bool:
        return True

    @property
    def formula(self) -> str:
        return "one gradient step" if self.updates == 1 else f"{self.epochs} epochs × {self.minibatches} minibatches"

    def __call__(self, problem: Problem) -> Metrics:
        measured: Metrics = {}
        this: Metrics = {}
        for epoch in range(self.epochs):
            this = {}
            for minibatch in problem.split(epoch, self.minibatches):
                this = merge(this, minibatch.accumulate(), minibatch.descend())
            measured = merge(measured, this)
        return measured | ({"kl_old/last": this["kl_old"]} if "kl_old" in this else {})
