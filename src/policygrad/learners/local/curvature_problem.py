"""One rollout on a local learner, as a trust region asks about it: the Fisher product, a look ahead, the constrained move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from policygrad.core.metrics import Mean, Metrics
from policygrad.learners.local.curvature import Curvature
from policygrad.learners.local.optimizer import first_bad
from policygrad.learners.local.problem import LocalAdaptiveProblem


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalProblem(LocalAdaptiveProblem):
    """All that any step asks."""

    curvature: Curvature

    def some(self, share: float) -> Self:
        """This share of the groups with a sampled token, at least one, drawn by the weights' version."""
        groups = torch.unique(self.batch.group[self.batch.mask.any(1)])
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(self.seed))
        return self._of(groups[order[: max(1, round(share * len(groups)))]])

    def gradient(self) -> tuple[Tensor, Metrics]:
        """[P] of the surrogate objective; 0 while the policy stands still. Where it is not finite, the optimiser says."""
        metrics: Metrics = {"value_pretraining": Mean(1.0)} if self.pretraining else self.policy()
        gradient = self.networks.optimizer.take_gradient()
        self.networks.optimizer.not_finite = self._bad(gradient)
        return gradient if self.pretraining else -gradient, metrics

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """⟨a, b⟩ [] of two vectors [P], or of those that processes have shares of."""
        return self.networks.division.summed((a @ b).cpu())

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        """[P] F v, a mean over the sampled tokens. Where it is not finite, the optimiser says."""
        product = self.curvature.fisher(self.batch, v, sampled)
        optimizer = self.networks.optimizer
        if not optimizer.not_finite and (where := self._bad(product)):
            optimizer.not_finite = f", in a product with the Fisher matrix{where}"
        return product

    def _bad(self, vector: Tensor) -> str:
        """Where it is not finite, in words; "" = nowhere."""
        if math.isfinite(float(self.inner(vector, vector))):
            return ""
        optimizer = self.networks.optimizer
        return first_bad(optimizer.split(vector), optimizer.masters)

    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        """(surrogate objective, mean KL(π_old‖π_θ) in nats a sampled token) at θ + delta [P]."""
        return self.curvature.evaluate(self.batch, self.psi, self.algorithm, delta)

    def commit(self, delta: Tensor) -> None:
        """θ ← θ + delta [P]."""
        self.networks.optimizer.move(delta)

    def fit(self) -> Metrics:
        """The critic's gradient and one AdamW step of it."""
        critic = self.networks.critic
        return {} if critic is None or self.algorithm.critic is None else self.value() | critic.descend()
