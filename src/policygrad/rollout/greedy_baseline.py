"""Greedy baselines (ReMax): the reward of one greedy episode of each prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum, list_means
from policygrad.rollout.providers import Collected, FieldProvider, ProviderContext
from policygrad.rollout.scoring import ScoreGroups, ScoringResult
from policygrad.rollout.trajectory import GREEDY, EpisodeGroup, EpisodeSpec


class GreedyBaselines(FieldProvider):
    """Fills `baseline`."""

    fields: ClassVar[frozenset[str]] = frozenset({"baseline"})

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        greedy = replace(context.sampling, temperature=0.0)

        def play(specs: list[EpisodeSpec]) -> list[EpisodeGroup]:
            return context.play_with(specs, 1, greedy)

        return collected.with_result(*add_greedy_baseline(collected.batch, collected.groups, play, context.score))


def add_greedy_baseline(
    batch: Batch,
    groups: Sequence[EpisodeGroup],
    play_greedy: Callable[[list[EpisodeSpec]], list[EpisodeGroup]],
    score: ScoreGroups,
) -> tuple[Batch, ScoringResult]:
    """Fill `baseline` with the reward of one greedy episode for each prompt that is trained on (ReMax).

    NaN where its reward failed: that prompt is not learned from.
    """
    baseline = torch.full_like(batch.reward, torch.nan)
    active = [g for g in range(len(groups)) if bool(batch.mask[batch.group == g].any())]
    if not active:  # reward functions do not accept an empty list
        return replace(batch, baseline=baseline), ScoringResult()
    specs = []
    for g in active:
        seed, _, step, index = groups[g].spec.key  # the environment may draw from the key
        specs.append(replace(groups[g].spec, key=(seed, GREEDY, step, index)))
    greedy, scoring = score(play_greedy(specs))
    episodes = [group.trajectories[0] for group in greedy]
    for g, episode in zip(active, episodes, strict=True):
        if episode.reward is not None:
            baseline[batch.group == g] = episode.reward
    tokens = sum(t.num_sampled_tokens for t in episodes)
    rewards = [t.reward for t in episodes if t.reward is not None]
    metrics: Metrics = {name: Sum(float(tokens)) for name in ("tokens/greedy", "tokens/sampled")}
    metrics |= list_means({"reward/greedy": rewards})
    note = "a greedy completion has no reward; its prompt is not learned from" if len(rewards) < len(active) else ""
    return replace(batch, baseline=baseline), scoring.failures_only(metrics, note)
