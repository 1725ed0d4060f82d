"""Update rules: how the parameters move. A rule works on a problem that a learner provides and never sees a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from policygrad.core.base import UpdateRule
from policygrad.core.kl_controllers import find_kl_penalties
from policygrad.core.metrics import Metrics, Sum, merge
from policygrad.core.settings import COUNT, setting
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm

# What a learner provides to an update rule for one rollout or minibatch. `GradientProblem` suffices for gradient steps; the other
# protocols are optional. Error messages name the class of the problem's attribute `learner`, if it has one.


@runtime_checkable
class GradientProblem(Protocol):
    """First order: the learner's gradients and optimizer."""

    def split(self, epoch: int, minibatches: int) -> Sequence[GradientProblem]:
        """Shuffle the rollout's groups for this epoch and split them into minibatches of full groups."""

    def accumulate(self) -> Metrics:
        """Add this problem's gradient of the loss to the learner's; return the metrics of the pass."""

    def descend(self) -> Metrics:
        """Clip the gradient, make one update and clear the gradient."""


@runtime_checkable
class CurvatureProblem(Protocol):
    """Second order, for trust regions. θ is the vector of the P trainable parameters; it stays at θ_old until `commit`."""

    def subsample(self, share: float) -> CurvatureProblem:
        """Return a problem with this share of the groups, at least one; the same groups at every call."""

    def gradient(self) -> tuple[Tensor, Metrics]:
        """Return (gradient [P] of the surrogate objective at θ_old, pointing uphill; metrics of the pass)."""

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        """Return F v [P], F the Hessian of mean KL(π_old‖π_θ) at θ_old, which is E[∇log π ∇log πᵀ] under the policy.

        The mean is over the sampled tokens' states. In each state the expectation is exact over the vocabulary, or, if `sampled`,
        estimated by the sampled token.
        """

    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        """Return (surrogate objective, mean KL(π_old‖π_θ) in nats per sampled token) at θ_old + delta; parameters stay."""

    def commit(self, delta: Tensor) -> None:
        """Move the parameters to θ_old + delta, bit for bit where `evaluate` measured."""

    def fit_critic(self) -> Metrics:
        """Make one update of the critic only; no effect without one."""


