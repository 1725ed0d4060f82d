"""A problem on a tabular MDP, without sampling: what an update rule does when every expectation is exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from policygrad.core.metrics import Metrics
from policygrad.lab import mdp as exact
from policygrad.lab.mdp import TabularMDP, softmax, solve


@dataclass(eq=False)
class ExactProblem:
    """θ, a table of logits [S, A], moves where a step moves it; `history` holds J before the first step and after each."""

    mdp: TabularMDP
    theta: Tensor
    lr: float = 1.0
    """Of first-order steps: θ ← θ + lr·∇J."""
    history: list[float] = field(default_factory=list)
    pending: Tensor = field(init=False)
    curvature: Tensor | None = field(default=None, init=False)
    """[P, P] the Fisher matrix at θ, once it was asked for."""

    def __post_init__(self) -> None:
        self.pending = torch.zeros_like(self.theta)
        self.history = [self.objective]

    @property
    def objective(self) -> float:
        """J(π_θ)."""
        return float(solve(self.mdp, softmax(self.theta)).objective)

    def split(self, epoch: int, minibatches: int) -> list[ExactProblem]:
        """An expectation has no minibatches: each is the whole."""
        return [self] * minibatches

    def accumulate(self) -> Metrics:
        self.pending = self.pending + exact.gradient(self.mdp, self.theta)
        return {}

    def descend(self) -> Metrics:
        self.commit((self.lr * self.pending).flatten())
        self.pending = torch.zeros_like(self.theta)
        return {}

    def some(self, share: float) -> ExactProblem:
        """Nor has it groups to choose from."""
        return self

    def gradient(self) -> tuple[Tensor, Metrics]:
        return exact.gradient(self.mdp, self.theta).flatten(), {}

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        """Exact whatever `sampled` asks for: over all states and actions there is nothing to sample."""
        if self.curvature is None:
            self.curvature = exact.fisher(self.mdp, self.theta)
        return self.curvature @ v

    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        old, new = softmax(self.theta), softmax(self.theta + delta.reshape(self.theta.shape))
        occupancy = solve(self.mdp, old).occupancy
        kl = (occupancy * exact.state_kl(old, new)).sum() / occupancy.sum()
        return float(exact.surrogate_value(self.mdp, old, new)), float(kl)

    def commit(self, delta: Tensor) -> None:
        self.theta = self.theta + delta.reshape(self.theta.shape)
        self.curvature = None
        self.history.append(self.objective)

    def fit(self) -> Metrics:
        """The values are exact: there is no critic to fit."""
        return {}

    def measured(self) -> Metrics:
        return {}

    def adapted(self, metrics: Metrics) -> ExactProblem | None:
        """No β adapts here."""
        return None
