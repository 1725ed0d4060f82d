"""Training on classic control until the environment steps are used up, and evaluation on new episodes."""

from __future__ import annotations

import difflib
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vjp

from policygrad.algorithms import A2C, NATURAL, PPO, PPO_PENALTY, REINFORCE, TRPO
from policygrad.core.aggregation import TokenMean
from policygrad.core.algorithm import Algorithm
from policygrad.core.auxiliary import Critic, explained_variance
from policygrad.core.batch import Batch, Forward
from policygrad.core.gae import GAE, NStep, Whiten
from policygrad.core.kl_controllers import adapt_penalties
from policygrad.core.metrics import Max, Mean, Metrics, Sum, masked_mean
from policygrad.core.objective import measure_forward, objective, surrogate, with_selected_tokens
from policygrad.core.ratios import Token
from policygrad.core.terms import ExactEntropy
from policygrad.core.trust_region import TrustRegion
from policygrad.core.updates import GradientSteps
from policygrad.core.validation import check_sampling
from policygrad.errors import ConfigError
from policygrad.lab.control.environments import Collector, Experience, Spaces, VectorEnvironments, environment_seeds
from policygrad.lab.control.policies import ControlPolicy, ControlValue, Distribution, Normaliser, OptimisedNetwork


def scatter_to_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Scatter [n] to [B, T], 0 off the mask."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


