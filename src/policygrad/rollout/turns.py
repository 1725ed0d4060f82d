"""Turns: from the states in which an episode's turns began, and what each was worth, to the batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from policygrad.core.batch import Batch
from policygrad.rollout.trajectory import Group, Trajectory


def with_turns(batch: Batch, groups: Sequence[Group], *, scored: bool) -> Batch:
    """`anchor`: at each token of a turn the number of the state it began in, equal states of a group having equal numbers.

    scored: what the environment gave for a turn stands in `token_reward` at its last token, and is no longer in `reward`.
    """
    number = torch.zeros(batch.mask.shape, dtype=torch.int64)
    worth = torch.zeros(batch.mask.shape, dtype=batch.reward.dtype)
    rest = batch.reward.clone()
    row = 0
    for group in groups:
        known: dict[Hashable, int] = {}
        for trajectory in group.trajectories:
            for turn, (first, last) in enumerate(_spans(trajectory)):
                state = trajectory.states[turn] if trajectory.states else None
                number[row, first : last + 1] = known.setdefault(state, len(known))
                own = trajectory.turn_rewards[turn] if trajectory.turn_rewards else None
                worth[row, last] = own or 0.0
            rest[row] = rest[row] - sum(x for x in trajectory.turn_rewards if x is not None)
            row += 1
    batch = replace(batch, anchor=number)
    if not scored:
        return batch
    worth = worth if batch.token_reward is None else worth + batch.token_reward  # the scores of a turn's steps
    return replace(batch, token_reward=worth, reward=rest)


def _spans(trajectory: Trajectory) -> list[tuple[int, int]]:
    """(first, last) token of each turn of the policy."""
    found, at = [], 0
    for segment in trajectory.segments:
        end = at + len(segment.tokens)
        if segment.sampled:
            found.append((at, end - 1))
        at = end
    return found
