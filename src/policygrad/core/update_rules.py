"""How the parameters move, once the gradient is known. A rule is handed a problem and never sees a model."""

from __future__ import annotations

from dataclasses import dataclass

from policygrad.core.metrics import Metrics, merge
from policygrad.core.problems import GradientProblem, asked
from policygrad.core.protocols import UpdateRule
from policygrad.core.ranges import count


@dataclass(frozen=True)
class FirstOrder(UpdateRule):
    """K = epochs × minibatches gradient steps per rollout; a minibatch is a share of whole groups."""

    epochs: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        count(self, epochs=self.epochs, minibatches=self.minibatches)

    @property
    def updates(self) -> int:
        """K, updates per rollout."""
        return self.epochs * self.minibatches

    @property
    def formula(self) -> str:
        if self.updates == 1:
            return "one gradient step"
        return f"{self.epochs} epochs × " * (self.epochs > 1) + f"{self.minibatches} minibatches"

    def __call__(self, problem: object) -> Metrics:
        problem = asked(problem, GradientProblem, self)  # type: ignore[type-abstract]
        measured: Metrics = {}
        this: Metrics = {}
        for epoch in range(self.epochs):
            this = {}
            for minibatch in problem.split(epoch, self.minibatches):
                this = merge(this, minibatch.accumulate(), minibatch.descend())
            measured = merge(measured, this)
        return measured | ({"kl_old/last": this["kl_old"]} if "kl_old" in this else {})
