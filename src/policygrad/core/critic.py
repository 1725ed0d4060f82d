"""The critic's side of actor-critic methods: what V is fitted to, and by which loss. A learner owns the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.metrics import Metric
from policygrad.core.terms import required
from policygrad.core.types import Batch
from policygrad.core.values import GAE


@dataclass(frozen=True)
class Critic:
    """V_φ, a copy of the initial model with a value head: parameters of its own, which a policy step never moves.

    Its targets are GAE(γ, λ) + V_old, unwhitened. Before training it is fitted to the frozen policy's returns for
    `pretrain` rollouts at most, or until it explains `explained` of their variance.
    """

    lr: float = 1e-4
    """Peak learning rate; the policy's schedule."""
    lam: float = 0.95
    """λ of the targets; 1 = Monte-Carlo returns."""
    gamma: float = 1.0
    coefficient: float = 0.5
    """Of the squared error."""
    clip: float = 0.2
    """The error counts from V_old ± clip where that is worse; 0 = no clipping."""
    pretrain: int = 0
    """Rollouts of value pre-training still to come, at most; the policy stands still meanwhile."""
    explained: float = 0.5
    """Explained variance of fresh returns at which pre-training ends early."""

    def __post_init__(self) -> None:
        GAE(self.gamma, self.lam)  # refuses what is outside [0, 1]
        for name in ("lr", "coefficient", "clip", "pretrain"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Critic.{name} must be at least 0, not {getattr(self, name)}")

    def observe(self, batch: Batch, metrics: Mapping[str, Metric]) -> Critic:
        """The critic for the next rollout: one rollout of pre-training less, or none left once it explains enough."""
        seen = metrics.get("explained_variance")
        if not self.pretrain or seen is None:
            return self
        return replace(self, pretrain=0 if seen.value >= self.explained else self.pretrain - 1)

    @property
    def formula(self) -> str:
        clip = f", clipped at V_old ± {self.clip:g}" if self.clip else ""
        return f"{self.coefficient:g}·(V − (GAE(λ = {self.lam:g}) + V_old))²{clip}"

    def targets(self, batch: Batch) -> Tensor:
        """[B, T] GAE(γ, λ) + V_old; 0 off the mask. The batch's rewards are those after shaping."""
        advantage = GAE(self.gamma, self.lam)(torch.zeros_like(batch.mask, dtype=batch.reward.dtype), batch)
        return advantage + ragged.masked(required(batch.values, self, "values"), batch.mask)

    def loss(self, values: Tensor, batch: Batch, targets: Tensor) -> Tensor:
        """[B, T] with graph: coefficient·max((V − R)², (clip(V, V_old ± ε) − R)²). Source: Schulman et al. 2017 (code)."""
        values = ragged.masked(values, batch.mask)
        error = (values - targets) ** 2
        if self.clip:
            old = ragged.masked(required(batch.values, self, "values"), batch.mask)
            near = old + (values - old).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (near - targets) ** 2)
        return self.coefficient * ragged.masked(error, batch.mask)


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> float:
    """1 − Var(R − V)/Var(R) over the sampled tokens; 0 where the targets do not vary."""
    spread = float(ragged.std(targets, mask, 0)) ** 2
    return 1 - float(ragged.std(targets - values, mask, 0)) ** 2 / spread if spread else 0.0