@runtime_checkable
class ShardedProblem(Protocol):
    """A curvature problem whose vectors are sharded over processes: each holds a part of every [P]."""

    def inner_product(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute ⟨a, b⟩ [] of two sharded vectors [P], bit-identical in all processes."""


@runtime_checkable
class AdaptiveProblem(GradientProblem, Protocol):
    """First order, with β adaptable before another round on the same rollout."""

    def measure(self) -> Metrics:
        """Return the metrics that `accumulate` would measure with the current parameters; empty during critic pre-training."""

    def adapt(self, metrics: Metrics) -> AdaptiveProblem | None:
        """Return the rollout with every adaptive β of KL(π_old‖π_θ) adapted to `kl_old/last`; None once all are in their band."""


ProblemT = TypeVar("ProblemT", GradientProblem, CurvatureProblem, AdaptiveProblem)


def require_problem(problem: object, kind: type[ProblemT], rule: object) -> ProblemT:
    """Return the problem if it implements the protocol `kind` that an update rule needs.

    Raises:
        ConfigError: it lacks methods; the message names them and the learner's class.
    """
    if isinstance(problem, kind):
        return problem
    methods = [name for name in dir(kind) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(problem, name, None))]
    learner = type(getattr(problem, "learner", problem)).__name__
    raise ConfigError(
        f"{type(rule).__name__} needs {kind.__name__}, and {learner} lacks {', '.join(missing)}: implement these (see "
        "policygrad.core.updates), or use update_rule=GradientSteps(), which needs split, accumulate and descend"
    )


@dataclass(frozen=True)
class GradientSteps(UpdateRule):
    """K = epochs × minibatches gradient steps per rollout; a minibatch consists of full groups."""

    epochs: int = setting(1, COUNT)
    minibatches: int = setting(1, COUNT)

    @property
    def updates(self) -> int:
        """K, the updates per rollout."""
        return self.epochs * self.minibatches

    @property
    def has_unit_ratios(self) -> bool:
        return self.updates == 1

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if self.updates == 1 and (adapted := find_kl_penalties(algorithm)):
            yield (
                f"{type(adapted[0]).__name__}.target adapts β to a KL measured before each gradient step, which is 0 before the "
                "only one: set update_rule=GradientSteps(epochs=4), or unset target"
            )

    def find_run_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        """In a custom loop the samples may be older than the policy, so that a penalty near π_old acts in a single step too."""
        for term in algorithm.terms:
            if algorithm.has_unit_ratios and term.constrained_kl == "kl_old":
                yield (
                    f"{type(term).__name__} keeps π_θ near π_old, and they are equal at a rollout's only gradient step: set "
                    "update_rule=GradientSteps(epochs=4), old_policy='sampler' if samples may be stale, or remove it"
                )

    @property
    def formula(self) -> str:
        if self.updates == 1:
            return "one gradient step"
        return f"{self.epochs} epochs × " * (self.epochs > 1) + f"{self.minibatches} minibatches"

    def __call__(self, problem: object) -> Metrics:
        problem = require_problem(problem, GradientProblem, self)  # type: ignore[type-abstract]
        metrics, last_epoch = Metrics(), Metrics()
        for epoch in range(self.epochs):
            last_epoch = Metrics()
            for minibatch in problem.split(epoch, self.minibatches):
                last_epoch = merge(last_epoch, minibatch.accumulate(), minibatch.descend())
            metrics = merge(metrics, last_epoch)
        return metrics | ({"kl_old/last": last_epoch["kl_old"]} if "kl_old" in last_epoch else {})


@dataclass(frozen=True)
class DualDescent(GradientSteps):
    """Rounds of epochs × minibatches gradient steps on one rollout, adapting β in between, until KL(π_old‖π_θ) is in
    [target/1.5, 1.5·target].

    Needs a `KLToOld` or `ExactKLToOld` with a target; the next rollout starts from the final β. Each of the at most `rounds` rounds
    continues from the weights of the previous one, so a KL that is too large shrinks again under the larger β.
    Source: Schulman et al. 2017 (PPO), sec. 4, whose rule is applied between rollouts.
    """

    epochs: int = setting(4, COUNT)
    rounds: int = setting(4, COUNT)

    @property
    def updates(self) -> int:
        """Maximum updates per rollout."""
        return self.rounds * self.epochs * self.minibatches

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if not find_kl_penalties(algorithm):
            yield (
                "DualDescent continues until the KL to the old policy is near a target, and no term has one: add "
                "KLToOld(target=0.01) or ExactKLToOld(target=0.01) (algorithm ppo_penalty has one), or use GradientSteps()"
            )

    @property
    def formula(self) -> str:
        gradient_steps = GradientSteps(self.epochs, self.minibatches).formula
        return f"{gradient_steps}, at most {self.rounds} rounds, until the KL is within its band"

    def __call__(self, problem: object) -> Metrics:
        problem = require_problem(problem, AdaptiveProblem, self)  # type: ignore[type-abstract]
        metrics, last = Metrics(), Metrics()
        for done in range(1, self.rounds + 1):
            metrics = merge(metrics, super().__call__(problem))
            after = problem.measure()
            if "kl_old" not in after:  # critic pre-training, or nothing sampled: the policy has not moved
                return metrics
            last = {
                f"{name}/last": metric for name, metric in after.items() if name == "kl_old" or name.startswith("beta/")
            }
            last["dual_rounds"] = Sum(float(done))
            adapted = problem.adapt(last)
            if adapted is None:
                break
            problem = adapted
        return metrics | last
