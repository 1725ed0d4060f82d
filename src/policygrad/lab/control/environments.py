"""Gymnasium's vector environments as tensors. This module alone imports gymnasium for classic control."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.errors import ConfigError, import_optional


@dataclass(frozen=True)
class Spaces:
    """The sizes of observations and actions."""

    features: int  # numbers per observation
    actions: int  # number of discrete actions, or numbers per continuous action
    discrete: bool


@dataclass(frozen=True, eq=False)
class Transition:
    """One step of N environments. After an episode's end, `observation` is already the first of the next episode."""

    observation: Tensor  # [N, d] the input for the next action
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool; the episode ended in a terminal state, whose value is 0
    truncated: Tensor
    """[N] bool; the episode was cut off, for example by a time limit; a critic estimates its last state's value."""
    final: Tensor  # [N, d] the state after the action, before any reset


class VectorEnvironments(Protocol):
    """N copies of an environment, stepped together."""

    @property
    def spaces(self) -> Spaces: ...

    @property
    def number(self) -> int:
        """N."""

    def reset(self, seeds: Sequence[int] | None = None) -> Tensor:
        """Return the first observations [N, d]; without seeds the random generators continue."""

    def step(self, action: Tensor) -> Transition:
        """Take one step with actions [N], or [N, k] if they are continuous."""


class GymEnvironments:
    """`number` copies of the Gymnasium environment `name`, stepped sequentially in this process.

    Observations are Box, flattened, or Discrete, as one-hot vectors. Actions are Discrete or Box; the environment receives them
    clipped to the bounds, while the log-probability is that of the sampled action.

    Raises:
        ConfigError: An unknown environment, unsupported spaces, no time limit, or a missing package.
    """

    def __init__(self, name: str, number: int, max_episode_steps: int | None = None) -> None:
        """max_episode_steps: a time limit, overriding the environment's."""
        gym = import_optional("gymnasium.vector", "classic control", "control")
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        try:
            self.vector: Any = SyncVectorEnv(
                [lambda: gym.make(name, max_episode_steps, disable_env_checker=True)] * number,
                autoreset_mode=AutoresetMode.SAME_STEP,
            )
        except (gym.error.Error, ImportError) as error:
            near = difflib.get_close_matches(name, sorted(gym.registry), n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(near)}?" if near and name not in gym.registry else ""
            raise ConfigError(f"gymnasium does not make {name!r}: {error}{hint}") from error
        self.number = number
        self._observations: Any = self.vector.single_observation_space
        self._actions: Any = self.vector.single_action_space
        spec: Any = self.vector.envs[0].spec
        if spec is None or spec.max_episode_steps is None:
            raise ConfigError(
                f"{name} has no time limit, so an episode may never end: give one, max_episode_steps=1000 "
                "(--max-episode-steps 1000)"
            )
        supported = (gym.spaces.Box, gym.spaces.Discrete)
        if not isinstance(self._observations, supported):
            raise ConfigError(
                f"{name} has observations in {self._observations}, and the policies here need Box or Discrete observations. "
                "Wrap the environment in gymnasium.wrappers.FlattenObservation and register that"
            )
        if not isinstance(self._actions, supported):
            raise ConfigError(
                f"{name} has actions in {self._actions}, and the policies here have one categorical or one Gaussian "
                "distribution: Discrete or Box actions"
            )
        features, actions = (
            int(space.n) if isinstance(space, gym.spaces.Discrete) else int(np.prod(space.shape))
            for space in (self._observations, self._actions)
        )
        self.spaces = Spaces(features, actions, isinstance(self._actions, gym.spaces.Discrete))

    def _to_tensor(self, observation: Any) -> Tensor:
        if not self._observations.shape and hasattr(self._observations, "n"):
            index = torch.as_tensor(np.asarray(observation, dtype=np.int64) - int(self._observations.start))
            return torch.nn.functional.one_hot(index, int(self._observations.n)).float()
        return torch.as_tensor(np.array(observation, dtype=np.float32)).reshape(self.number, -1)

    def reset(self, seeds: Sequence[int] | None = None) -> Tensor:
        observation, _ = self.vector.reset(seed=None if seeds is None else list(seeds))
        return self._to_tensor(observation)

    def step(self, action: Tensor) -> Transition:
        if self.spaces.discrete:
            move = action.numpy() + int(self._actions.start)
        else:
            move = action.numpy().reshape(self.number, *self._actions.shape)
            move = move.clip(self._actions.low, self._actions.high).astype(self._actions.dtype)
        observation, reward, terminated, truncated, info = self.vector.step(move)
        final = observation
        if (terminated | truncated).any():
            final = np.array(observation)
            for i in np.flatnonzero(terminated | truncated):
                final[i] = info["final_obs"][i]
        return Transition(
            self._to_tensor(observation),
            torch.as_tensor(np.array(reward, dtype=np.float32)),
            torch.as_tensor(np.array(terminated)),
            torch.as_tensor(np.array(truncated)),
            self._to_tensor(final),
        )

    def close(self) -> None:
        self.vector.close()


