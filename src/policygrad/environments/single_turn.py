"""A prompt and one answer: the world of tasks whose reward functions judge the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policygrad.environments.base import Action, Observation, Step
from policygrad.tasks.types import Example


@dataclass(frozen=True)
class SingleTurn:
    """Asks the example's prompt; the first answer ends the episode."""

    example: Example
    waits: ClassVar[bool] = False

    async def reset(self) -> Observation:
        return Observation(self.example.prompt)

    async def step(self, action: Action) -> Step:
        return Step()
