"""The turns of an episode as fields of a batch: the state that each began in, and its reward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from policygrad.core.batch import Batch
from policygrad.rollout.providers import Collected, FieldProvider, ProviderContext, Stage
from policygrad.rollout.scoring import ScoringResult
from policygrad.rollout.trajectory import EpisodeGroup


class TurnStates(FieldProvider):
    """Fills `turn_state` and, where it is read, `token_reward`: after the filters, which read the rewards of complete episodes."""

    stage: ClassVar[Stage] = Stage.SCORES

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        scored = "token_reward" in context.needs
        return collected.with_result(add_turn_states(collected.batch, collected.groups, scored=scored), ScoringResult())


def add_turn_states(batch: Batch, groups: Sequence[EpisodeGroup], *, scored: bool) -> Batch:
    """Fill `turn_state`: at each token, the number of the state its turn began in, equal for equal states of a group.

    scored: Move the turns' rewards from `reward` to `token_reward`, at the last token of each turn.
    """
    turn_state = torch.zeros(batch.mask.shape, dtype=torch.int64)
    token_reward = torch.zeros(batch.mask.shape, dtype=batch.reward.dtype)
    reward = batch.reward.clone()
    row = 0
    for group in groups:
        state_ids: dict[Hashable, int] = {}
        for trajectory in group.trajectories:
            turn = start = 0
            for segment in trajectory.segments:
                end = start + len(segment.tokens)
                if segment.is_sampled:
                    state = trajectory.turn_states[turn] if trajectory.turn_states else None
                    turn_state[row, start:end] = state_ids.setdefault(state, len(state_ids))
                    turn_reward = trajectory.turn_rewards[turn] if trajectory.turn_rewards else None
                    token_reward[row, end - 1] = turn_reward or 0.0
                    turn += 1
                start = end
            reward[row] = reward[row] - sum(x for x in trajectory.turn_rewards if x is not None)
            row += 1
    batch = replace(batch, turn_state=turn_state)
    if not scored:
        return batch
    if batch.token_reward is not None:  # the scores of reasoning steps
        token_reward = token_reward + batch.token_reward
    return replace(batch, token_reward=token_reward, reward=reward, outcome=batch.reward)
