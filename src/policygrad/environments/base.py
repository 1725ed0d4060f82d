"""What an environment is: one episode's world, in words. Token ids never leave the rollout's hands."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from policygrad.tasks.types import Example, Prompt


@dataclass(frozen=True)
class Observation:
    """What the policy reads next: text as it stands, or chat messages that the tokenizer's template renders."""

    content: Prompt
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools as the template takes them; of the first observation of an episode."""
    state: Hashable | None = None
    """What tells the world's state here from others: turns of a group's episodes that begin in equal states are compared by the
    algorithms that compare turns (gigpo). None = what is said, word for word."""


@dataclass(frozen=True)
class Action:
    """What the policy said in its turn."""

    text: str
    """The sampled tokens decoded, without end and padding tokens."""
    truncated: bool = False
    """The token budget ended it, not the policy."""


@dataclass(frozen=True)
class Step:
    """What came of an action. The episode goes on where there is an observation."""

    observation: Observation | None = None
    """What is said to the policy; None = the episode is over."""
    reward: float | None = None
    """Of this turn; an episode's rewards add up, to what the run's reward functions say of it. None = none of its own."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the log: an episode's turns are added up, and averaged over the episodes that have them."""


class Environment(Protocol):
    """One episode. Those of a rollout take their turns together, so awaiting a tool holds up nobody's thread.

    One that never waits may say so with `waits = False`: it is then called without a task of its own.
    """

    async def reset(self) -> Observation:
        """What the policy reads first; the same for every sample of an example."""
        ...

    async def step(self, action: Action) -> Step:
        """What the world says to an action."""
        ...


EnvironmentFactory = Callable[[Example], Environment]
"""A fresh environment for one episode about an example."""
