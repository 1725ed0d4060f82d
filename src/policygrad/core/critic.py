"""The critic's side of actor-critic methods: what V is fitted to, and by which loss. A learner owns the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch, required
from policygrad.core.metrics import Metric
from policygrad.core.protocols import Part, State
from policygrad.core.ranges import count, unit
from policygrad.core.turn_values import MultiTurnGAE
from policygrad.core.values import GAE
from policygrad.errors import ConfigError

RATIO = 10.0
"""The critic's learning rate over the policy's, where it is left open."""
Features = Literal["own", "policy"]


@dataclass(frozen=True)
class Critic(Part):
    """V_φ: parameters of its own, which a policy step never moves, fitted to GAE(γ, λ) + V_old, unwhitened.

    features: own = a copy of the initial model's backbone, trained with the value head. policy = a head alone, on the policy's
    last hidden states, which it reads and never moves: no second backbone in memory, but values that shift with the policy's
    states and explain less; a `hidden` layer helps.

    Before training it is fitted to the frozen policy's returns for `pretrain` rollouts at most, or until it explains
    `explained` of their variance: what a rollout costs is sampling it, so each is gone over `pretrain_epochs` times, and the
    error is not clipped.
    """

    lr: float | None = None
    """Peak learning rate, on the policy's schedule; open = ten times the policy's."""
    lam: float = 0.95
    """λ of the targets; 1 = Monte-Carlo returns."""
    gamma: float = 1.0
    turn_gamma: float = 1.0
    """Per turn, at its last token; for an advantage that discounts per turn."""
    coefficient: float = 0.5
    """Of the squared error."""
    clip: float = 0.2
    """The error counts from V_old ± clip where that is worse; 0 = no clipping."""
    pretrain: int = 0
    """Rollouts of value pre-training, at most; the policy stands still meanwhile."""
    explained: float = 0.5
    """Explained variance of fresh returns at which pre-training ends early."""
    pretrain_epochs: int = 4
    """Value steps per update of pre-training."""
    features: Features = "own"
    """own: a backbone of its own; policy: the policy's hidden states, under stop-gradient."""
    hidden: int = 0
    """Width of a hidden layer in the head on the policy's states; 0 = a linear head."""

    def __post_init__(self) -> None:
        unit(self, gamma=self.gamma, lam=self.lam, turn_gamma=self.turn_gamma)
        for name in ("lr", "coefficient", "clip", "pretrain", "hidden"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"Critic.{name} must be at least 0, not {value}")
        count(self, pretrain_epochs=self.pretrain_epochs)
        if self.features not in get_args(Features):
            raise ConfigError(
                f"Critic.features must be {' or '.join(map(repr, get_args(Features)))}, not {self.features!r}"
            )
        if self.hidden and self.features == "own":
            raise ConfigError(
                "Critic.hidden makes a head on the policy's fixed states able to bend, and features is 'own', whose backbone "
                "learns itself: set features='policy', or leave hidden at 0"
            )

    def rate(self, policy: float | None) -> float:
        """Its peak learning rate beside the policy's; it starts from a head that knows nothing, so it learns faster.

        Raises:
            ConfigError: neither is given.
        """
        if self.lr is None and policy is None:
            raise ConfigError(
                "Critic.lr is open, and the policy has no learning rate to multiply: set Critic(lr=…), say 1e-5"
            )
        return RATIO * (policy or 0.0) if self.lr is None else self.lr

    def init(self) -> State | None:
        return {"pretrain": self.pretrain} if self.pretrain else None

    def update(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """One rollout of pre-training less, or none left once it explains enough."""
        seen, left = metrics.get("explained_variance"), state["pretrain"]
        if not left or seen is None:
            return state
        return {"pretrain": 0 if seen.value >= self.explained else left - 1}

    def at(self, state: State) -> Critic:
        """With `pretrain` the rollouts of it still to come."""
        return replace(self, pretrain=state["pretrain"])

    @property
    def formula(self) -> str:
        clip = f", clipped at V_old ± {self.clip:g}" if self.clip else ""
        head = ", V on the policy's states" if self.features == "policy" else ""
        turn = f", γ = {self.turn_gamma:g} per turn" if self.turn_gamma < 1 else ""
        return f"{self.coefficient:g}·(V − (GAE(λ = {self.lam:g}{turn}) + V_old))²{clip}{head}"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Where turns end, if they discount."""
        return frozenset({"anchor"} if self.turn_gamma < 1 else ())

    def targets(self, batch: Batch) -> Tensor:
        """[B, T] GAE(γ, λ) + V_old; 0 off the mask. The batch's rewards are those after shaping."""
        by_turn = MultiTurnGAE(self.gamma, self.lam, self.turn_gamma)
        estimate = by_turn if self.turn_gamma < 1 else GAE(self.gamma, self.lam)
        advantage = estimate(torch.zeros_like(batch.mask, dtype=batch.reward.dtype), batch)
        return advantage + ragged.masked(required(batch.values, self, "values"), batch.mask)

    def loss(self, values: Tensor, batch: Batch, targets: Tensor) -> Tensor:
        """[B, T] with graph: coefficient·max((V − R)², (clip(V, V_old ± ε) − R)²). Source: Schulman et al. 2017 (code)."""
        values = ragged.masked(values, batch.mask)
        error = (values - targets) ** 2
        if self.clip and not self.pretrain:
            old = ragged.masked(required(batch.values, self, "values"), batch.mask)
            near = old + (values - old).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (near - targets) ** 2)
        return self.coefficient * ragged.masked(error, batch.mask)


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> float:
    """1 − Var(R − V)/Var(R) over the sampled tokens; 0 where the targets do not vary."""
    spread = float(ragged.std(targets, mask, 0)) ** 2
    if not spread or bool(ragged.no_spread(targets, mask)):
        return 0.0
    return 1 - float(ragged.std(targets - values, mask, 0)) ** 2 / spread