@dataclass(frozen=True, eq=False)
class ControlProblem:
    """A rollout, or some of its steps, as the problem of an update rule: n states in the order of `batch.mask`.

    A minibatch keeps the batch's rows and clears the mask elsewhere. Since advantages and targets are computed before, single steps
    can be selected, so minibatches have equal sizes however long episodes are.
    """

    policy: OptimisedNetwork[ControlPolicy]
    critic: OptimisedNetwork[ControlValue] | None
    seed: int  # seed of the order of steps, different for every rollout
    batch: Batch
    psi: Tensor
    states: Tensor  # [n, d]
    action: Tensor  # [n] or [n, k]
    old: Distribution  # π_old at the states
    algorithm: Algorithm

    # For gradient steps.

    def split(self, epoch: int, minibatches: int) -> list[ControlProblem]:
        """Split into minibatches of single steps, shuffled by (seed, update, epoch)."""
        if minibatches == 1:
            return [self]
        return [self._subset(chunk) for chunk in self._order(epoch).tensor_split(minibatches) if len(chunk)]

    def accumulate(self) -> Metrics:
        return self._policy_pass() | self._critic_pass()

    def descend(self) -> Metrics:
        norm = self.policy.descend()
        metrics: Metrics = {"grad_norm": Max(norm), "updates/taken": Sum(1.0)}
        return metrics | self._descend_critic()

    # For trust regions: θ is one vector of P parameters.

    def subsample(self, share: float) -> ControlProblem:
        """Select a share of the steps, at least one."""
        return self._subset(self._order(0)[: max(1, round(share * len(self.states)))])

    def gradient(self) -> tuple[Tensor, Metrics]:
        metrics = self._policy_pass()
        flat = torch.cat([-p.grad.flatten() for p in self.policy.network.parameters() if p.grad is not None])
        self.policy.adam.zero_grad(set_to_none=True)
        return flat, metrics

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        """Exact: the Hessian of mean KL(π_old‖π_θ) by double backward. Source: Schulman et al. 2015 (TRPO), appendix C.1."""
        if sampled:  # the mean of s sᵀv over the sampled actions, s = ∇log π, by forward mode, then reverse mode

            def logp(parameters: dict[str, Tensor]) -> Tensor:
                return functional_call(self.policy.network, parameters, (self.states,)).logp(self.action)  # type: ignore[no-any-return]

            along = jvp(logp, (self._parameters,), (self._split(v),))[1]
            (product,) = vjp(logp, self._parameters)[1](along / len(self.states))
            return torch.cat([product[name].flatten() for name in self._parameters])
        parameters = list(self.policy.network.parameters())
        now: Distribution = self.policy.network(self.states)
        kl = now.at(torch.ones(len(self.states), dtype=torch.bool)).kl(now).mean()
        first = torch.autograd.grad(kl, parameters, create_graph=True)
        along = torch.cat([g.flatten() for g in first]) @ v
        return torch.cat([g.flatten() for g in torch.autograd.grad(along, parameters)])

    @torch.no_grad()
    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        new: Distribution = functional_call(self.policy.network, self._moved(delta), (self.states,))
        out = self._forward(new)
        out = replace(out, logp=out.logp.double())
        value = objective(out, self.batch, self.psi, self.algorithm)
        return float(value), masked_mean(scatter_to_mask(self.old.kl(new), self.batch.mask), self.batch.mask).value

    @torch.no_grad()
    def commit(self, delta: Tensor) -> None:
        moved = self._moved(delta)
        for name, parameter in self.policy.network.named_parameters():
            parameter.copy_(moved[name])

    def fit_critic(self) -> Metrics:
        return {} if self.critic is None else self._critic_pass() | self._descend_critic()

    # For adapting β to the KL.

    @torch.no_grad()
    def measure(self) -> Metrics:
        return self._policy_pass(learning=False)

    def adapt(self, metrics: Metrics) -> ControlProblem | None:
        algorithm = adapt_penalties(self.algorithm, self.batch, metrics)
        return None if algorithm is None else replace(self, algorithm=algorithm)

    # Shared by these.

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1009 + epoch) % 2**63)
        return torch.randperm(len(self.states), generator=generator)

    def _subset(self, rows: Tensor) -> ControlProblem:
        rows = rows.sort().values
        chosen = torch.zeros(len(self.states), dtype=torch.bool)
        chosen[rows] = True
        mask = torch.zeros_like(self.batch.mask).masked_scatter(self.batch.mask, chosen)
        batch = replace(self.batch, mask=mask)
        return replace(self, batch=batch, states=self.states[rows], action=self.action[rows], old=self.old.at(rows))

    def _forward(self, distribution: Distribution) -> Forward:
        mask, needs = self.batch.mask, self.algorithm.forward_needs | self.algorithm.selection_needs
        return Forward(
            scatter_to_mask(distribution.logp(self.action), mask),
            entropy=scatter_to_mask(distribution.entropy(), mask) if "entropy" in needs else None,
            kl_old=scatter_to_mask(self.old.kl(distribution), mask) if "kl_old" in needs else None,
        )

    def _policy_pass(self, learning: bool = True) -> Metrics:
        out = self._forward(self.policy.network(self.states))
        batch = with_selected_tokens(out, self.batch, self.psi, self.algorithm)
        coefficients = self.algorithm.all_coefficients(batch)
        if learning:
            torch.autograd.backward(surrogate(out, batch, self.psi, self.algorithm, coefficients))
        metrics = measure_forward(out, batch, self.psi, self.algorithm, coefficients)
        return metrics | {"objective": Mean(metrics["objective"].value)}

    def _critic_pass(self) -> Metrics:
        critic, value, batch = self.algorithm.critic, self.critic, self.batch
        if critic is None or value is None or batch.returns is None:
            return {}
        each = critic.loss(scatter_to_mask(value.network(self.states), batch.mask), batch, batch.returns)
        loss = (TokenMean()(batch.mask, batch.group).to(each.dtype) * each).sum()
        torch.autograd.backward(loss)
        return {"value_loss": Mean(float(loss.detach()))}

    def _descend_critic(self) -> Metrics:
        return {} if self.critic is None else {"value_grad_norm": Max(self.critic.descend())}

    @property
    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.policy.network.named_parameters()}

    def _split(self, v: Tensor) -> dict[str, Tensor]:
        """Split a vector into tensors shaped like the parameters."""
        parameters = self._parameters
        pieces = torch.split(v, [p.numel() for p in parameters.values()])
        return {n: piece.view_as(p) for (n, p), piece in zip(parameters.items(), pieces, strict=True)}

    def _moved(self, delta: Tensor) -> dict[str, Tensor]:
        return {name: self._parameters[name] + change for name, change in self._split(delta).items()}


# The changes that the named algorithms need for classic control, with reasons.
#
# For all: there is no reference model, so no KL to one. Values are in the reward's units, so the critic's error is not clipped.
# With a critic γ = 0.99, so that values stay finite however long an episode is. The critic's learning rate is 5e-3, because its
# targets are large: at a reward of 1 per step V is about 100, and at 1e-3 it gets there so late that truncated episodes look as bad
# as failed ones. `reinforce` has no critic and uses γ = 1: the remaining undiscounted return is an unbiased weight of ∇log π
# (without a factor γ^t).

GAMMA = 0.99


