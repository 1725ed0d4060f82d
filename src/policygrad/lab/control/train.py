"""Rollouts and updates until the environment steps are used up, and the mean return of fresh episodes."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.metrics import Metrics
from policygrad.errors import ConfigError
from policygrad.lab.control.environments import Environments
from policygrad.lab.control.learner import ControlLearner
from policygrad.lab.control.presets import Settings
from policygrad.lab.control.rollout import Collector, seeds

RECENT = 100
"""Training episodes whose mean return a progress line shows."""


@dataclass(frozen=True)
class Update:
    """One rollout and what was learned from it: a point of the training curve."""

    steps: int
    """Environment steps so far."""
    episodes: int
    """Episodes that ended so far."""
    mean_return: float | None
    """Of the last 100 episodes; None before the first has ended."""
    entropy: float
    """Nats a step, after the update."""
    kl: float
    """Nats a step, KL(π_old‖π_θ) after the update, exact at the states visited."""
    explained_variance: float | None
    seconds: float
    """Since training began."""
    accepted: bool | None = None
    """Whether a trust region's step was taken."""


@dataclass(frozen=True)
class FreshEpisodes:
    """Returns of fresh episodes."""

    returns: tuple[float, ...]
    greedy: bool
    """Whether the most probable action was taken, or one drawn from the policy."""

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
class Trained:
    """What training ends with."""

    learner: ControlLearner
    algorithm: Algorithm
    """Its parts with the memory of every rollout."""
    curve: tuple[Update, ...]


def train(
    environments: Environments,
    algorithm: Algorithm,
    settings: Settings,
    *,
    steps: int,
    seed: int = 0,
    watch: Callable[[Update], None] | None = None,
) -> Trained:
    """Trains for `steps` environment steps; an algorithm without a critic finishes the episodes it began.

    The same every time for the same seed, whatever other random numbers the process draws.

    Raises:
        ConfigError: an algorithm that cannot be had on classic control; fewer steps than there are environments.
    """
    if steps < environments.number:
        raise ConfigError(
            f"{steps} environment steps are less than one in each of {environments.number}: take more steps"
        )
    learner = ControlLearner(environments.spaces, algorithm, settings, seed)
    memory = algorithm.init()
    collect, draws = Collector(environments, seed), torch.Generator().manual_seed(seed)
    recent: deque[float] = deque(maxlen=RECENT)
    curve, done, episodes, began = list[Update](), 0, 0, time.perf_counter()

    def act(observation: Tensor) -> Tensor:
        return learner.distribution(observation).sample(draws)

    while (left := (steps - done) // environments.number) > 0:
        experience = collect(act, min(settings.rollout, left), whole=algorithm.critic is None)
        learner.slow(1 - done / steps)
        now = algorithm.at(memory)
        batch = learner.evaluate(experience, now.needs)
        psi, batch = now.advantages(batch), now.with_targets(batch)
        metrics = learner.update(experience, batch, psi, now)
        memory = algorithm.update(memory, batch, metrics)
        if learner.normaliser is not None:
            learner.normaliser = learner.normaliser.observe(experience.observation[batch.mask])
        done, episodes = done + experience.steps, episodes + len(experience.finished)
        recent.extend(experience.finished)
        curve.append(_update(metrics, done, episodes, recent, time.perf_counter() - began))
        if watch is not None:
            watch(curve[-1])
    return Trained(learner, algorithm.at(memory), tuple(curve))


def _update(metrics: Metrics, steps: int, episodes: int, recent: deque[float], seconds: float) -> Update:
    accepted = metrics.get("trust_region/accepted")
    variance = metrics.get("explained_variance")
    return Update(
        steps,
        episodes,
        statistics.fmean(recent) if recent else None,
        metrics["entropy"].value,
        metrics["kl"].value,
        None if variance is None else variance.value,
        seconds,
        None if accepted is None else accepted.value == 1,
    )


def evaluate(
    learner: ControlLearner, environments: Environments, episodes: int = 100, *, seed: int = 0, greedy: bool = False
) -> FreshEpisodes:
    """The returns of fresh episodes, as many in each environment as in any other: the first to end would be the short ones."""
    draws = torch.Generator().manual_seed(seed)
    number = environments.number
    left = torch.tensor([episodes // number + (i < episodes % number) for i in range(number)])
    observation, playing, returns = environments.reset(seeds(seed, number)), torch.zeros(number).double(), list[float]()
    while bool((left > 0).any()):
        distribution = learner.distribution(observation)
        step = environments.step(distribution.mode() if greedy else distribution.sample(draws))
        observation, ended = step.observation, step.terminated | step.truncated
        playing += step.reward
        returns += playing[ended & (left > 0)].tolist()
        left -= ended.long()
        playing[ended] = 0
    return FreshEpisodes(tuple(returns), greedy)
