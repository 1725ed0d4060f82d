"""From steps of vector environments to core's `Batch`: an episode, or the part of it in a rollout, is a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.lab.control.environments import Environments, Transition


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

    def __init__(self, environments: Environments, seed: int) -> None:
        self.environments = environments
        self.observation = environments.reset(seeds(seed, environments.number))
        self.playing = torch.zeros(environments.number, dtype=torch.float64)  # returns of the episodes under way
        self.begun = False

    def __call__(self, act: Callable[[Tensor], Tensor], steps: int, whole: bool = False) -> Experience:
        """`steps` steps in each environment.

        whole: from an episode's first step on, and to the last of the one in which the number is reached, for algorithms that
        have no value for the rest. Steps of an environment that waits for the others are left out, and counted.
        """
        environments = self.environments
        if whole and self.begun:
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
            live = live & ((taken < steps) | (~ended if whole else False))
        return gathered(states, actions, found, taken.tolist(), tuple(finished))


def seeds(seed: int, number: int) -> list[int]:
    """One per environment, all different for different runs: consecutive ones would share environments between seeds 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**31 - 1, (number,), generator=generator).tolist()


def pieces(ended: Tensor, taken: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(environment, first step, one past the last) of every piece of an episode, from where episodes end [S, N]."""
    for environment, last in enumerate(taken):
        first = 0
        for end in [*(ended[:last, environment].nonzero().squeeze(1) + 1).tolist(), last]:
            if end > first:
                yield environment, first, end
                first = end


def gathered(
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
    where = torch.tensor(list(pieces(terminated | truncated, taken)))
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