@dataclass(frozen=True, eq=False)
class Experience:
    """A rollout: B segments of episodes, at most T steps long; each is a row of the batch."""

    batch: Batch
    """With rewards per step (`token_reward`), each row as its own `group`, and `truncated` for segments that were cut off."""
    observation: Tensor  # [B, T, d] the state before each action; 0 off the mask
    action: Tensor  # [B, T] or [B, T, k]
    after: Tensor  # [B, d] the state after a segment's last action
    finished: tuple[float, ...]  # returns of the episodes that ended in this rollout, from their first step on
    steps: int  # environment steps, including those left out


class Collector:
    """Collects rollouts from N environments, continuing episodes in the next rollout unless rollouts contain complete episodes."""

    def __init__(self, environments: VectorEnvironments, seed: int) -> None:
        self.environments = environments
        self.observation = environments.reset(environment_seeds(seed, environments.number))
        self.returns = torch.zeros(environments.number, dtype=torch.float64)  # of the episodes in progress
        self.started = False

    def __call__(self, act: Callable[[Tensor], Tensor], steps: int, full_episodes: bool = False) -> Experience:
        """Take `steps` steps in each environment.

        full_episodes: Begin with new episodes and finish the last ones, for algorithms without a value for the remainder. Steps of
        environments that have finished before the others are left out, and counted.
        """
        environments = self.environments
        if full_episodes and self.started:
            self.observation, self.returns = environments.reset(), torch.zeros_like(self.returns)
        self.started = True
        states, actions, transitions = list[Tensor](), list[Tensor](), list[Transition]()
        finished: list[float] = []
        counts = torch.zeros(environments.number, dtype=torch.int64)
        live = torch.ones(environments.number, dtype=torch.bool)
        while bool(live.any()):
            states.append(self.observation)
            actions.append(act(self.observation))
            step = environments.step(actions[-1])
            transitions.append(step)
            self.observation = step.observation
            counts += live
            ended = step.terminated | step.truncated
            self.returns += step.reward
            if bool(ended.any()):
                finished += self.returns[ended & live].tolist()
                self.returns[ended] = 0
            live = live & ((counts < steps) | (~ended if full_episodes else False))
        return build_experience(states, actions, transitions, counts.tolist(), tuple(finished))


def environment_seeds(seed: int, number: int) -> list[int]:
    """Return a seed per environment. They are random, since consecutive ones would share environments between seeds 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**31 - 1, (number,), generator=generator).tolist()


def build_experience(
    states: Sequence[Tensor],
    actions: Sequence[Tensor],
    transitions: Sequence[Transition],
    counts: Sequence[int],
    finished: tuple[float, ...],
) -> Experience:
    """Convert the first `counts` [N] steps of all environments to rows."""
    reward, terminated, truncated, final = (
        torch.stack([getattr(step, name) for step in transitions])
        for name in ("reward", "terminated", "truncated", "final")
    )
    segments = []  # (environment, first step, one past the last)
    for index, last in enumerate(counts):
        start = 0
        for stop in [*((terminated | truncated)[:last, index].nonzero().squeeze(1) + 1).tolist(), last]:
            if stop > start:
                segments.append((index, start, stop))
                start = stop
    environment, first, end = torch.tensor(segments).T
    t = torch.arange(int((end - first).max()))
    mask = t < (end - first)[:, None]
    time = torch.where(mask, first[:, None] + t, 0)

    def rows(x: Tensor) -> Tensor:
        """Convert [S, N, …] to [B, T, …], 0 off the mask."""
        picked = x[time, environment[:, None]]
        return torch.where(mask.reshape(*mask.shape, *[1] * (picked.ndim - 2)), picked, torch.zeros_like(picked))

    batch = Batch(
        mask=mask,
        group=torch.arange(len(mask)),
        reward=torch.zeros(len(mask), dtype=reward.dtype),
        token_reward=rows(reward),
        truncated=~terminated[end - 1, environment],
    )
    observation, action = rows(torch.stack(list(states))), rows(torch.stack(list(actions)))
    steps = len(transitions) * len(counts)
    return Experience(batch, observation, action, final[end - 1, environment], finished, steps)
