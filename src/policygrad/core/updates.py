"""How the parameters move, once the gradient is known. A rule is handed a problem and never sees a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from policygrad.core.base import UpdateRule
from policygrad.core.masked import check_count
from policygrad.core.metrics import Metrics, Sum, merge
from policygrad.errors import ConfigError

# What an update rule may ask of a learner about one rollout, or one minibatch of it, in three pieces.
#
# A rule names the piece that it needs, and a learner has those that it can give: `GradientProblem` is all that gradient steps
# take. A problem that has an attribute `learner` is called by that one's class in messages.


@runtime_checkable
class GradientProblem(Protocol):
    """First order: the learner's own gradients and optimiser."""

    def split(self, epoch: int, minibatches: int) -> Sequence[GradientProblem]:
        """The rollout's groups, shuffled for this epoch, as minibatches of whole groups."""
        ...

    def accumulate(self) -> Metrics:
        """Adds this problem's gradient of the loss to the learner's; returns what was measured on the way."""
        ...

    def descend(self) -> Metrics:
        """Clips the gradient, takes one update and clears it."""
        ...


@runtime_checkable
class CurvatureProblem(Protocol):
    """All that a trust region needs. θ is one vector of the P parameters that train, in the precision the learner keeps
    them in, around θ_old, where it stands until `commit`."""

    def subsample(self, share: float) -> CurvatureProblem:
        """This share of the groups, at least one: the same ones whenever this problem is asked."""
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

    def fit_critic(self) -> Metrics:
        """One update of the critic alone; nothing without one."""
        ...


@runtime_checkable
class ShardedProblem(Protocol):
    """A curvature problem whose vectors are spread over processes: each has a share of every [P], and all have the same numbers."""

    def inner_product(self, a: Tensor, b: Tensor) -> Tensor:
        """⟨a, b⟩ [] of two vectors [P], of which this process has shares: the same in all processes, to the bit."""
        ...


@runtime_checkable
class AdaptiveProblem(GradientProblem, Protocol):
    """First order, and β can be adapted before going on with the same rollout."""

    def measure(self) -> Metrics:
        """What `accumulate` would measure with the parameters as they are; nothing while a critic is fitted first."""
        ...

    def adapt(self, metrics: Metrics) -> AdaptiveProblem | None:
        """The same rollout with each β that adapts to KL(π_old‖π_θ) moved by `kl_old/last`; None once all are in their band."""
        ...


ProblemT = TypeVar("ProblemT", GradientProblem, CurvatureProblem, AdaptiveProblem)


def require_problem(problem: object, kind: type[ProblemT], rule: object) -> ProblemT:
    """The problem, if it is of the kind that an update rule needs.

    Raises:
        ConfigError: it lacks methods, which are named, with the learner's class.
    """
    if isinstance(problem, kind):
        return problem
    methods = [name for name in dir(kind) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(problem, name, None))]
    learner = type(getattr(problem, "learner", problem)).__name__
    raise ConfigError(
        f"{type(rule).__name__} asks a learner for a {kind.__name__}, and {learner} lacks {', '.join(missing)}: give it these "
        "(policygrad.core.updates says what they are), or take update_rule=GradientSteps(), which needs split, accumulate and descend"
    )


@dataclass(frozen=True)
class GradientSteps(UpdateRule):
    """K = epochs × minibatches gradient steps per rollout; a minibatch is a share of whole groups."""

    epochs: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        check_count(self, epochs=self.epochs, minibatches=self.minibatches)

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
        problem = require_problem(problem, GradientProblem, self)  # type: ignore[type-abstract]
        measured: Metrics = {}
        this: Metrics = {}
        for epoch in range(self.epochs):
            this = {}
            for minibatch in problem.split(epoch, self.minibatches):
                this = merge(this, minibatch.accumulate(), minibatch.descend())
            measured = merge(measured, this)
        return measured | ({"kl_old/last": this["kl_old"]} if "kl_old" in this else {})


# Dual descent: a first-order step that goes on with the same rollout until the KL is where it should be.


@dataclass(frozen=True)
class DualDescent(GradientSteps):
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
        check_count(self, rounds=self.rounds)

    @property
    def updates(self) -> int:
        """K, updates per rollout, at most."""
        return self.rounds * self.epochs * self.minibatches

    @property
    def formula(self) -> str:
        gradient_steps = GradientSteps(self.epochs, self.minibatches).formula
        return f"{gradient_steps}, at most {self.rounds} rounds, until the KL is inside its band"

    def __call__(self, problem: object) -> Metrics:
        problem = require_problem(problem, AdaptiveProblem, self)  # type: ignore[type-abstract]
        measured: Metrics = {}
        ended: Metrics = {}
        for done in range(1, self.rounds + 1):
            measured = merge(measured, super().__call__(problem))
            after = problem.measure()
            if "kl_old" not in after:  # a critic that is fitted first, or nothing sampled: no policy has moved
                return measured
            ended = {
                f"{name}/last": metric for name, metric in after.items() if name == "kl_old" or name.startswith("beta/")
            }
            ended["dual_rounds"] = Sum(float(done))
            harder = problem.adapt(ended)
            if harder is None:
                break
            problem = harder
        return measured | ended
