"""A step is filled: at once, or, where groups are set aside, in further rounds of as many prompts as it then takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policygrad.core.base import Filter
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum
from policygrad.rollout.scoring import ScoringResult
from policygrad.rollout.trajectory import EpisodeGroup

EvaluateFn = Callable[[Batch, frozenset[str]], Batch]
"""A learner's, for what filters read: (batch, names of the fields that shall be in it)."""


@dataclass(frozen=True, eq=False)
class SamplingRound:
    """What was sampled together, judged."""

    groups: Sequence[EpisodeGroup]
    batch: Batch
    """Row by row that of the groups."""
    dropped: tuple[bool, ...]
    """Per group, whether a filter sets it aside."""


@dataclass(frozen=True, eq=False)
class FilledStep:
    """A step's groups, and how they came about."""

    groups: list[EpisodeGroup]
    """Carried ones first; where sampling came to its end before the step was full, the last ones have been set aside."""
    rounds: list[SamplingRound]
    """Of this step, at least one."""
    scoring: ScoringResult
    position: int
    """The task's next example."""
    leftover_groups: tuple[EpisodeGroup, ...]
    """What the step has no room for, for the next one."""
    num_carried_over: int
    """Groups from the step before."""
    num_unfilled: int
    """Groups that have been set aside and stand in for others."""
    metrics: Metrics


def sample_until_full(
    sample: Callable[[int, int], tuple[SamplingRound, ScoringResult, int]],
    prompts_per_step: int,
    position: int,
    refilling: Filter | None,
    leftover_groups: Sequence[EpisodeGroup] = (),
) -> FilledStep:
    """`prompts` groups; `sample(n, i)` plays n of the task's examples from i on, and says which is the next.

    Where a filter refills, a round takes the prompts that `next_round_size` expects to be enough, and all of them together at most
    `rounds` times the step's. What it carries are groups that would have been trained on; they go first, and a step samples one
    group at least, so that none of them is older than one step.
    """
    carries = refilling is not None and refilling.keep_leftovers
    groups, good, aside = (
        list(leftover_groups[: prompts_per_step - 1] if carries else ()),
        list[EpisodeGroup](),
        list[EpisodeGroup](),
    )
    num_carried_over, rounds, scoring = len(groups), list[SamplingRound](), ScoringResult()
    left = prompts_per_step * (refilling.sampling_rounds if refilling else 1)
    while (missing := prompts_per_step - num_carried_over - len(good)) > 0 and left > 0:
        count = min(next_round_size(missing, len(good), len(good) + len(aside), prompts_per_step), left)
        found, said, position = sample(count, position)
        left, scoring = left - count, scoring | said
        rounds.append(found)
        for group, out in zip(found.groups, found.dropped, strict=True):
            (aside if out else good).append(group)
    missing, room = max(missing, 0), prompts_per_step - num_carried_over
    groups += [*good[:room], *aside[:missing]]
    surplus = tuple(good[room:]) if carries else ()
    if missing and refilling is not None:
        most = f"{refilling.sampling_rounds} rounds of the step's {prompts_per_step} prompts"
        note = f"dynamic sampling: groups were still without spread after {most}; the others are reweighted"
        scoring |= ScoringResult(messages=(note,))
    counts = {
        "unfilled": missing,
        "leftover": num_carried_over,
        "discarded": len(good) - min(len(good), room) - len(surplus),
    }
    metrics: Metrics = {f"dynamic/{name}": Sum(float(n)) for name, n in counts.items()} if refilling else {}
    return FilledStep(groups, rounds, scoring, position, surplus, num_carried_over, missing, metrics)


def next_round_size(missing: int, good: int, seen: int, most: int) -> int:
    """Prompts to sample where `missing` groups are, and `good` of the `seen` ones of this step were kept: n = m/q + √(m(1 − q))/q.

    q = good/seen is the rate at which they are kept: m/q is what it takes on average, the rest is a standard deviation of that
    number (of the negative binomial distribution). At most `most`; nothing seen, `missing`.
    """
    if not seen:
        return missing
    rate = good / seen
    return min(most, math.ceil((missing + math.sqrt(missing * (1 - rate))) / rate)) if good else most


def groups_to_drop(
    groups: Sequence[EpisodeGroup], batch: Batch, refilling: Filter | None, evaluate: EvaluateFn | None
) -> tuple[bool, ...]:
    """Per group, whether a filter that refills sets it aside: all that it could teach is dropped."""
    if refilling is None:
        return (False,) * len(groups)
    out = refilling.find_dropped(fill_required_fields(batch, refilling.needs, evaluate))
    out, failed = (x.view(len(groups), -1) for x in (out, ~batch.mask.any(1)))
    return tuple(((out | failed).all(1) & out.any(1)).tolist())


def fill_required_fields(batch: Batch, needs: frozenset[str], evaluate: EvaluateFn | None) -> Batch:
    """The batch with what filters read."""
    return evaluate(batch, needs) if needs and evaluate is not None else batch
