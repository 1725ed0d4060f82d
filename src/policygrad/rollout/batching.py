"""From episodes to tensors, and what a rollout measures of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from policygrad.core.batch import Batch
from policygrad.core.masked import Groups
from policygrad.core.metrics import Max, Mean, Metrics, Sum, merge
from policygrad.rollout.trajectory import EpisodeGroup, Trajectory, is_multi_turn
from policygrad.tasks.base import Example
from policygrad.tasks.rows import prompt_key

# Which of the task's examples a step takes, and how a prompt is known when it comes again.

ALL_EXCLUDED_NOTE = "every prompt that came up rests, solved or too hard: they are sampled again"

EXTRA_LOOKAHEAD = 64
"""Further prompts that are looked at, for tasks in which one stands more than once."""


def hash_prompt(example: Example) -> int:
    """A prompt's own number in [0, 2^63): the same in every epoch and every run, whatever its place."""
    return int.from_bytes(sha256(prompt_key(example.prompt).encode()).digest()[:8], "big") >> 1


def next_examples(
    examples: Callable[[int], Example], count: int, position: int, resting: frozenset[int]
) -> tuple[list[tuple[int, Example]], bool]:
    """(`count` examples with their places, from `position` on, those that rest passed over; whether all of them rest).

    In an epoch each prompt comes once, so that even across the end of one no more than twice the resting prompts follow each
    other; a run longer than that, and by `EXTRA_LOOKAHEAD`, means that there are no others, and from there on they are taken as they
    come.
    """
    found: list[tuple[int, Example]] = []
    run, all_rest = 0, False
    while len(found) < count:
        example = examples(position)
        if resting and not all_rest and hash_prompt(example) in resting:
            run += 1
            all_rest = run > 2 * len(resting) + EXTRA_LOOKAHEAD
        else:
            run = 0
            found.append((position, example))
        position += 1
    return found, all_rest


def batch_groups(groups: Sequence[EpisodeGroup], needs: frozenset[str] = frozenset()) -> Batch:
    """Right-padded tensors; an episode without a reward (None) has an all-false mask: it takes no part in anything.

    needs: fields that are filled only where somebody reads them: rewards, levels, and demonstration where there is none.
    """
    rows = [t for g in groups for t in g.trajectories]

    def padded(columns: list[Tensor]) -> Tensor:
        return pad_sequence(columns, batch_first=True)

    lengths = torch.tensor([sum(len(s.tokens) for s in t.segments) for t in rows])
    within = torch.arange(int(lengths.max())) < lengths[:, None]
    one_turn = all(len(t.segments) == 1 for t in rows)
    scored = torch.tensor([t.reward is not None for t in rows], dtype=torch.bool)
    sizes = torch.tensor([len(g.trajectories) for g in groups], dtype=torch.int64)
    batch = Batch(
        mask=(within if one_turn else padded([t.mask for t in rows])) & scored[:, None],
        group=torch.arange(len(groups)).repeat_interleave(sizes),
        reward=torch.tensor([0.0 if t.reward is None else float(t.reward) for t in rows]),
        tokens=padded([t.tokens for t in rows]),
        prompts=tuple(g.prompt_ids for g in groups),
        logp_sampler=padded([t.logp for t in rows]),
        version=padded([t.version for t in rows]),
        truncated=torch.tensor([t.truncated for t in rows], dtype=torch.bool),
        positions=padded([t.positions(len(g.prompt_ids)) for g in groups for t in g.trajectories])
        if _branches(rows)
        else None,
        example_id=torch.tensor([hash_prompt(g.spec.example) for g in groups], dtype=torch.int64).repeat_interleave(
            sizes
        ),
        **_experts(groups),
    )
    if "demonstration" in needs or any(t.demonstration for t in rows):
        batch = replace(batch, demonstration=torch.tensor([t.demonstration for t in rows], dtype=torch.bool))
    for name in sorted({"level", "levels"} & needs):  # columns of a task that has them
        said = torch.tensor([g.spec.example.columns[name] for g in groups], dtype=torch.int64)
        change: dict[str, Any] = {name: said.repeat_interleave(sizes)}
        batch = replace(batch, **change)
    return _with_rewards(batch, groups) if "rewards" in needs else batch


def _with_rewards(batch: Batch, groups: Sequence[EpisodeGroup]) -> Batch:
    """`rewards`, by the names in the order they are met; NaN where a reward has said nothing of a completion."""
    named = dict(pair for g in groups for pair in g.reward_weights)
    table = torch.full((len(batch.mask), len(named)), torch.nan)
    place = {name: k for k, name in enumerate(named)}
    row = 0
    for group in groups:
        for t in group.trajectories:
            for (name, _), value in zip(group.reward_weights, t.reward_parts, strict=True):
                table[row, place[name]] = torch.nan if value is None else value
            row += 1
    return replace(batch, rewards=table, reward_names=tuple(named), reward_weights=tuple(named.values()))


def _branches(rows: Sequence[Trajectory]) -> bool:
    return any(t.num_branches > 1 for t in rows)


