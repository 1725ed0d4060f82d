"""A step is filled: at once, or, where groups are set aside, in further rounds of as many prompts as it then takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policygrad.core.base import Filter
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum
from policygrad.rollout.scoring import Judged
from policygrad.rollout.trajectory import Group

Evaluate = Callable[[Batch, frozenset[str]], Batch]
"""A learner's, for what filters read: (batch, names of the fields that shall be in it)."""


@dataclass(frozen=True, eq=False)
class Round:
    """What was sampled together, judged."""

    groups: Sequence[Group]
    batch: Batch
    """Row by row that of the groups."""
    aside: tuple[bool, ...]
    """Per group, whether a filter sets it aside."""


@dataclass(frozen=True, eq=False)
class Filled:
    """A step's groups, and how they came about."""

    kept: list[Group]
    """Carried ones first; where sampling came to its end before the step was full, the last ones have been set aside."""
    rounds: list[Round]
    """Of this step, at least one."""
    judged: Judged
    position: int
    """The task's next example."""
    surplus: tuple[Group, ...]
    """What the step has no room for, for the next one."""
    carried: int
    """Groups from the step before."""
    missing: int
    """Groups that have been set aside and stand in for others."""
    metrics: Metrics


def fill(
    sample: Callable[[int, int], tuple[Round, Judged, int]],
    prompts: int,
    position: int,
    refilling: Filter | None,
    carried: Sequence[Group] = (),
) -> Filled:
    """`prompts` groups; `sample(n, i)` plays n of the task's examples from i on, and says which is the next.

    Where a filter refills, a round takes the prompts that `next_round` expects to be enough, and all of them together at most
    `rounds` times the step's. What it carries are groups that would have been trained on; they go first, and a step samples one
    group at least, so that none of them is older than one step.
    """
    carries = refilling is not None and refilling.carry
    kept, good, aside = list(carried[: prompts - 1] if carries else ()), list[Group](), list[Group]()
    begun, rounds, judged = len(kept), list[Round](), Judged()
    left = prompts * (refilling.rounds if refilling else 1)
    while (missing := prompts - begun - len(good)) > 0 and left > 0:
        count = min(next_round(missing, len(good), len(good) + len(aside), prompts), left)
        found, said, position = sample(count, position)
        left, judged = left - count, judged | said
        rounds.append(found)
        for group, out in zip(found.groups, found.aside, strict=True):
            (aside if out else good).append(group)
    missing, room = max(missing, 0), prompts - begun
    kept += [*good[:room], *aside[:missing]]
    surplus = tuple(good[room:]) if carries else ()
    if missing and refilling is not None:
        most = f"{refilling.rounds} rounds of the step's {prompts} prompts"
        note = f"dynamic sampling: groups were still without spread after {most}; the others are reweighted"
        judged |= Judged(messages=(note,))
    counts = {"unfilled": missing, "carried": begun, "discarded": len(good) - min(len(good), room) - len(surplus)}
    metrics: Metrics = {f"dynamic/{name}": Sum(float(n)) for name, n in counts.items()} if refilling else {}
    return Filled(kept, rounds, judged, position, surplus, begun, missing, metrics)


def next_round(missing: int, good: int, seen: int, most: int) -> int:
    """Prompts to sample where `missing` groups are, and `good` of the `seen` ones of this step were kept: n = m/q + √(m(1 − q))/q.

    q = good/seen is the rate at which they are kept: m/q is what it takes on average, the rest is a standard deviation of that
    number (of the negative binomial distribution). At most `most`; nothing seen, `missing`.
    """
    if not seen:
        return missing
    rate = good / seen
    return min(most, math.ceil((missing + math.sqrt(missing * (1 - rate))) / rate)) if good else most


def flat(
    groups: Sequence[Group], batch: Batch, refilling: Filter | None, evaluate: Evaluate | None
) -> tuple[bool, ...]:
    """Per group, whether a filter that refills sets it aside: all that it could teach is dropped."""
    if refilling is None:
        return (False,) * len(groups)
    out = refilling.dropped(filled(batch, refilling.needs, evaluate))
    out, failed = (x.view(len(groups), -1) for x in (out, ~batch.mask.any(1)))
    return tuple(((out | failed).all(1) & out.any(1)).tolist())


def filled(batch: Batch, needs: frozenset[str], evaluate: Evaluate | None) -> Batch:
    """The batch with what filters read."""
    return evaluate(batch, needs) if needs and evaluate is not None else batch
