"""Replay: fill a step with one round of sampling, and groups of earlier steps in the place of those that a filter drops."""

from __future__ import annotations

from collections.abc import Callable

from policygrad.core.metrics import Mean, Metrics, Sum
from policygrad.core.replay import ReplayBuffer, measure_worth
from policygrad.rollout.dynamic_sampling import FilledStep, SamplingRound
from policygrad.rollout.trajectory import EpisodeGroup, RolloutRequest


def sample_with_replay(
    sample: Callable[[int, int], SamplingRound], prompts_per_step: int, request: RolloutRequest, buffer: ReplayBuffer
) -> FilledStep:
    """Sample the step's groups once, and replace those of equal rewards by groups of the buffer, each in its place.

    Args:
        sample: Samples and scores `count` groups from the task's example `position` on.
        request: Its leftover groups are the buffer's, oldest first.
    """
    this_round = sample(prompts_per_step, request.position)
    groups, buffered = (
        list(this_round.groups),
        [g for g in request.leftover_groups if _age(g, request) <= buffer.max_age],
    )
    fresh = [group for group, is_dropped in zip(groups, this_round.dropped, strict=True) if not is_dropped]
    places = [place for place, is_dropped in enumerate(this_round.dropped) if is_dropped]
    drawn = buffer.draw([_score_group(group) for group in buffered], len(places), request.step)
    for place, index in zip(places, drawn, strict=False):
        groups[place] = buffered[index]
    used = [buffered[index] for index in drawn]
    candidates = [g for i, g in enumerate(buffered) if buffer.reuse or i not in drawn] + fresh
    candidates = [group for group in candidates if _score_group(group) > 0]  # not those whose every reward failed
    left = tuple(candidates[i] for i in buffer.choose_kept([_score_group(group) for group in candidates]))
    metrics: Metrics = {
        "replay/used": Sum(float(len(used))),
        "replay/missing": Sum(float(len(places) - len(used))),
        "replay/kept": Sum(float(len(left))),
    }
    if used:
        metrics["replay/age"] = Mean(float(sum(_age(group, request) for group in used)), float(len(used)))
    return FilledStep(groups, [this_round], this_round.scoring, this_round.position, left, metrics)


def _age(group: EpisodeGroup, request: RolloutRequest) -> int:
    """Return the number of steps since the group was sampled."""
    return request.step - group.spec.key[2]


def _score_group(group: EpisodeGroup) -> float:
    return measure_worth([trajectory.reward for trajectory in group.trajectories])