def _experts(groups: Sequence[EpisodeGroup]) -> dict[str, Any]:
    """The experts that sampled, where every episode tells them: of each completion, and of each group's prompt."""
    rows = [(t.routed_experts, len(g.prompt_ids)) for g in groups for t in g.trajectories]
    known = [(routes, size) for routes, size in rows if routes is not None]
    if len(known) < len(rows):
        return {}
    prompts = tuple(
        routes[: len(g.prompt_ids)] for g in groups if (routes := g.trajectories[0].routed_experts) is not None
    )
    answers = pad_sequence([routes[size:] for routes, size in known], batch_first=True, padding_value=-1)
    return {"routed_experts": answers, "prompt_routed_experts": prompts}


def measure_rollout(rounds: Sequence[tuple[Sequence[EpisodeGroup], Batch]]) -> Metrics:
    """Of everything sampled, what dynamic sampling set aside included: the policy's reward, not the training batch's.

    What no episode could be measured for (every reward failed) is left out, rather than reported as 0.
    """
    rows = [t for groups, _ in rounds for g in groups for t in g.trajectories]
    lengths = torch.tensor([t.num_sampled_tokens for t in rows], dtype=torch.float64)
    found: dict[str, list[Tensor]] = {
        "completions/mean_length": [lengths],
        "completions/truncated_ratio": [torch.tensor([float(t.truncated) for t in rows])],
        "entropy": [  # −log μ at the samples: an unbiased estimate of the policy's entropy
            -torch.cat([torch.empty(0), *(s.logp for t in rows for s in t.segments if s.logp is not None)])
        ],
    }
    for _, batch in rounds:
        counted, per_group = batch.counted, Groups(batch.group, batch.counted)
        values = {
            "reward": batch.reward[counted],
            "reward_std": per_group.std(batch.reward, 1)[counted],
            "frac_reward_zero_std": per_group.is_constant(batch.reward)[counted],
            "completions/failed_ratio": ~counted,
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    whole = {name: torch.cat(parts).double() for name, parts in found.items()}
    metrics: Metrics = {name: Mean(float(x.sum()), float(len(x))) for name, x in whole.items() if len(x)}
    metrics |= {"tokens/sampled": Sum(float(lengths.sum())), "completions/max_length": Max(float(lengths.max()))}
    groups = [group for some, _ in rounds for group in some]
    return merge(metrics, *map(_of_environment, rows), *map(_of_part, groups), _turns(rows))


def count_trained(sampled: int, batch: Batch) -> Metrics:
    """completions/sampled in a step; /trained, those of its batch that can move the weights; /sampled_per_trained, their ratio,
    where there are any: dynamic sampling and down-sampling take more than 1, what was carried over takes less."""
    trains = batch.policy_tokens if batch.weight is None else batch.policy_tokens & (batch.weight != 0)
    trained = float(trains.any(1).sum())
    counts: Metrics = {"completions/sampled": Sum(float(sampled)), "completions/trained": Sum(trained)}
    return counts | ({"completions/sampled_per_trained": Mean(float(sampled), trained)} if trained else {})


def _of_part(group: EpisodeGroup) -> Metrics:
    """The reward, by the part of a mix that the prompt is of."""
    part = getattr(group.spec.example, "part", "")
    known = [t.reward for t in group.trajectories if t.reward is not None]
    return {f"reward/from/{part}": Mean(sum(known), float(len(known)))} if part and known else {}


def _of_environment(row: Trajectory) -> Metrics:
    """What the environment measured; a mean over the episodes that have it."""
    return {f"environment/{name}": Mean(value) for name, value in row.metrics.items()}


def _turns(rows: Sequence[Trajectory]) -> Metrics:
    """Turns of the policy per episode, what ended them, and texts that they are read as, where any has several or an environment
    says."""
    turns = [sum(s.is_sampled for s in row.segments) for row in rows]
    if not is_multi_turn(rows):
        return {}
    ends = Counter(row.stop_reason for row in rows if row.stop_reason)
    count = float(len(rows))
    shares: Metrics = {f"environment/ended_{word}": Mean(float(n), count) for word, n in sorted(ends.items())}
    texts = [row.num_branches for row in rows]
    return shares | {
        "environment/turns": Mean(float(sum(turns)), count),
        "environment/branches": Mean(float(sum(texts)), count),
        "environment/branched_ratio": Mean(float(sum(n > 1 for n in texts)), count),
    }


# Turns: from the states in which an episode's turns began, and what each was worth, to the batch.


def add_turn_states(batch: Batch, groups: Sequence[EpisodeGroup], *, scored: bool) -> Batch:
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
                state = trajectory.turn_states[turn] if trajectory.turn_states else None
                number[row, first : last + 1] = known.setdefault(state, len(known))
                own = trajectory.turn_rewards[turn] if trajectory.turn_rewards else None
                worth[row, last] = own or 0.0
            rest[row] = rest[row] - sum(x for x in trajectory.turn_rewards if x is not None)
            row += 1
    batch = replace(batch, turn_state=number)
    if not scored:
        return batch
    worth = worth if batch.token_reward is None else worth + batch.token_reward  # the scores of a turn's steps
    return replace(batch, token_reward=worth, reward=rest)


def _spans(trajectory: Trajectory) -> list[tuple[int, int]]:
    """(first, last) token of each turn of the policy."""
    found, at = [], 0
    for segment in trajectory.segments:
        end = at + len(segment.tokens)
        if segment.is_sampled:
            found.append((at, end - 1))
        at = end
    return found
