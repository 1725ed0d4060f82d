"""Rewards with bounds and gates: `0.5*math within 0..1 if format`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from policygrad.errors import ConfigError
from policygrad.rewards.base import LoggedMetrics, Reward
from policygrad.rewards.workers.messages import SampleResult, select_samples
from policygrad.rewards.workers.signature import Signature
from policygrad.rewards.workers.worker import RewardCaller


@dataclass(frozen=True)
class GatedReward:
    """The inner reward's value, clipped to `low` and `high`, where every gate holds; 0 where one does not.

    A gate holds where its value is above 0 or does not apply (None); where it fails, the sample fails. Gates are called first,
    and the inner function only with what passes: no judge is paid for a text of the wrong form.
    """

    inner: Reward
    gates: tuple[Reward, ...] = ()
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        for part in self._parts:
            if part.process_reward:
                raise ConfigError(
                    f"reward {part.name!r} scores steps: only rewards of full completions have gates and bounds, or are gates"
                )

    @property
    def _parts(self) -> tuple[Reward, ...]:
        return (*self.gates, self.inner)

    @property
    def reward_options(self) -> dict[str, Any]:
        """The most permissive of its parts' options."""
        timeouts = [part.timeout for part in self._parts if part.timeout is not None]
        return {
            "batched": any(part.batched for part in self._parts),
            "dedicated_worker": any(part.dedicated_worker for part in self._parts),
            "timeout": max(timeouts, default=None),
        }

    @property
    def reward_network(self) -> bool:
        """True if a part calls a server."""
        return any(getattr(part.function, "reward_network", False) for part in self._parts)

    def reward_prepare(self) -> None:
        for part in self._parts:
            if (prepare := getattr(part.function, "reward_prepare", None)) is not None:
                prepare()

    @property
    def extract_answer(self) -> Any:
        """The inner reward's `extract_answer`; None = it has none."""
        return getattr(self.inner.function, "extract_answer", None)

    @property
    def required_columns(self) -> frozenset[str]:
        """The columns that a part requires."""
        return frozenset().union(*(Signature.from_function(part.function).required for part in self._parts))

    @property
    def episode_columns(self) -> frozenset[str]:
        """The columns of the rollout that a part names."""
        return frozenset().union(*(Signature.from_function(part.function).episode for part in self._parts))

    @cached_property
    def _callers(self) -> tuple[RewardCaller, ...]:
        return tuple(RewardCaller(part.name, part.function) for part in self._parts)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[Any]:
        """Return one SampleResult per completion; a failure has the reason of the part that failed."""
        results: dict[int, SampleResult] = {}
        logged = dict[int, LoggedMetrics]()  # by all parts
        for part, caller in zip(self._parts, self._callers, strict=True):
            places = [i for i in range(len(completions)) if i not in results]
            for group in [places] if part.batched and places else [[i] for i in places]:
                part_results = caller(*select_samples((prompts, completions, columns), group))
                for i, result in zip(group, part_results, strict=True):
                    logged[i] = (*logged.get(i, ()), *result.metrics)
                    if part is self.inner:
                        value = result.value
                        clipped = value if value is None else min(max(value, self.low), self.high)
                        results[i] = replace(result, value=clipped)
                    elif result.reason is not None:
                        results[i] = result
                    elif result.value is not None and result.value <= 0:
                        results[i] = SampleResult(0.0, feedback=result.feedback)
        return [replace(results[i], metrics=logged[i]) for i in range(len(completions))]
