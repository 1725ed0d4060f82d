"""Answers judged while others are drawn: which are, and that a rollout is the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.algorithms import runnable
from doubles.failing import FailingSampler
from doubles.rewards import count_digits, nothing_or_raise
from doubles.rollouts import collect_rollout
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.rewards.workers.pool import IncrementalScoring, RewardPool
from policygrad.rollout import serialization
from policygrad.rollout.rollouter import Rollout, Rollouter
from policygrad.samplers.base import Request, Sampler, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler

SAMPLING = SamplingParams(max_tokens=6, decode_rows=8)


class Early(RewardPool):
    """Begins whatever can be begun, and counts."""

    completions = 0

    def is_overlap_worthwhile(self, count: int) -> bool:
        return True

    @contextmanager
    def score_incrementally(
        self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> Iterator[IncrementalScoring]:
        self.completions += len(prompts)
        with super().score_incrementally(prompts, columns) as begun:
            yield begun


@pytest.fixture(scope="module")
def pool() -> Iterator[Early]:
    with Early([count_digits, nothing_or_raise], num_workers=1, timeout=60.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def made(small: pg.Run) -> Rollouter:
    model = load_model(small.model)
    tokenizer = load_tokenizer(small.model, model)
    return Rollouter(
        pg.load_task(small.task).train_example, tokenizer, LocalSampler.from_tokenizer(model, tokenizer), None
    )


def with_pool(made: Rollouter, pool: RewardPool, early: bool = True, **changes: Any) -> Rollouter:
    return replace(made, score=pool.score, pool=pool if early else None, **changes)


def collected(rollouter: Rollouter, algorithm: pg.Algorithm = pg.DR_GRPO) -> Rollout:
    return collect_rollout(rollouter, algorithm, SAMPLING, prompts=4, samples=6)


def equal(a: Rollout, b: Rollout) -> bool:
    """Everything that a checkpoint holds of it, and what goes to the files."""
    (tensors, values), (others, output) = (serialization.pack_rollouts((), [rollout]) for rollout in (a, b))
    same = tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)
    return same and values == output and (a.completions, a.prompts, a.lengths) == (b.completions, b.prompts, b.lengths)


def test_a_rollout_is_identical_when_scored_while_sampling(made: Rollouter, pool: Early) -> None:
    before = pool.completions
    early = collected(with_pool(made, pool))
    assert pool.completions - before == 24
    assert "rewards/failed_raised" in early.metrics
    assert equal(early, collected(with_pool(made, pool, early=False)))


def test_an_evaluation_is_identical_when_scored_while_sampling(made: Rollouter, pool: Early) -> None:
    examples, before = [made.examples(i) for i in range(5)], pool.completions
    early = with_pool(made, pool).evaluate(examples, 3, SAMPLING)
    assert pool.completions - before == 15
    assert early == with_pool(made, pool, early=False).evaluate(examples, 3, SAMPLING)


@pytest.mark.parametrize("name", ["remax", "trpo_vine"])
def test_what_is_sampled_beside_the_episodes_is_judged_at_the_end(made: Rollouter, pool: Early, name: str) -> None:
    before = pool.completions
    early = collected(with_pool(made, pool), runnable(name))
    assert pool.completions - before == 24
    assert equal(early, collected(with_pool(made, pool, early=False), runnable(name)))


class Say(pg.SingleTurn):
    """An environment of one's own, which may make something else of an answer."""


class Plain:
    """A sampler that does not say what is over."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    async def generate(self, requests: Sequence[Request]) -> Any:
        return await self.sampler.generate(requests)

    async def update(self, weights: Any) -> None:
        await self.sampler.update(weights)


def test_environments_and_samplers_that_do_not_say_are_judged_at_the_end(made: Rollouter, pool: Early) -> None:
    before = pool.completions
    for changes in ({"environment": Say}, {"sampler": Plain(made.sampler)}):
        full = collected(with_pool(made, pool, early=False, **changes))
        assert equal(full, collected(with_pool(made, pool, **changes)))
    assert pool.completions == before


class Reversed(LocalSampler):
    """Asks in another order, in two parts, and cuts what it gets."""

    async def generate(self, requests: Sequence[Request]) -> Any:
        result = [*await super().generate(requests[:5:-1]), *await super().generate(requests[5::-1])]
        return [self._cut(generation) for generation in reversed(result)]

    def _cut(self, generation: Any) -> Any:
        n = max(1, len(generation.tokens) - 1)
        return replace(generation, tokens=generation.tokens[:n], logp=generation.logp[:n])


def test_a_sampler_that_makes_something_else_of_its_answers_is_believed(made: Rollouter, pool: Early) -> None:
    sampler = Reversed.from_tokenizer(made.sampler.model, made.tokenizer)  # type: ignore[attr-defined, arg-type]
    early = collected(with_pool(made, pool, sampler=sampler))
    assert equal(early, collected(with_pool(made, pool, early=False, sampler=sampler)))


def test_a_sampler_that_fails_leaves_the_pool_to_others(made: Rollouter, pool: Early) -> None:
    class Fails(FailingSampler):
        """After some of its answers are over."""

        async def generate(self, requests: Sequence[Request]) -> Any:
            if self.left == 1:
                await LocalSampler.generate(self, requests)
            return await super().generate(requests)

    model = made.sampler.model  # type: ignore[attr-defined]
    sampler = Fails(model, made.tokenizer, 1, OSError("no room"))  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no room"):
        collected(with_pool(made, pool, sampler=sampler))
    assert equal(collected(with_pool(made, pool)), collected(with_pool(made, pool, early=False)))
