"""Completions judged by actors, each of which holds a `RewardPool`: its workers can be killed, its budgets and walls hold there."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from policygrad.cluster.crew import Crew, Site, answered, sent
from policygrad.cluster.needs import REWARDS
from policygrad.errors import DataError
from policygrad.rewards import ProcessScores, Reward, RewardPool, RewardScores
from policygrad.rewards.begun import Begun
from policygrad.rewards.calls import Judgement
from policygrad.rewards.config import Rewarding
from policygrad.rewards.summary import gather, summarise
from policygrad.rewards.waits import Phase
from policygrad.samplers.asking import together
from policygrad.waiting import Waiter

Table = list[list[Judgement]]
"""By reward, then by completion."""


class RewardWorkers:
    """The actor."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: RewardPool | None = None

    def __repr__(self) -> str:
        return self._name

    def begin(self, rewards: bytes, how: Rewarding) -> None:
        """Starts the workers, once."""
        if self._pool is None:
            self._pool = RewardPool(
                pickle.loads(rewards),
                workers=how.workers,
                budget=how.budget,
                memory=how.memory,
                environment=how.environment,
                sandbox=how.sandbox,
                show_output=how.show_output,
                patient=not how.patience,
            )

    def judge(self, prompts: list[Any], completions: list[str], columns: dict[str, list[Any]], of_steps: bool) -> Table:
        """As `RewardPool.judge`."""
        assert self._pool is not None  # it is asked once it is ready
        return self._pool.judge(prompts, completions, columns, process_rewards=of_steps)[1]


class RayRewards:
    """As `RewardPool`. What an actor was asked when it died is asked again, as a whole: no judgement of it has been told."""

    def __init__(self, site: Site, count: int, rewards: Sequence[Reward], how: Rewarding, tell: Phase) -> None:
        self.rewards, self._how = tuple(rewards), how
        self._code = sent(self.rewards, "a reward")
        actors = {
            f"{REWARDS} {i}": site.actor(RewardWorkers, REWARDS, i, max_restarts=site.config.restarts)
            for i in range(count)
        }
        self._crew = Crew(actors, self._ready, site.config.patience, REWARDS, tell)
        self._wait = Waiter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._wait(self._crew.servers.close())
        self._wait.close()
        self._crew.close()

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        begun: Begun | None = None,
    ) -> RewardScores:
        """As `RewardPool.score`."""
        chosen = [reward for reward in self.rewards if not reward.process_reward]
        return summarise(chosen, self._table(prompts, completions, columns, chosen), completions)

    def steps(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> ProcessScores:
        """As `RewardPool.steps`."""
        chosen = [reward for reward in self.rewards if reward.process_reward]
        return gather(chosen, self._table(prompts, completions, columns, chosen))

    def pays(self, count: int) -> bool:
        """Never: what is over is sent when all is."""
        return False

    def begin(self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> AbstractContextManager[Begun]:
        """It never pays."""
        raise NotImplementedError("actors are asked when all completions are there")

    def _table(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        chosen: Sequence[Reward],
    ) -> Table:
        count, of_steps = len(completions), bool(chosen and chosen[0].process_reward)
        for name, values in (("prompts", prompts), *columns.items()):
            if len(values) != count:
                raise DataError(f"{name!r} has {len(values)} values for {count} completions; give one for each")
        whole = any(reward.batched for reward in chosen)  # which is to see the whole batch
        parts = 1 if whole else min(len(self._crew), max(count, 1))
        bounds = [count * i // parts for i in range(parts + 1)]
        asked = [
            self._crew.ask(
                "judge",
                list(prompts[a:b]),
                list(completions[a:b]),
                {name: list(values[a:b]) for name, values in columns.items()},
                of_steps,
            )
            for a, b in pairwise(bounds)
        ]
        tables: list[Any] = self._wait(together(asked))
        return [[judgement for table in tables for judgement in table[row]] for row in range(len(chosen))]

    async def _ready(self, actor: Any) -> None:
        await answered(actor, "begin", self._code, self._how)
