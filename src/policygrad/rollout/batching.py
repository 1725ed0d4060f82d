"""Select a step's examples, turn episodes into a batch, and measure a rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from policygrad.core.batch import Batch
from policygrad.core.masked import Groups
from policygrad.core.metrics import Max, Mean, Metrics, Sum, list_means, merge
from policygrad.rollout.trajectory import EpisodeGroup, is_multi_turn
from policygrad.tasks.base import Example, prompt_key

ALL_EXCLUDED_NOTE = "all prompts are excluded, as solved or too hard: excluded prompts are sampled again"
EXTRA_LOOKAHEAD = 64
"""Excluded examples in a row that are tolerated beyond the expected number, for tasks that repeat prompts."""


def hash_prompt(example: Example) -> int:
    """Return a number in [0, 2^63) that identifies the prompt in every epoch and every run."""
    return int.from_bytes(sha256(prompt_key(example.prompt).encode()).digest()[:8], "big") >> 1


def next_examples(
    examples: Callable[[int], Example], count: int, position: int, excluded: frozenset[int]
) -> tuple[list[tuple[int, Example]], bool]:
    """Return (`count` examples with their indices, from `position` on without the excluded ones; True if all are excluded).

    An epoch has each prompt once, so at most twice the number of excluded prompts can follow each other, across the end of an
    epoch. A longer run, by `EXTRA_LOOKAHEAD`, means that no other prompts exist; from there on excluded ones are taken.
    """
    chosen: list[tuple[int, Example]] = []
    run, all_excluded = 0, False
    while len(chosen) < count:
        example = examples(position)
        if excluded and not all_excluded and hash_prompt(example) in excluded:
            run += 1
            all_excluded = run > 2 * len(excluded) + EXTRA_LOOKAHEAD
        else:
            run = 0
            chosen.append((position, example))
        position += 1
    return chosen, all_excluded


ON_REQUEST = frozenset({"demonstration", "rewards", "level", "observation", "role", "peers"})
"""Fields that a batch has only where they are needed."""


def batch_groups(groups: Sequence[EpisodeGroup], needs: frozenset[str] = frozenset()) -> Batch:
    """Return the episodes as right-padded tensors. An episode whose reward is None is masked completely.

    needs: Fields that are filled only on request: rewards, level, levels, observation, and demonstration if there is none.
    """
    rows = [t for g in groups for t in g.trajectories]

    def pad(columns: list[Tensor]) -> Tensor:
        return pad_sequence(columns, batch_first=True)

    lengths = torch.tensor([sum(len(s.tokens) for s in t.segments) for t in rows])
    within = torch.arange(int(lengths.max())) < lengths[:, None]
    one_turn = all(len(t.segments) == 1 and t.segments[0].is_sampled for t in rows)
    branched = any(t.num_branches > 1 for t in rows)
    scored = torch.tensor([t.reward is not None for t in rows], dtype=torch.bool)
    sizes = torch.tensor([len(g.trajectories) for g in groups], dtype=torch.int64)

    def per_episode(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).repeat_interleave(sizes)

    fields: dict[str, Any] = {}
    experts = [(x, len(g.prompt_ids)) for g in groups for t in g.trajectories if (x := t.routed_experts) is not None]
    if len(experts) == len(rows):  # the experts used in sampling, only if none are missing
        fields["routed_experts"] = pad_sequence([x[n:] for x, n in experts], batch_first=True, padding_value=-1)
        fields["prompt_routed_experts"] = tuple(
            x[: len(g.prompt_ids)] for g in groups if (x := g.trajectories[0].routed_experts) is not None
        )
    masks = [t.sampling_mask for t in rows]
    if any(left is not None for left in masks):
        none = torch.zeros(0, dtype=torch.int32)
        fields |= {
            "sampling_mask_counts": pad(
                [
                    torch.zeros(len(t.tokens), dtype=torch.int32) if left is None else left.counts
                    for t, left in zip(rows, masks, strict=True)
                ]
            ),
            "sampling_mask_ids": tuple(none if left is None else left.ids for left in masks),
        }
    if "observation" in needs:
        fields["observation"] = pad([t.observation for t in rows])
    if branched:
        fields["positions"] = pad([t.positions(len(g.prompt_ids)) for g in groups for t in g.trajectories])
    if "demonstration" in needs or any(t.demonstration for t in rows):
        fields["demonstration"] = torch.tensor([t.demonstration for t in rows], dtype=torch.bool)
    if any(g.media for g in groups):
        fields["prompt_media"] = tuple(g.media for g in groups)
    if any(s.media for t in rows for s in t.segments):
        fields["completion_media"] = tuple(t.media for t in rows)
    for name in {"level", "levels"} & needs:  # columns of a task with levels
        fields[name] = per_episode([g.spec.example.columns[name] for g in groups])
    if "role" in needs or any(t.role for t in rows):
        names = tuple(sorted({t.role for t in rows}))
        fields |= {"role": torch.tensor([names.index(t.role) for t in rows]), "role_names": names}
    if "peers" in needs or any(t.peers for t in rows):
        numbers: dict[str, int] = {}
        fields["peers"] = torch.tensor([numbers.setdefault(t.peers, len(numbers)) for t in rows])
    if "rewards" in needs:
        weights = dict(pair for g in groups for pair in g.reward_weights)
        column = {name: k for k, name in enumerate(weights)}
        table = torch.full((len(rows), len(weights)), torch.nan)  # NaN where a completion has no value of a reward
        for row, (group, t) in enumerate((g, t) for g in groups for t in g.trajectories):
            for (name, _), value in zip(group.reward_weights, t.reward_parts, strict=True):
                table[row, column[name]] = torch.nan if value is None else value
        fields |= {"rewards": table, "reward_names": tuple(weights), "reward_weights": tuple(weights.values())}
    return Batch(
        mask=(within if one_turn else pad([t.mask for t in rows])) & scored[:, None],
        group=torch.arange(len(groups)).repeat_interleave(sizes),
        reward=torch.tensor([0.0 if t.reward is None else float(t.reward) for t in rows]),
        tokens=pad([t.tokens for t in rows]),
        prompts=tuple(g.prompt_ids for g in groups),
        logp_sampler=pad([t.logp for t in rows]),
        version=pad([t.version for t in rows]),
        truncated=torch.tensor([t.truncated for t in rows], dtype=torch.bool),
        example_id=per_episode([hash_prompt(g.spec.example) for g in groups]),
        **fields,
    )


def measure_rollout(rounds: Sequence[tuple[Sequence[EpisodeGroup], Batch]]) -> Metrics:
    """Measure everything that was sampled, dropped groups included: the policy's reward, not the training batch's.

    A metric without any value (every reward failed) is left out rather than reported as 0.
    """
    groups = [group for round_groups, _ in rounds for group in round_groups]
    rows = [t for g in groups for t in g.trajectories]
    lengths = torch.tensor([t.num_sampled_tokens for t in rows], dtype=torch.float64)
    values: dict[str, list[Tensor]] = {
        "completions/mean_length": [lengths],
        "completions/truncated_ratio": [torch.tensor([float(t.truncated) for t in rows])],
        "completions/failed_ratio": [torch.tensor([float(t.reward is None) for t in rows])],
        "entropy": [  # −log μ at the samples: an unbiased estimate of the policy's entropy
            -torch.cat([torch.empty(0), *(s.logp for t in rows for s in t.segments if s.logp is not None)])
        ],
    }
    for round_groups, batch in rounds:
        rewards = [t.reward for g in round_groups for t in g.trajectories if t.reward is not None]
        counted, per_group = batch.counted, Groups(batch.group, batch.counted)
        for name, value in {
            "reward": torch.tensor(rewards),  # also of a player that never moved
            "reward_std": per_group.std(batch.reward, 1)[counted],
            "frac_reward_zero_std": per_group.is_constant(batch.reward)[counted],
        }.items():
            values.setdefault(name, []).append(value)
    flat = {name: torch.cat(parts).double() for name, parts in values.items()}
    metrics: Metrics = {name: Mean(float(x.sum()), float(len(x))) for name, x in flat.items() if len(x)}
    metrics |= {"tokens/sampled": Sum(float(lengths.sum())), "completions/max_length": Max(float(lengths.max()))}
    environment: list[Metrics] = [{f"environment/{k}": Mean(v) for k, v in row.metrics.items()} for row in rows]
    sources: list[Metrics] = []  # mean reward by source, for a mixture of data
    for group in groups:
        if source := getattr(group.spec.example, "part", ""):
            rewards = [t.reward for t in group.trajectories if t.reward is not None]
            sources.append(list_means({f"reward/from/{source}": rewards}))
    roles: dict[str, list[float]] = {}
    for row in rows:
        if (role := row.role) and row.reward is not None:
            roles.setdefault(f"reward/role/{role}", []).append(row.reward)
    turns: Metrics = {}
    if is_multi_turn(rows):
        branches = [row.num_branches for row in rows]
        ends = Counter(row.stop_reason for row in rows if row.stop_reason)
        turns = {f"environment/ended_{x}": Mean(float(n), float(len(rows))) for x, n in sorted(ends.items())}
        turns |= list_means(
            {
                "environment/turns": [sum(s.is_sampled for s in row.segments) for row in rows],
                "environment/branches": branches,
                "environment/branched_ratio": [n > 1 for n in branches],
            }
        )
    return merge(metrics, *environment, *sources, list_means(roles), turns)


def count_trained(num_sampled: int, batch: Batch) -> Metrics:
    """Count the completions sampled for a step and those that can move the weights, and their ratio if there are any.

    Dynamic sampling and down-sampling make the ratio larger than 1, leftover groups make it smaller.
    """
    trains = batch.policy_tokens if batch.weight is None else batch.policy_tokens & (batch.weight != 0)
    trained = float(trains.any(1).sum())
    counts: Metrics = {"completions/sampled": Sum(float(num_sampled)), "completions/trained": Sum(trained)}
    return counts | ({"completions/sampled_per_trained": Mean(float(num_sampled), trained)} if trained else {})