@dataclass(frozen=True)
class Settings:
    """Settings outside the equation."""

    environments: int = 8
    """N, the number of environments."""
    rollout: int = 128
    """Steps of each environment per rollout."""
    lr: float | None = 1e-3
    """Adam's initial learning rate for the policy, which falls linearly to 0. None: the algorithm does not use one."""
    clip: float = 0.5
    """Maximum gradient norm of each network."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of policy and critic."""
    normalise: bool = False
    """Normalise observations by the statistics so far."""

    def __post_init__(self) -> None:
        for name in ("environments", "rollout", "lr", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"Settings.{name} must be above 0, not {value}")


@dataclass(frozen=True)
class Preset:
    """An algorithm's configuration for classic control."""

    algorithm: Algorithm
    settings: Settings


_critic = Critic(lr=5e-3, lam=0.95, gamma=GAMMA, clip=0.0)
_ppo: dict[str, Any] = {
    "advantage": (GAE(GAMMA, 0.95), Whiten()),
    "update_rule": GradientSteps(epochs=10, minibatches=4),
    "critic": _critic,
}
_trpo: dict[str, Any] = {"advantage": (GAE(GAMMA, 0.95),), "critic": _critic}

PRESETS: dict[str, Preset] = {
    p.algorithm.name: p
    for p in (
        # For a network of 64 units, a rollout's data is not used up after four passes.
        Preset(replace(PPO, shaping=(), **_ppo), Settings(lr=1e-3)),
        Preset(replace(PPO_PENALTY, **_ppo), Settings(lr=1e-3)),
        # A critic trained from scratch needs more than five steps per rollout.
        Preset(replace(TRPO, update_rule=TrustRegion(0.01, critic_steps=30), **_trpo), Settings(lr=None)),
        Preset(
            replace(NATURAL, update_rule=TrustRegion(0.01, line_search=False, critic_steps=30), **_trpo),
            Settings(lr=None),
        ),
        # One update per rollout, so rollouts are short. The exact entropy, a term with a graph, costs nothing for a few actions.
        Preset(
            replace(A2C, advantage=(NStep(5, GAMMA),), terms=(ExactEntropy(0.01),), critic=_critic),
            Settings(rollout=16, lr=1e-3),
        ),
        Preset(REINFORCE, Settings(rollout=64, lr=5e-3)),  # the named algorithm itself, on complete episodes
    )
}


