"""What judges a rollout's completions: a pool of worker processes on this machine, or many of those elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from policygrad.rewards.begun import Begun
from policygrad.rewards.types import ProcessScores, Reward, RewardScores


class Pool(Protocol):
    """What `RewardPool` does for a rollout; a context manager."""

    rewards: tuple[Reward, ...]

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        begun: Begun | None = None,
    ) -> RewardScores:
        """As `RewardPool.score`."""
        ...

    def steps(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> ProcessScores:
        """As `RewardPool.steps`."""
        ...

    def pays(self, count: int) -> bool:
        """Whether it is worth while to `begin` before so many completions are all there."""
        ...

    def begin(self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> AbstractContextManager[Begun]:
        """As `RewardPool.begin`; asked for only where it `pays`."""
        ...
