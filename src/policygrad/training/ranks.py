"""Completions drawn by all the processes that learn together: each draws its share, with the whole policy that it has beside its
own part of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from policygrad.errors import PolicygradError
from policygrad.learners.base import Learner
from policygrad.learners.fsdp.leader import RankedLearner, not_in_its_midst
from policygrad.learners.fsdp.learner import FsdpLearner
from policygrad.learners.fsdp.ranks import Ranks
from policygrad.models.routing import Routing
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.local import LocalSampler
from policygrad.training.resources import Resources
from policygrad.weight_sync.base import Published


class RankedSampler:
    """A local sampler in every process, on the weights that the learner has published there. What is drawn for a request does not
    depend on which of them draws it, up to the rounding of a differently shaped matrix product."""

    def __init__(self, local: LocalSampler, learner: RankedLearner) -> None:
        self._local, self._learner = local, learner
        self._how = (frozenset(local.end.tolist()), local.pad)

    async def update(self, weights: Published) -> None:
        """The other processes have them: `RankedLearner.publish` has put them there."""
        await self._local.update(weights)

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """A signal waits until they are drawn."""
        with not_in_its_midst(), self._learner.together("drawing completions") as ranks:
            ranks.tell((draw, (requests, self._local.version, *self._how)))
            return await _drawn(self._local, requests, ranks)


def draw(learner: FsdpLearner, requests: Sequence[Request], version: int, end: frozenset[int], pad: int) -> None:
    """The share of a process that is not rank 0."""
    assert learner.whole is not None  # the plan says that it draws
    if "sampler" not in learner.kept:
        routing = Routing.of(learner.whole) if learner.config.routing_replay else None
        learner.kept["sampler"] = LocalSampler(learner.whole, end, pad, routing)
    sampler: LocalSampler = learner.kept["sampler"]
    sampler.version = version
    asyncio.run(_drawn(sampler, requests, learner.ranks))


async def _drawn(sampler: LocalSampler, requests: Sequence[Request], ranks: Ranks) -> list[Generation]:
    """All of them, each process's share drawn there. What cannot be drawn in one of them is raised in all: they stay together."""
    mine, wrong = list[Generation](), None
    try:
        mine = await sampler.generate(_share(requests, ranks.rank, ranks.size))
    except PolicygradError as error:
        wrong = error
    shares = ranks.gathered((mine, wrong))
    for _, failed in shares:
        if failed is not None:
            raise failed
    return [generation for share, _ in shares for generation in share]


def _share(requests: Sequence[Request], rank: int, size: int) -> Sequence[Request]:
    """Neighbours, since those of a group are read once together."""
    return requests[len(requests) * rank // size : len(requests) * (rank + 1) // size]


def drawn_by_all(resources: Resources, learner: Learner) -> Resources:
    """The resources with a sampler in every process, where it is this process's own and shares its model with the learner."""
    sampler = resources.rollouter.sampler
    if not (isinstance(learner, RankedLearner) and learner.samples and type(sampler) is LocalSampler):
        return resources
    return replace(resources, rollouter=replace(resources.rollouter, sampler=RankedSampler(sampler, learner)))
