"""Values by sampling: how well the policy does from the start of each step, from fresh completions of the text so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum, merge
from policygrad.errors import ConfigError
from policygrad.rollout.judging import Judged
from policygrad.rollout.trajectory import VALUES, Group, Start


@dataclass(frozen=True)
class Prefix:
    """The start of a step: the first `length` tokens of a group's completion. Equal texts are one prefix."""

    group: int
    sample: int
    """The first completion that begins with it."""
    length: int


def with_values(
    batch: Batch, groups: Sequence[Group], go_on: Callable[[list[Start]], tuple[list[Group], Judged]], step: int
) -> tuple[Batch, Judged]:
    """(the batch with `values`, what they cost and what went wrong): Monte-Carlo values of steps (VinePPO).

    At every token stands the mean reward of the completions that `go_on` makes of the text before its step. One call samples
    them all; each prefix has what it leaves of the token budget, and its numbers come from a key of its own. A completion
    whose reward fails is left out; a prefix of which all fail takes the value of the step before it, the prompt itself the
    mean reward of its group.
    """
    prefixes, where = _prefixes(batch, groups)
    if not prefixes:  # nothing takes part: a reward is not asked about nothing
        return replace(batch, values=_fill(batch, (), where)), Judged({"values/prefixes": Sum(0.0)})
    continued, judged = go_on([_start(prefix, groups[prefix.group], step) for prefix in prefixes])
    values = [_mean([t.reward for t in group.trajectories]) for group in continued]
    failed, tokens = values.count(None), sum(t.sampled for g in continued for t in g.trajectories)
    metrics: Metrics = {name: Sum(float(tokens)) for name in ("tokens/values", "tokens/sampled")}
    metrics |= {"values/prefixes": Sum(float(len(prefixes))), "values/failed": Sum(float(failed))}
    note = "no completion of a prefix has a reward; its step's value is taken from the step before"
    failures = {name: metric for name, metric in judged.metrics.items() if name.startswith("rewards/failed_")}
    messages = (*judged.messages, *((note,) if failed else ()))
    return replace(batch, values=_fill(batch, values, where)), Judged(merge(metrics, failures), messages)


def _prefixes(batch: Batch, groups: Sequence[Group]) -> tuple[list[Prefix], list[list[tuple[int, int]]]]:
    """The distinct prefixes, and per completion (first token of a step, its prefix); completions that take no part have none."""
    if batch.step_end is None:
        raise ConfigError(
            "a rollout whose completions have no steps has none to take values of: give its Rollouter `score_steps`"
        )
    places: dict[tuple[int, bytes], int] = {}
    prefixes: list[Prefix] = []
    where: list[list[tuple[int, int]]] = []
    rows = [(g, sample, c.tokens) for g, group in enumerate(groups) for sample, c in enumerate(group.trajectories)]
    for row, (g, sample, tokens) in enumerate(rows):
        last = len(tokens) - 1
        ends = batch.step_end[row].nonzero().flatten().tolist() if bool(batch.mask[row].any()) else None
        starts = [] if ends is None else [0, *(end + 1 for end in ends if end < last)]
        found = []
        for start in starts:
            key = (g, tokens[:start].numpy().tobytes())
            if key not in places:
                places[key] = len(prefixes)
                prefixes.append(Prefix(g, sample, start))
            found.append((start, places[key]))
        where.append(found)
    return prefixes, where


def _start(prefix: Prefix, group: Group, step: int) -> Start:
    seed, _, _, index = group.start.key
    tokens = group.trajectories[prefix.sample].tokens[: prefix.length]
    key = (seed, VALUES, step, index, prefix.sample, prefix.length)
    return Start(group.start.example, key, group.start.max_tokens - prefix.length, tokens)


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [r for r in rewards if r is not None]
    return sum(known) / len(known) if known else None


def _fill(batch: Batch, values: Sequence[float | None], where: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """[B, T]; each step's value at its tokens."""
    filled = torch.zeros(batch.mask.shape, dtype=batch.reward.dtype)
    for row, starts in enumerate(where):
        if not starts:
            continue
        peers = (batch.group == batch.group[row]) & batch.counted
        value = float(batch.reward[peers].mean())
        for start, place in starts:
            known = values[place]
            value = value if known is None else known
            filled[row, start:] = value
    return filled
