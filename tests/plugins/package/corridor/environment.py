"""A kind of environment with a runner of its own: one completion per episode, rewarded by how far it gets in a corridor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import policygrad as pg
from policygrad.rollout.environment import Capabilities
from policygrad.rollout.episodes import run_episodes
from policygrad.rollout.runners import EpisodeContext, EpisodeRunner
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec


@dataclass(frozen=True)
class Corridor:
    """A corridor of a number of fields."""

    length: int
    capabilities = Capabilities(stays_because="the corridor is in the trainer's room")

    def runner(self, context: EpisodeContext) -> EpisodeRunner:
        """Return what walks."""

        async def walk(
            specs: Sequence[EpisodeSpec], samples_per_prompt: int, sampling: pg.SamplingParams
        ) -> list[EpisodeGroup]:
            groups = await run_episodes(
                specs,
                samples_per_prompt,
                sampling,
                sampler=context.sampler,
                encoder=context.tokenizer,
                environment=pg.SingleTurn,
                calls=context.make_calls(),
            )
            return [
                replace(group, trajectories=tuple(replace(t, reward=self.reward(t.text)) for t in group.trajectories))
                for group in groups
            ]

        return walk

    def reward(self, text: str) -> float:
        """Return the share of the corridor that a text's distinct characters walk."""
        return min(len(set(text)), self.length) / self.length


def make_corridor(length: str) -> Corridor:
    """Return the corridor of `--environment corridor:LENGTH`."""
    return Corridor(int(length))
