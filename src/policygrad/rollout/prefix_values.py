"""Monte-Carlo values of reasoning steps (VinePPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum
from policygrad.core.process import PrefixValue
from policygrad.errors import ConfigError
from policygrad.rollout.providers import Collected, FieldProvider, PlayEpisodes, ProviderContext
from policygrad.rollout.scoring import ScoreGroups, ScoringResult
from policygrad.rollout.trajectory import VALUES, EpisodeGroup, EpisodeSpec


@dataclass(frozen=True)
class PrefixValues(FieldProvider):
    """Fills `values`."""

    part: PrefixValue
    single_answers: ClassVar[tuple[str, str]] = (
        "PrefixValue continues completions",
        "another advantage, such as GroupMean()",
    )

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        batch, groups = collected.batch, collected.groups
        return collected.with_result(
            *add_prefix_values(batch, groups, self.part.samples, context.play, context.score, context.step)
        )


def add_prefix_values(
    batch: Batch,
    groups: Sequence[EpisodeGroup],
    samples_per_prefix: int,
    play: PlayEpisodes,
    score: ScoreGroups,
    step: int,
) -> tuple[Batch, ScoringResult]:
    """Fill `values` with Monte-Carlo values of reasoning steps (VinePPO).

    The value at each token is the mean reward of `samples_per_prefix` completions of the text before its step, sampled within
    the rest of the token budget. Completions whose reward fails are left out. A prefix without any reward takes the value of
    the step before it; the prompt itself takes the mean reward of its group.
    """
    if batch.step_end is None:
        raise ConfigError("prefix values need completions with reasoning steps: give the Rollouter `score_steps`")
    specs: list[EpisodeSpec] = []  # one for each distinct prefix of a group
    indices: dict[tuple[int, bytes], int] = {}
    # of each completion (first token, index of its prefix) of every step; none if it is masked
    steps: list[list[tuple[int, int]]] = []
    rows = [(g, sample, c.tokens) for g, group in enumerate(groups) for sample, c in enumerate(group.trajectories)]
    for row, (g, sample, tokens) in enumerate(rows):
        spec = groups[g].spec
        seed, _, _, index = spec.key
        ends = batch.step_end[row].nonzero().flatten().tolist()
        steps.append([])
        for start in [0, *(end + 1 for end in ends if end < len(tokens) - 1)] if bool(batch.mask[row].any()) else ():
            prefix = tokens[:start]
            name = (g, prefix.numpy().tobytes())
            if name not in indices:
                indices[name] = len(specs)
                key = (seed, VALUES, step, index, sample, start)
                specs.append(EpisodeSpec(spec.example, key, spec.max_tokens - start, prefix))
            steps[row].append((start, indices[name]))
    filled = torch.zeros(batch.mask.shape, dtype=batch.reward.dtype)
    if not specs:  # reward functions do not accept an empty list
        return replace(batch, values=filled), ScoringResult({"values/prefixes": Sum(0.0)})
    continued, scoring = score(play(specs, samples_per_prefix))
    values = [mean_reward(group) for group in continued]
    for row, row_steps in enumerate(steps):
        peers = (batch.group == batch.group[row]) & batch.counted
        value = float(batch.reward[peers].mean())
        for start, place in row_steps:
            prefix_value = values[place]
            value = value if prefix_value is None else prefix_value
            filled[row, start:] = value
    failed = values.count(None)
    num_tokens = sum(t.num_sampled_tokens for g in continued for t in g.trajectories)
    metrics: Metrics = {name: Sum(float(num_tokens)) for name in ("tokens/values", "tokens/sampled")}
    metrics |= {"values/prefixes": Sum(float(len(specs))), "values/failed": Sum(float(failed))}
    note = "no completion of a prefix has a reward; its step takes the value of the step before" if failed else ""
    return replace(batch, values=filled), scoring.failures_only(metrics, note)


def mean_reward(group: EpisodeGroup) -> float | None:
    """Return the mean of the rewards that there are; None without any."""
    rewards = [t.reward for t in group.trajectories if t.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
