"""Values by sampling: how well the policy does from the start of each step, from fresh completions of the text so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policygrad.core.metrics import Metrics, Sum
from policygrad.core.types import Batch
from policygrad.rollout.source import VALUES, Example, Source, samples_of
from policygrad.samplers.base import Group, Prompt, Sampler, Sampling


@dataclass(frozen=True)
class Prefix:
    """The start of a step: the first `length` tokens of a group's completion. Equal texts are one prefix."""

    group: int
    sample: int
    """The first completion that begins with it."""
    length: int


def with_values(
    source: Source,
    sampler: Sampler,
    sampling: Sampling,
    batch: Batch,
    groups: Sequence[Group],
    examples: Sequence[Example],
    *,
    samples: int,
    step: int,
) -> tuple[Batch, Metrics, tuple[str, ...]]:
    """(the batch with `values`, what they cost, what went wrong): Monte-Carlo values of steps (VinePPO).

    At every token stands the mean reward of `samples` completions of the text before its step. One call samples them all;
    each prefix has what it leaves of the token budget, and its numbers come from a key of its own. A completion whose reward
    fails is left out; a prefix of which all fail takes the value of the step before it, the prompt itself the mean reward of
    its group.
    """
    starts, where = _prefixes(batch, groups)
    if not starts:  # nothing takes part: a reward is not asked about nothing
        return replace(batch, values=_fill(batch, (), where)), {"values/prefixes": Sum(0.0)}, ()
    prompts = [_prompt(prefix, groups[prefix.group], sampling, step) for prefix in starts]
    continued = sampler.sample(prompts, samples, sampling)
    texts = [
        source.tokenizer.decode(torch.cat([_tokens(prefix, groups), c.tokens]))
        for prefix, group in zip(starts, continued, strict=True)
        for c in group.completions
    ]
    scores = source.score(*samples_of([examples[prefix.group] for prefix in starts], continued, texts))
    values = [_mean(scores.total[i * samples : (i + 1) * samples]) for i in range(len(starts))]
    failed, tokens = values.count(None), sum(len(c.tokens) for g in continued for c in g.completions)
    metrics: Metrics = {f"rewards/failed_{why}": Sum(float(n)) for why, n in scores.failures.items()}
    metrics |= {name: Sum(float(tokens)) for name in ("tokens/values", "tokens/sampled")}
    metrics |= {"values/prefixes": Sum(float(len(starts))), "values/failed": Sum(float(failed))}
    note = "no completion of a prefix has a reward; its step's value is taken from the step before"
    messages = (*scores.messages, *((note,) if failed else ()))
    return replace(batch, values=_fill(batch, values, where)), metrics, messages


def _prefixes(batch: Batch, groups: Sequence[Group]) -> tuple[list[Prefix], list[list[tuple[int, int]]]]:
    """The distinct prefixes, and per completion (first token of a step, its prefix); completions that take no part have none."""
    if batch.step_end is None:
        raise ValueError(
            "a rollout whose completions have no steps has none to take values of: give its Source `steps`"
        )
    places: dict[tuple[int, bytes], int] = {}
    prefixes: list[Prefix] = []
    where: list[list[tuple[int, int]]] = []
    rows = [(g, sample, c) for g, group in enumerate(groups) for sample, c in enumerate(group.completions)]
    for row, (g, sample, completion) in enumerate(rows):
        last = len(completion.tokens) - 1
        ends = batch.step_end[row].nonzero().flatten().tolist() if bool(batch.mask[row].any()) else None
        starts = [] if ends is None else [0, *(end + 1 for end in ends if end < last)]
        found = []
        for start in starts:
            key = (g, completion.tokens[:start].numpy().tobytes())
            if key not in places:
                places[key] = len(prefixes)
                prefixes.append(Prefix(g, sample, start))
            found.append((start, places[key]))
        where.append(found)
    return prefixes, where


def _tokens(prefix: Prefix, groups: Sequence[Group]) -> Tensor:
    return groups[prefix.group].completions[prefix.sample].tokens[: prefix.length]


def _prompt(prefix: Prefix, group: Group, sampling: Sampling, step: int) -> Prompt:
    seed, _, _, index = group.prompt.key
    tokens = torch.cat([group.prompt.tokens, group.completions[prefix.sample].tokens[: prefix.length]])
    key = (seed, VALUES, step, index, prefix.sample, prefix.length)
    return Prompt(tokens, key, sampling.max_tokens - prefix.length)


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