def find_preset(name: str) -> Preset:
    """Return an algorithm's configuration for classic control."""
    key = name.strip().lower().replace("-", "_")
    if key not in PRESETS:
        near = difflib.get_close_matches(key, PRESETS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no algorithm {name!r} on classic control: {hint}there are {', '.join(PRESETS)}")
    return PRESETS[key]


def with_gamma(algorithm: Algorithm, gamma: float) -> Algorithm:
    """Change γ in the algorithm's advantages and its critic's targets.

    Raises:
        ConfigError: No part of it discounts.
    """

    def change(part: Any) -> Any:
        return replace(part, gamma=gamma) if hasattr(part, "gamma") else part

    if not any(hasattr(part, "gamma") for part in (*algorithm.advantage, algorithm.critic)):
        raise ConfigError(f"{algorithm.name} does not discount: omit gamma, or use ppo, trpo or a2c")
    return replace(algorithm, advantage=tuple(map(change, algorithm.advantage)), critic=change(algorithm.critic))


SUPPORTED_FIELDS = frozenset({"logp_old", "values", "returns", "truncated", "token_reward"})
"""The Batch fields available on classic control."""


def check_control_algorithm(algorithm: Algorithm) -> None:
    """Raise ConfigError for an algorithm that classic control does not support, with the reason and a remedy."""
    check_sampling(algorithm, 1, 1.0)
    missing, critic = sorted(algorithm.needs - SUPPORTED_FIELDS), algorithm.critic
    single_steps = isinstance(algorithm.ratio, Token) and isinstance(algorithm.aggregation, TokenMean)
    problem = ""
    if missing:
        problem = f"a part reads Batch.{missing[0]}, which episodes of an environment do not have: omit it (shaping=(), terms=())"
    elif algorithm.old_policy == "sampler":
        problem = (
            "old_policy='sampler' reads an engine's log-probabilities, but here the policy itself acts: use 'learner'"
        )
    elif algorithm.replaces_rows or algorithm.gate.requires_full_groups:
        problem = (
            "a vine tries several actions in one state, and these environments cannot be set back to one: use trpo, its "
            "single-path variant"
        )
    elif algorithm.filters:
        problem = (
            "filters look at the scores of a prompt's completions, and an environment has no prompts: set filters=()"
        )
    elif critic is not None and (critic.pretrain or critic.backbone != "separate"):
        problem = "the critic is a separate network that learns with the policy: leave pretrain and backbone at their defaults"
    elif algorithm.update_rule.minibatches > 1 and not single_steps:
        problem = (
            "minibatches hold single steps, for which a ratio or a mean over complete episodes has no meaning: set ratio=Token() "
            "and aggregation=TokenMean(), or minibatches=1"
        )
    if problem:
        raise ConfigError(f"{algorithm.name}: {problem}")


class ControlLearner:
    """The policy and the critic, each with its Adam; the learning rates fall linearly to 0."""

    def __init__(self, spaces: Spaces, algorithm: Algorithm, settings: Settings, seed: int) -> None:
        """Raises ConfigError for an unsupported algorithm, or a missing learning rate."""
        check_control_algorithm(algorithm)
        if settings.lr is None and algorithm.update_rule.uses_lr:
            raise ConfigError(f"{type(algorithm.update_rule).__name__} needs a learning rate: set Settings(lr=1e-3)")
        generator = torch.Generator().manual_seed(seed)
        self.seed, self.updates = seed, 0
        policy = ControlPolicy(spaces, settings.hidden, generator)
        self.policy = OptimisedNetwork.create(policy, settings.lr or 0.0, settings.clip)
        self.critic: OptimisedNetwork[ControlValue] | None = None
        if algorithm.critic is not None:
            value = ControlValue(spaces, settings.hidden, generator)
            self.critic = OptimisedNetwork.create(value, algorithm.critic.learning_rate(settings.lr), settings.clip)
        self.normaliser = Normaliser.create(spaces.features) if settings.normalise else None

    def states(self, observation: Tensor) -> Tensor:
        """Return the networks' input."""
        return observation if self.normaliser is None else self.normaliser(observation)

    @torch.no_grad()
    def distribution(self, observation: Tensor) -> Distribution:
        """Return π at observations [n, d]."""
        distribution: Distribution = self.policy.network(self.states(observation))
        return distribution

    @torch.no_grad()
    def evaluate(self, experience: Experience, needs: frozenset[str]) -> Batch:
        """Add log π_old and the critic's values to the rollout's batch, including the value after a segment that was cut off."""
        batch, mask = experience.batch, experience.batch.mask
        if "logp_old" in needs:
            logp = self.distribution(experience.observation[mask]).logp(experience.action[mask])
            batch = replace(batch, logp_old=scatter_to_mask(logp, mask))
        if self.critic is not None:
            values = self.critic.network(self.states(experience.observation[mask]))
            after = self.critic.network(self.states(experience.after))
            assert batch.truncated is not None  # set in every rollout
            bootstrap = torch.where(batch.truncated, after, 0)
            batch = replace(batch, values=scatter_to_mask(values, mask), bootstrap=bootstrap)
        return batch

    def update(self, experience: Experience, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """Apply `algorithm.update_rule` to one rollout.

        Returns:
            Its metrics; kl, the exact KL(π_old‖π_θ) at the states visited; entropy; and the critic's explained_variance of the
            targets before it is fitted to them.
        """
        mask = batch.mask
        states, action = self.states(experience.observation[mask]), experience.action[mask]
        with torch.no_grad():
            old: Distribution = self.policy.network(states)
        seed = self.seed * 1_000_003 + self.updates
        problem = ControlProblem(self.policy, self.critic, seed, batch, psi, states, action, old, algorithm)
        metrics = algorithm.update_rule(problem)
        self.updates += 1
        with torch.no_grad():
            new: Distribution = self.policy.network(states)
            kl = max(0.0, float(old.kl(new).mean()))  # rounding may leave one of 1e-9 below 0
            metrics |= {"kl": Mean(kl), "entropy": Mean(float(new.entropy().mean()))}
        if batch.values is not None and batch.returns is not None:
            metrics["explained_variance"] = Mean(explained_variance(batch.values, batch.returns, mask))
        return metrics

    def scale_lr(self, share: float) -> None:
        """Set the learning rates to a share of their initial values."""
        self.policy.scale_lr(share)
        if self.critic is not None:
            self.critic.scale_lr(share)


RECENT_EPISODES = 100  # episodes in the mean return of a progress line


@dataclass(frozen=True)
class Update:
    """A point of the training curve: one rollout and its updates."""

    steps: int  # environment steps so far
    episodes: int  # episodes that ended so far
    mean_return: float | None  # mean return of the last 100 episodes; None before the first has ended
    entropy: float  # nats per step, after the update
    kl: float  # nats per step, KL(π_old‖π_θ) after the update, exact at the states visited
    explained_variance: float | None
    seconds: float  # seconds since the start of training
    accepted: bool | None = None  # True if a trust region's step was accepted


@dataclass(frozen=True)
class EvalEpisodes:
    """Returns of evaluation episodes."""

    returns: tuple[float, ...]
    greedy: bool  # True if actions were the most probable ones, False if they were sampled

    @property
    def mean(self) -> float:
        return statistics.fmean(self.returns)

    @property
    def error(self) -> float | None:
        """The mean's standard error; None for a single episode."""
        n = len(self.returns)
        return statistics.stdev(self.returns) / n**0.5 if n > 1 else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"mean": self.mean, "standard_error": self.error}


@dataclass(frozen=True, eq=False)
class ControlResult:
    """The result of training."""

    learner: ControlLearner
    curve: tuple[Update, ...]


def train_control(
    environments: VectorEnvironments,
    algorithm: Algorithm,
    settings: Settings,
    *,
    steps: int,
    seed: int = 0,
    on_update: Callable[[Update], None] | None = None,
) -> ControlResult:
    """Train for `steps` environment steps; an algorithm without a critic finishes its last episodes.

    The result depends only on the seed, not on other random numbers in the process.

    Raises:
        ConfigError: An unsupported algorithm, or fewer steps than environments.
    """
    if steps < environments.number:
        raise ConfigError(
            f"{steps} environment steps are less than one in each of {environments.number} environments: take more"
        )
    learner = ControlLearner(environments.spaces, algorithm, settings, seed)
    memory = algorithm.init_state()
    collect, draws = Collector(environments, seed), torch.Generator().manual_seed(seed)
    recent: deque[float] = deque(maxlen=RECENT_EPISODES)
    curve, done, episodes, start = list[Update](), 0, 0, time.perf_counter()

    def act(observation: Tensor) -> Tensor:
        return learner.distribution(observation).sample(draws)

    while (remaining := (steps - done) // environments.number) > 0:
        experience = collect(act, min(settings.rollout, remaining), full_episodes=algorithm.critic is None)
        learner.scale_lr(1 - done / steps)
        now = algorithm.with_state(memory)
        batch = learner.evaluate(experience, now.needs)
        psi, batch = now.compute_advantages(batch), now.add_critic_targets(batch)
        metrics = learner.update(experience, batch, psi, now)
        memory = algorithm.update_state(memory, batch, metrics)
        if learner.normaliser is not None:
            learner.normaliser = learner.normaliser.observe(experience.observation[batch.mask])
        done, episodes = done + experience.steps, episodes + len(experience.finished)
        recent.extend(experience.finished)
        accepted, variance = metrics.get("trust_region/accepted"), metrics.get("explained_variance")
        update = Update(
            done,
            episodes,
            statistics.fmean(recent) if recent else None,
            metrics["entropy"].value,
            metrics["kl"].value,
            None if variance is None else variance.value,
            time.perf_counter() - start,
            None if accepted is None else accepted.value == 1,
        )
        curve.append(update)
        if on_update is not None:
            on_update(update)
    return ControlResult(learner, tuple(curve))


def evaluate_control(
    learner: ControlLearner,
    environments: VectorEnvironments,
    episodes: int = 100,
    *,
    seed: int = 0,
    greedy: bool = False,
) -> EvalEpisodes:
    """Evaluate on new episodes, equally many in each environment, since the first ones to end would be the short ones."""
    draws = torch.Generator().manual_seed(seed)
    number = environments.number
    remaining = torch.tensor([episodes // number + (i < episodes % number) for i in range(number)])
    observation = environments.reset(environment_seeds(seed, number))
    episode_returns, returns = torch.zeros(number).double(), list[float]()
    while bool((remaining > 0).any()):
        distribution = learner.distribution(observation)
        step = environments.step(distribution.mode() if greedy else distribution.sample(draws))
        observation, ended = step.observation, step.terminated | step.truncated
        episode_returns += step.reward
        returns += episode_returns[ended & (remaining > 0)].tolist()
        remaining -= ended.long()
        episode_returns[ended] = 0
    return EvalEpisodes(tuple(returns), greedy)
