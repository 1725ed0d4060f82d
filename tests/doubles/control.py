"""Environments whose episodes end by script."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policygrad.lab.control.environments import Spaces, Transition

DISCRETE, CONTINUOUS = Spaces(1, 2, True), Spaces(3, 2, False)


RUNNING, TERMINATED, TRUNCATED = range(3)


class Scripted:
    """Environments whose episodes end by script [S][N]. A state is 100·environment + steps ever taken there, a half more
    for one that nobody acts in; a reward is the state's tenth."""

    spaces = DISCRETE

    def __init__(self, script: Sequence[Sequence[int]]) -> None:
        self.script, self.number, self.t, self.resets = torch.tensor(script), len(script[0]), 0, 0

    def state(self) -> Tensor:
        return (100.0 * torch.arange(self.number) + self.t)[:, None]

    def reset(self, seeds: Sequence[int] | None = None) -> Tensor:
        self.resets += 1
        return self.state()

    def step(self, action: Tensor) -> Transition:
        reward = self.state().squeeze(1) / 10
        ends = self.script[self.t % len(self.script)]
        self.t += 1
        over = ends != RUNNING
        final = self.state() + 0.5 * over[:, None]
        return Transition(self.state(), reward, ends == TERMINATED, ends == TRUNCATED, final)


SCRIPT = [[0, 0], [1, 0], [0, 0], [0, 1], [2, 0], [0, 0]]
"""Environment 0 terminates after 2 steps and is cut off after 3 more; environment 1 terminates after 4."""


def zeros(observation: Tensor) -> Tensor:
    return torch.zeros(len(observation), dtype=torch.int64)
