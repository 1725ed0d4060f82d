"""Reasoning steps as fields of a batch: where they end, and what each is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from policygrad.core.batch import Batch
from policygrad.rollout.providers import Collected, FieldProvider, ProviderContext, Stage
from policygrad.rollout.scoring import ScoringResult, reads_step_scores
from policygrad.rollout.trajectory import EpisodeGroup, StepMarks


class StepEnds(FieldProvider):
    """Fills `step_end`. Filters read the outcome's reward: the scores of steps come after them."""

    stage: ClassVar[Stage] = Stage.MARKS

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        batch = add_step_marks(collected.batch, _list_marks(collected.groups), scored=False)
        return collected.with_result(batch, ScoringResult())


class StepScores(FieldProvider):
    """Fills `step_end` again, and `token_reward` with the steps' scores if these are rewards."""

    stage: ClassVar[Stage] = Stage.SCORES

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        marks, scored = _list_marks(collected.groups), reads_step_scores(context.needs)
        return collected.with_result(add_step_marks(collected.batch, marks, scored=scored), ScoringResult())


def _list_marks(groups: Sequence[EpisodeGroup]) -> list[StepMarks | None]:
    return [t.step_marks for g in groups for t in g.trajectories]


def add_step_marks(batch: Batch, marks: Sequence[StepMarks | None], *, scored: bool) -> Batch:
    """Fill `step_end`, and with `scored` also `token_reward`; None = a completion whose step scoring failed."""
    step_end = torch.zeros_like(batch.mask)
    reward = torch.zeros(batch.mask.shape, dtype=batch.reward.dtype)
    for row, step_marks in enumerate(marks):
        if step_marks is not None:
            ends = torch.tensor(step_marks.ends, dtype=torch.int64)
            step_end[row, ends] = True
            reward[row, ends] = torch.tensor(step_marks.scores, dtype=batch.reward.dtype)
    batch = replace(batch, step_end=step_end & batch.mask)
    return replace(batch, token_reward=reward, outcome=batch.reward) if scored else batch
