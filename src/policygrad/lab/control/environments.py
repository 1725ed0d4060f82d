"""Gymnasium's vector environments as tensors. The one file that imports gymnasium."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.errors import ConfigError, install_command


@dataclass(frozen=True)
class Spaces:
    """What a policy sees and does."""

    features: int
    """Numbers in an observation."""
    actions: int
    """How many actions there are to choose from, or, if they are continuous, how many numbers an action has."""
    discrete: bool


@dataclass(frozen=True, eq=False)
class Transition:
    """One step of N environments. Where an episode ended, `observation` is already the first of the next one."""

    observation: Tensor
    """[N, d] what the next action is chosen by."""
    reward: Tensor
    """[N]."""
    terminated: Tensor
    """[N] bool; the episode is over, and its last state is worth nothing more."""
    truncated: Tensor
    """[N] bool; it was cut off, by a time limit for one: what its last state was worth is left to a critic."""
    final: Tensor
    """[N, d] the state that the action led to, before any reset."""


class VectorEnvironments(Protocol):
    """N copies of an environment, stepped together."""

    @property
    def spaces(self) -> Spaces: ...

    @property
    def number(self) -> int:
        """N."""
        ...

    def reset(self, seeds: Sequence[int] | None = None) -> Tensor:
        """[N, d] the first observations; without seeds the random numbers go on where they were."""
        ...

    def step(self, action: Tensor) -> Transition:
        """One step with the actions [N], or [N, k] where they are continuous."""
        ...


class GymEnvironments:
    """`number` copies of the Gymnasium environment `name`, one after another in this process.

    Observations: Box, flattened, or Discrete, as one-hot vectors. Actions: Discrete, or Box, to whose bounds an action is
    clipped on its way to the environment alone; its log-probability stays that of the action drawn.

    Raises:
        ConfigError: an unknown environment, with near names; spaces of another kind, with the reason; no time limit.
        ImportError: gymnasium, or what the environment itself needs, is not installed.
    """

    def __init__(self, name: str, number: int, max_episode_steps: int | None = None) -> None:
        """`max_episode_steps`: a time limit in place of the environment's own."""
        gym = _gymnasium()
        try:
            from gymnasium.vector import AutoresetMode, SyncVectorEnv

            self.vector: Any = SyncVectorEnv(
                [lambda: gym.make(name, max_episode_steps, disable_env_checker=True)] * number,
                autoreset_mode=AutoresetMode.SAME_STEP,
            )
        except (gym.error.Error, ImportError) as error:
            raise _refusal(gym, name, error) from error
        self.number = number
        self._observations: Any = self.vector.single_observation_space
        self._actions: Any = self.vector.single_action_space
        spec: Any = self.vector.envs[0].spec
        if spec is None or spec.max_episode_steps is None:
            raise ConfigError(
                f"{name} has no time limit, and an episode may go on for ever: give one, max_episode_steps=1000 "
                "(--max-episode-steps 1000)"
            )
        self.spaces = Spaces(self._features(name), *self._moves(name))

    def _features(self, name: str) -> int:
        space, spaces = self._observations, _gymnasium().spaces
        if isinstance(space, spaces.Box):
            return int(np.prod(space.shape))
        if isinstance(space, spaces.Discrete):
            return int(space.n)
        raise ConfigError(
            f"{name} observes {space}, and the policies here read vectors of numbers: Box or Discrete observations. Wrap the "
            "environment in gymnasium.wrappers.FlattenObservation and register that"
        )

    def _moves(self, name: str) -> tuple[int, bool]:
        space, spaces = self._actions, _gymnasium().spaces
        if isinstance(space, spaces.Discrete):
            return int(space.n), True
        if isinstance(space, spaces.Box):
            return int(np.prod(space.shape)), False
        raise ConfigError(
            f"{name} takes {space} as an action, and the policies here draw from one categorical or one Gaussian distribution: "
            "Discrete or Box actions"
        )

    def _seen(self, observation: Any) -> Tensor:
        if not self._observations.shape and hasattr(self._observations, "n"):
            index = torch.as_tensor(np.asarray(observation, dtype=np.int64) - int(self._observations.start))
            return torch.nn.functional.one_hot(index, int(self._observations.n)).float()
        return torch.as_tensor(np.array(observation, dtype=np.float32)).reshape(self.number, -1)

    def reset(self, seeds: Sequence[int] | None = None) -> Tensor:
        observation, _ = self.vector.reset(seed=None if seeds is None else list(seeds))
        return self._seen(observation)

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
            self._seen(observation),
            torch.as_tensor(np.array(reward, dtype=np.float32)),
            torch.as_tensor(np.array(terminated)),
            torch.as_tensor(np.array(truncated)),
            self._seen(final),
        )

    def close(self) -> None:
        self.vector.close()


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"classic control needs gymnasium, which is not installed: {install_command('control')}"
        ) from error
    return gymnasium


