"""Answers are judged while others are still drawn, where that hides enough. What they come to is what it is without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from policygrad.rewards.base import Pool
from policygrad.rollout.judging import Score
from policygrad.rollout.trajectory import Start, asked_of
from policygrad.samplers.base import Request, Sampler, Watchable


@contextmanager
def meanwhile(
    pool: Pool | None, sampler: Sampler, starts: Sequence[Start], n: int, decode: Callable[[Any], str]
) -> Iterator[Score | None]:
    """Inside n answers to each start are played, each of them the one turn of its episode, and judged by what is yielded.
    None = it would not be faster, or cannot be."""
    keys = [(*start.key, sample) for start in starts for sample in range(n)]
    if pool is None or not isinstance(sampler, Watchable) or not pool.pays(len(keys)):
        yield None
        return
    prompts, columns = asked_of([start.example for start in starts for _ in range(n)])
    places = {key: place for place, key in enumerate(keys)}
    with pool.begin(prompts, columns) as begun:

        def look(over: Sequence[tuple[Request, Tensor]]) -> None:
            begun.look({places[request.key]: decode(tokens) for request, tokens in over if request.key in places})

        with sampler.watched(look):
            yield partial(pool.score, begun=begun)
