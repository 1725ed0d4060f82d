"""The two networks and their optimisers: a rollout scored, and learned from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.critic import explained_variance
from policygrad.core.metrics import Mean, Metrics
from policygrad.lab.control.environments import Spaces
from policygrad.lab.control.policies import Distribution, Normaliser, Policy, Value
from policygrad.lab.control.presets import Settings, check
from policygrad.lab.control.problem import ControlProblem, placed
from policygrad.lab.control.rollout import Experience


class ControlLearner:
    """The policy's and the critic's weights, each with its Adam; the learning rates fall to 0 along a line."""

    def __init__(self, spaces: Spaces, algorithm: Algorithm, settings: Settings, seed: int) -> None:
        """Raises ValueError for what an algorithm cannot be here, and for a learning rate that it lacks."""
        check(algorithm)
        if settings.lr is None and algorithm.step.uses_lr:
            raise ValueError(f"{type(algorithm.step).__name__} needs a learning rate: set Settings(lr=…), say 1e-3")
        generator = torch.Generator().manual_seed(seed)
        self.seed, self.clip, self.updates = seed, settings.clip, 0
        self.policy = Policy(spaces, settings.hidden, generator)
        self.adam = torch.optim.Adam(self.policy.parameters(), lr=settings.lr or 0.0, eps=1e-5)
        self.critic: Value | None = None
        if algorithm.critic is not None:
            self.critic = Value(spaces, settings.hidden, generator)
            rate = algorithm.critic.rate(settings.lr)
            self.critic_adam = torch.optim.Adam(self.critic.parameters(), lr=rate, eps=1e-5)
        self.normaliser = Normaliser.fresh(spaces.features) if settings.normalise else None

    def states(self, observation: Tensor) -> Tensor:
        """What the networks read."""
        return observation if self.normaliser is None else self.normaliser(observation)

    @torch.no_grad()
    def distribution(self, observation: Tensor) -> Distribution:
        """π at observations [n, d]."""
        found: Distribution = self.policy(self.states(observation))
        return found

    @torch.no_grad()
    def score(self, experience: Experience, needs: frozenset[str]) -> Batch:
        """The rollout's batch with log π_old, and the critic's values, that of the state after a piece that was cut off too."""
        batch, mask = experience.batch, experience.batch.mask
        if "logp_old" in needs:
            logp = self.distribution(experience.observation[mask]).logp(experience.action[mask])
            batch = replace(batch, logp_old=placed(logp, mask))
        if self.critic is not None:
            values = self.critic(self.states(experience.observation[mask]))
            after = self.critic(self.states(experience.after))
            bootstrap = torch.where(cut(batch), after, 0)
            batch = replace(batch, values=placed(values, mask), bootstrap=bootstrap)
        return batch

    def update(self, experience: Experience, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """One rollout's steps, as `algorithm.step` takes them, and what became of the policy: kl, exact, KL(π_old‖π_θ) at the
        states visited, entropy, and of the critic: explained_variance of the targets, before it is fitted to them."""
        mask = batch.mask
        states, action = self.states(experience.observation[mask]), experience.action[mask]
        with torch.no_grad():
            old: Distribution = self.policy(states)
        problem = ControlProblem(self, batch, psi, states, action, old, algorithm)
        metrics = algorithm.step(problem)
        self.updates += 1
        with torch.no_grad():
            new: Distribution = self.policy(states)
            kl = max(0.0, float(old.kl(new).mean()))  # rounding may leave one of 1e-9 below 0
            metrics |= {"kl": Mean(kl), "entropy": Mean(float(new.entropy().mean()))}
        if batch.values is not None and batch.returns is not None:
            metrics["explained_variance"] = Mean(explained_variance(batch.values, batch.returns, mask))
        return metrics

    def slow(self, share: float) -> None:
        """Sets the learning rates to this share of what they began with."""
        for adam in self.optimizers:
            for group in adam.param_groups:
                group["lr"] = share * group.setdefault("initial_lr", group["lr"])

    @property
    def optimizers(self) -> Iterator[torch.optim.Adam]:
        yield self.adam
        if self.critic is not None:
            yield self.critic_adam


def cut(batch: Batch) -> Tensor:
    """[B] bool; pieces of episodes that did not terminate."""
    assert batch.truncated is not None  # every rollout says so
    return batch.truncated