def _refusal(gym: Any, name: str, error: Exception) -> Exception:
    """What gymnasium would not make, in words."""
    if isinstance(error, (ImportError, gym.error.DependencyNotInstalled)):
        return ConfigError(f"{name} needs more than gymnasium itself: {error}")
    if isinstance(error, gym.error.UnregisteredEnv):
        known = sorted(gym.registry)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
        return ConfigError(f"unknown environment {name!r}: {hint}")
    return ConfigError(f"gymnasium does not make {name!r}: {error}")


# From steps of vector environments to core's `Batch`: an episode, or the part of it in a rollout, is a row.


@dataclass(frozen=True, eq=False)
class Experience:
    """A rollout: B pieces of episodes, the longest of T steps."""

    batch: Batch
    """Rewards are at steps (`token_reward`), `group` is the row's own number, `truncated` that the piece was cut off."""
    observation: Tensor
    """[B, T, d] the state in which each action was taken; 0 off the mask."""
    action: Tensor
    """[B, T] or [B, T, k]."""
    after: Tensor
    """[B, d] the state that a piece's last action led to."""
    finished: tuple[float, ...]
    """The returns of the episodes that ended in this rollout, from their first step on."""
    steps: int
    """Environment steps taken, those that were left out included."""


class Collector:
    """Plays N environments, and goes on in the next rollout where it stopped, unless rollouts are of whole episodes."""

    def __init__(self, environments: VectorEnvironments, seed: int) -> None:
        self.environments = environments
        self.observation = environments.reset(environment_seeds(seed, environments.number))
        self.playing = torch.zeros(environments.number, dtype=torch.float64)  # returns of the episodes under way
        self.begun = False

    def __call__(self, act: Callable[[Tensor], Tensor], steps: int, full_episodes: bool = False) -> Experience:
        """`steps` steps in each environment.

        whole: from an episode's first step on, and to the last of the one in which the number is reached, for algorithms that
        have no value for the rest. Steps of an environment that waits for the others are left out, and counted.
        """
        environments = self.environments
        if full_episodes and self.begun:
            self.observation, self.playing = environments.reset(), torch.zeros_like(self.playing)
        self.begun = True
        states, actions, found, finished = list[Tensor](), list[Tensor](), list[Transition](), list[float]()
        taken = torch.zeros(environments.number, dtype=torch.int64)
        live = torch.ones(environments.number, dtype=torch.bool)
        while bool(live.any()):
            action = act(self.observation)
            step = environments.step(action)
            states.append(self.observation)
            actions.append(action)
            found.append(step)
            self.observation = step.observation
            taken += live
            ended = step.terminated | step.truncated
            self.playing += step.reward
            if bool(ended.any()):
                finished += self.playing[ended & live].tolist()
                self.playing[ended] = 0
            live = live & ((taken < steps) | (~ended if full_episodes else False))
        return build_experience(states, actions, found, taken.tolist(), tuple(finished))


def environment_seeds(seed: int, number: int) -> list[int]:
    """One per environment, all different for different runs: consecutive ones would share environments between seeds 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**31 - 1, (number,), generator=generator).tolist()


def split_episodes(ended: Tensor, taken: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(environment, first step, one past the last) of every piece of an episode, from where episodes end [S, N]."""
    for environment, last in enumerate(taken):
        first = 0
        for end in [*(ended[:last, environment].nonzero().squeeze(1) + 1).tolist(), last]:
            if end > first:
                yield environment, first, end
                first = end


def build_experience(
    states: Sequence[Tensor],
    actions: Sequence[Tensor],
    found: Sequence[Transition],
    taken: Sequence[int],
    finished: tuple[float, ...],
) -> Experience:
    """The steps of all environments, of which the first `taken` [N] count, as rows."""
    reward, terminated, truncated, final = (
        torch.stack([getattr(step, name) for step in found]) for name in ("reward", "terminated", "truncated", "final")
    )
    where = torch.tensor(list(split_episodes(terminated | truncated, taken)))
    environment, first, end = where.T
    t = torch.arange(int((end - first).max()))
    mask = t < (end - first)[:, None]
    time = torch.where(mask, first[:, None] + t, 0)

    def rows(x: Tensor) -> Tensor:
        """[S, N, …] -> [B, T, …], 0 off the mask."""
        picked = x[time, environment[:, None]]
        return torch.where(mask.reshape(*mask.shape, *[1] * (picked.ndim - 2)), picked, torch.zeros_like(picked))

    cut = ~terminated[end - 1, environment]
    batch = Batch(
        mask=mask,
        group=torch.arange(len(mask)),
        reward=torch.zeros(len(mask), dtype=reward.dtype),
        token_reward=rows(reward),
        truncated=cut,
    )
    after = final[end - 1, environment]
    steps = len(found) * len(taken)
    return Experience(batch, rows(torch.stack(list(states))), rows(torch.stack(list(actions))), after, finished, steps)
