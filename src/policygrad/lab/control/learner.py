"""The two networks and their optimisers: a rollout evaluated, and learned from."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.critic import explained_variance
from policygrad.core.metrics import Mean, Metrics
from policygrad.errors import ConfigError
from policygrad.lab.control.environments import Spaces
from policygrad.lab.control.networks import Optimised
from policygrad.lab.control.policies import ControlPolicy, ControlValue, Distribution, Normaliser
from policygrad.lab.control.presets import Settings, check
from policygrad.lab.control.problem import ControlProblem, placed
from policygrad.lab.control.rollout import Experience


class ControlLearner:
    """The policy's and the critic's weights, each with its Adam; the learning rates fall to 0 along a line."""

    def __init__(self, spaces: Spaces, algorithm: Algorithm, settings: Settings, seed: int) -> None:
        """Raises ConfigError for what an algorithm cannot be here, and for a learning rate that it lacks."""
        check(algorithm)
        if settings.lr is None and algorithm.step.uses_lr:
            raise ConfigError(f"{type(algorithm.step).__name__} needs a learning rate: set Settings(lr=…), say 1e-3")
        generator = torch.Generator().manual_seed(seed)
        self.seed, self.updates = seed, 0
        policy = ControlPolicy(spaces, settings.hidden, generator)
        self.policy = Optimised.fresh(policy, settings.lr or 0.0, settings.clip)
        self.critic: Optimised[ControlValue] | None = None
        if algorithm.critic is not None:
            value = ControlValue(spaces, settings.hidden, generator)
            self.critic = Optimised.fresh(value, algorithm.critic.rate(settings.lr), settings.clip)
        self.normaliser = Normaliser.fresh(spaces.features) if settings.normalise else None

    def states(self, observation: Tensor) -> Tensor:
        """What the networks read."""
        return observation if self.normaliser is None else self.normaliser(observation)

    @torch.no_grad()
    def distribution(self, observation: Tensor) -> Distribution:
        """π at observations [n, d]."""
        found: Distribution = self.policy.network(self.states(observation))
        return found

    @torch.no_grad()
    def evaluate(self, experience: Experience, needs: frozenset[str]) -> Batch:
        """The rollout's batch with log π_old, and the critic's values, that of the state after a piece that was cut off too."""
        batch, mask = experience.batch, experience.batch.mask
        if "logp_old" in needs:
            logp = self.distribution(experience.observation[mask]).logp(experience.action[mask])
            batch = replace(batch, logp_old=placed(logp, mask))
        if "entropy" in needs:
            batch = replace(batch, entropy=placed(self.distribution(experience.observation[mask]).entropy(), mask))
        if self.critic is not None:
            values = self.critic.network(self.states(experience.observation[mask]))
            after = self.critic.network(self.states(experience.after))
            bootstrap = torch.where(cut(batch), after, 0)
            batch = replace(batch, values=placed(values, mask), bootstrap=bootstrap)
        return batch

    def update(self, experience: Experience, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """One rollout's updates, as `algorithm.step` takes them, and what became of the policy: kl, exact, KL(π_old‖π_θ) at the
        states visited, entropy, and of the critic: explained_variance of the targets, before it is fitted to them."""
        mask = batch.mask
        states, action = self.states(experience.observation[mask]), experience.action[mask]
        with torch.no_grad():
            old: Distribution = self.policy.network(states)
        seed = self.seed * 1_000_003 + self.updates
        problem = ControlProblem(self.policy, self.critic, seed, batch, psi, states, action, old, algorithm)
        metrics = algorithm.step(problem)
        self.updates += 1
        with torch.no_grad():
            new: Distribution = self.policy.network(states)
            kl = max(0.0, float(old.kl(new).mean()))  # rounding may leave one of 1e-9 below 0
            metrics |= {"kl": Mean(kl), "entropy": Mean(float(new.entropy().mean()))}
        if batch.values is not None and batch.returns is not None:
            metrics["explained_variance"] = Mean(explained_variance(batch.values, batch.returns, mask))
        return metrics

    def slow(self, share: float) -> None:
        """Sets the learning rates to this share of what they began with."""
        self.policy.slow(share)
        if self.critic is not None:
            self.critic.slow(share)


def cut(batch: Batch) -> Tensor:
    """[B] bool; pieces of episodes that did not terminate."""
    assert batch.truncated is not None  # every rollout says so
    return batch.truncated
