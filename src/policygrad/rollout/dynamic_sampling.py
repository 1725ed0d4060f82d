"""Dynamic sampling: fill a step in rounds, replacing groups that a filter drops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policygrad.core.base import Filter
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum
from policygrad.rollout.scoring import ScoringResult
from policygrad.rollout.trajectory import EpisodeGroup, RolloutRequest

EvaluateFn = Callable[[Batch, frozenset[str]], Batch]  # a learner's `evaluate`: fills the named fields of a batch


@dataclass(frozen=True, eq=False)
class SamplingRound:
    """Scored groups that were sampled together."""

    groups: Sequence[EpisodeGroup]
    batch: Batch  # the groups' episodes, row by row
    dropped: tuple[bool, ...]  # per group: True if a filter drops it
    scoring: ScoringResult
    position: int  # index of the task's next example


@dataclass(frozen=True, eq=False)
class FilledStep:
    """The groups of a step and their rounds."""

    groups: list[EpisodeGroup]  # leftover groups first; dropped groups last, if sampling ended before the step was full
    rounds: list[SamplingRound]  # at least one
    scoring: ScoringResult
    position: int  # index of the task's next example
    leftover_groups: tuple[
        EpisodeGroup, ...
    ]  # for the next step: good groups beyond this one's size, or a replay buffer's
    metrics: Metrics


def fill_step(
    sample: Callable[[int, int], SamplingRound],
    prompts_per_step: int,
    request: RolloutRequest,
    replacing: Filter | None,
) -> FilledStep:
    """Sample a step, with other groups in the place of those that the filter drops: further ones, or those of a replay buffer."""
    if replacing is not None and replacing.replays:
        from policygrad.core.replay import ReplayBuffer
        from policygrad.rollout.replay import sample_with_replay

        assert isinstance(replacing, ReplayBuffer)
        return sample_with_replay(sample, prompts_per_step, request, replacing)
    return sample_until_full(sample, prompts_per_step, request, replacing)


def sample_until_full(
    sample: Callable[[int, int], SamplingRound],
    prompts_per_step: int,
    request: RolloutRequest,
    refilling: Filter | None,
) -> FilledStep:
    """Sample rounds until the step has `prompts_per_step` groups.

    With a refilling filter, a round takes the number of prompts given by `next_round_size`, and all rounds together take at
    most `sampling_rounds` times the step's. Leftover groups go first, but a step samples at least one group, so that none of
    them is more than one step old.

    Args:
        sample: Samples and scores `count` groups from the task's example `position` on.
        refilling: The filter that drops groups; None = one round.
    """
    carries = refilling is not None and refilling.keep_leftovers
    groups = list(request.leftover_groups[: prompts_per_step - 1] if carries else ())
    good, dropped = list[EpisodeGroup](), list[EpisodeGroup]()
    rounds, scoring, position = list[SamplingRound](), ScoringResult(), request.position
    room = prompts_per_step - len(groups)
    budget = prompts_per_step * (refilling.sampling_rounds if refilling else 1)
    while (missing := room - len(good)) > 0 and budget > 0:
        count = min(next_round_size(missing, len(good), len(good) + len(dropped), prompts_per_step), budget)
        this_round = sample(count, position)
        budget, position, scoring = budget - count, this_round.position, scoring | this_round.scoring
        rounds.append(this_round)
        for group, is_dropped in zip(this_round.groups, this_round.dropped, strict=True):
            (dropped if is_dropped else good).append(group)
    num_carried_over, num_unfilled = len(groups), max(missing, 0)
    groups += [*good[:room], *dropped[:num_unfilled]]
    leftover_groups = tuple(good[room:]) if carries else ()
    if num_unfilled and refilling is not None:
        note = (
            f"dynamic sampling: {num_unfilled} groups still have equal rewards after {refilling.sampling_rounds} rounds of "
            f"{prompts_per_step} prompts; they get weight 0 and the others are reweighted"
        )
        scoring |= ScoringResult(messages=(note,))
    counts = {
        "unfilled": num_unfilled,
        "leftover": num_carried_over,
        "discarded": max(0, len(good) - room) - len(leftover_groups),
    }
    metrics: Metrics = {f"dynamic/{name}": Sum(float(n)) for name, n in counts.items()} if refilling else {}
    return FilledStep(groups, rounds, scoring, position, leftover_groups, metrics)


def next_round_size(missing: int, good: int, seen: int, most: int) -> int:
    """Return the number of prompts to sample for `missing` groups, when `good` of `seen` groups were kept so far.

    With rate q = good/seen, that is n = m/q + √(m(1 − q))/q: the expected number plus one standard deviation of the negative
    binomial distribution, at most `most`. Before anything was seen it is `missing`.
    """
    if not seen:
        return missing
    rate = good / seen
    return min(most, math.ceil((missing + math.sqrt(missing * (1 - rate))) / rate)) if good else most


def groups_to_drop(
    groups: Sequence[EpisodeGroup], batch: Batch, replacing: Filter | None, evaluate: EvaluateFn | None
) -> tuple[bool, ...]:
    """Return, per group, True if the filter that replaces groups drops every episode that was scored."""
    if replacing is None:
        return (False,) * len(groups)
    out = replacing.find_dropped(fill_required_fields(batch, replacing.needs, evaluate))
    out, failed = (x.view(len(groups), -1) for x in (out, ~batch.mask.any(1)))
    return tuple(((out | failed).all(1) & out.any(1)).tolist())


def fill_required_fields(batch: Batch, needs: frozenset[str], evaluate: EvaluateFn | None) -> Batch:
    """Return the batch with the fields that filters need."""
    return evaluate(batch, needs) if needs and evaluate is not None else batch
