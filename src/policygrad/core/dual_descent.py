"""Dual descent: a first-order step that goes on with the same rollout until the KL is where it should be."""

from __future__ import annotations

from dataclasses import dataclass

from policygrad.core.metrics import Metrics, Sum, merge
from policygrad.core.problems import AdaptiveProblem, asked
from policygrad.core.ranges import count
from policygrad.core.update_rules import FirstOrder


@dataclass(frozen=True)
class DualDescent(FirstOrder):
    """Rounds of epochs × minibatches gradient steps on one rollout, β adapted in between, until its KL(π_old‖π_θ) lies in
    [target/1.5, 1.5·target].

    Needs a `KLToOld` or `ExactKLToOld` with a target; the β it ends with is where the next rollout begins. Each round goes on
    from the weights of the one before: a KL that is too large shrinks again under the larger β. At most `rounds` of them.
    Source: Schulman et al. 2017 (PPO), sec. 4, whose rule is applied between rollouts.
    """

    epochs: int = 4
    rounds: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        count(self, rounds=self.rounds)

    @property
    def updates(self) -> int:
        """K, updates per rollout, at most."""
        return self.rounds * self.epochs * self.minibatches

    @property
    def formula(self) -> str:
        once = FirstOrder(self.epochs, self.minibatches).formula
        return f"{once}, at most {self.rounds} rounds, until the KL is inside its band"

    def __call__(self, problem: object) -> Metrics:
        problem = asked(problem, AdaptiveProblem, self)  # type: ignore[type-abstract]
        measured: Metrics = {}
        ended: Metrics = {}
        for done in range(1, self.rounds + 1):
            measured = merge(measured, super().__call__(problem))
            after = problem.measured()
            if "kl_old" not in after:  # a critic that is fitted first, or nothing sampled: no policy has moved
                return measured
            ended = {
                f"{name}/last": metric for name, metric in after.items() if name == "kl_old" or name.startswith("beta/")
            }
            ended["dual_rounds"] = Sum(float(done))
            harder = problem.adapted(ended)
            if harder is None:
                break
            problem = harder
        return measured | ended
