"""Random rewards by function, turns and demonstrations for a random batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

import policygrad as pg

NAN = float("nan")


class Draws(Protocol):
    def normal(self, *shape: int) -> Tensor: ...
    def uniform(self, *shape: int) -> Tensor: ...
    def integers(self, high: int, *shape: int) -> Tensor: ...


def with_rewards(batch: pg.Batch, random: Draws) -> pg.Batch:
    """Three reward functions: 0 or 1, a real number, one that a fifth of the completions have no number of."""
    rows = len(batch.mask)
    third = torch.where(random.uniform(rows) < 0.2, NAN, random.normal(rows))
    rewards = torch.stack([random.integers(2, rows).double(), random.normal(rows), third], 1)
    weights = (1.0, -0.5, 0.25)
    total = (rewards.nan_to_num() * torch.tensor(weights, dtype=torch.float64)).sum(1)
    nobody = ~batch.mask.any(1)
    return replace(
        batch,
        reward=torch.where(nobody, NAN, total),
        rewards=torch.where(nobody[:, None], NAN, rewards),
        reward_names=("right", "brief", "sometimes"),
        reward_weights=weights,
    )


def with_turns(batch: pg.Batch, random: Draws) -> pg.Batch:
    """Turns from one of three states, some of them with a reward at their last token; noise where nothing was sampled."""
    mask, shape = batch.mask, batch.mask.shape
    anchor = torch.where(mask, (random.integers(3, *shape) * (random.uniform(*shape) < 0.5)).cummax(1).values, 99)
    ends = mask & ~torch.nn.functional.pad(mask & (anchor == anchor.roll(1, 1)), (0, 1))[:, 1:]
    worth = torch.where(ends, random.integers(3, *shape).double(), 0.0)
    return replace(batch, turn_state=anchor, token_reward=torch.where(mask, worth, NAN))


def with_demonstrations(batch: pg.Batch, random: Draws) -> pg.Batch:
    """About every third completion is shown; half of those by somebody who says with what probability."""
    rows = len(batch.mask)
    shown, silent = random.uniform(rows) < 0.35, random.uniform(rows) < 0.5
    assert batch.logp_sampler is not None
    output = torch.where(silent[:, None], 0.0, -random.normal(*batch.mask.shape).abs())
    sampler = torch.where((shown[:, None]) & batch.mask, output, batch.logp_sampler)
    return replace(batch, demonstration=shown, logp_sampler=sampler)


def with_successes(batch: pg.Batch, random: Draws) -> pg.Batch:
    """No reward below 0: how much of a success each was."""
    return replace(batch, reward=batch.reward.abs())


def with_weights(batch: pg.Batch, random: Draws) -> pg.Batch:
    """A positive weight at every token."""
    weight = 0.1 + random.uniform(*batch.mask.shape)
    return replace(batch, weight=torch.where(batch.mask, weight, NAN))


def with_roles(batch: pg.Batch, random: Draws) -> pg.Batch:
    """Two roles, the completions in a random order; the second is compared within one of two episodes."""
    rows = len(batch.mask)
    role = random.integers(2, rows)
    peers = role * (1 + random.integers(2, rows))
    return replace(batch, role=role, role_names=("proposer", "solver"), peers=peers)


def with_references(batch: pg.Batch, random: Draws) -> pg.Batch:
    """The reference has read about two completions in three; its numbers for the others are noise."""
    return replace(batch, has_reference=random.uniform(len(batch.mask)) < 0.7)


def with_observations(batch: pg.Batch, random: Draws) -> pg.Batch:
    """About half of the tokens that were not sampled, and some that were, which do not count."""
    return replace(batch, observation=random.uniform(*batch.mask.shape) < 0.5)


def with_sum_pi_squared(batch: pg.Batch, random: Draws) -> pg.Batch:
    """Σ_a π_old(a)², at least the sampled token's π_old², even where a random log π_old is no logarithm of a probability."""
    p = torch.ones_like(batch.mask, dtype=torch.float64) if batch.logp_old is None else batch.logp_old.exp()
    squares = p.clamp(min=1) ** 2 + random.uniform(*p.shape)
    return replace(batch, sum_pi_squared=torch.where(batch.mask, squares, NAN))


FILL: dict[str, Callable[[pg.Batch, Draws], pg.Batch]] = {
    "rewards": with_rewards,
    "turns": with_turns,
    "demonstrations": with_demonstrations,
    "successes": with_successes,
    "weights": with_weights,
    "roles": with_roles,
    "references": with_references,
    "sum_pi_squared": with_sum_pi_squared,
    "observations": with_observations,
}
READ_BY = {
    "rewards": "rewards",
    "turn_state": "turns",
    "demonstration": "demonstrations",
    "role": "roles",
    "peers": "roles",
    "sum_pi_squared": "sum_pi_squared",
    "observation": "observations",
}
"""A field that an algorithm declares -> what to fill."""


def blank(like: Tensor) -> dict[str, Any]:
    """The fields [B, T] as `like` of a batch of which nobody says anything: one silent reward, one state, no demonstration."""
    rows = len(like)
    return {
        "rewards": torch.full((rows, 1), NAN, dtype=torch.float64),
        "reward_names": ("silent",),
        "reward_weights": (1.0,),
        "turn_state": torch.zeros(like.shape, dtype=torch.int64),
        "demonstration": torch.zeros(rows, dtype=torch.bool),
        "role": torch.zeros(rows, dtype=torch.int64),
        "role_names": ("",),
        "peers": torch.zeros(rows, dtype=torch.int64),
        "sum_pi_squared": torch.ones_like(like),
        "observation": torch.ones(like.shape, dtype=torch.bool),
    }


def by_tokens(batch: pg.Batch, declared: frozenset[str]) -> pg.Batch:
    """What of these fields an algorithm declares, from the completions' own tokens: equal completions have equal ones."""
    tokens, rows = batch.tokens, torch.arange(len(batch.mask))
    assert tokens is not None
    if "rewards" in declared:
        table = torch.stack([batch.reward, batch.lengths.to(batch.reward.dtype)], 1)
        batch = replace(batch, rewards=table, reward_names=("reward", "length"), reward_weights=(1.0, -0.1))
    if "turn_state" in declared:
        batch = replace(batch, turn_state=tokens % 2, token_reward=(tokens % 3).double() * batch.mask)
    if "demonstration" in declared:
        shown = rows % 4 == 2
        output = torch.where(
            shown[:, None], 0.0, torch.zeros(batch.mask.shape) if batch.logp_old is None else batch.logp_old
        )
        batch = replace(batch, demonstration=shown, logp_sampler=output)
    if {"role", "peers"} & declared:
        kind = tokens[:, 0] % 2
        batch = replace(batch, role=kind, role_names=("first", "second"), peers=kind)
    if "observation" in declared:
        batch = replace(batch, observation=tokens % 2 == 0)
    if "sum_pi_squared" in declared:
        batch = replace(batch, sum_pi_squared=(0.3 + 0.1 * (tokens % 5)).to(batch.reward.dtype))
    if "baseline" in declared:
        batch = replace(batch, baseline=(batch.group % 2).to(batch.reward.dtype))
    if "example_id" in declared:
        batch = replace(batch, example_id=batch.group)
    return batch
