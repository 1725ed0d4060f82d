"""Rewards on another scale, leads, bounds and a teacher's signal, dropped groups: numbers by hand, states, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import policygrad as pg
from policygrad.core.base import Explanation
from policygrad.core.validation import check_rollout
from policygrad.parts import (
    ClipAdvantage,
    ClipReward,
    GroupLength,
    MarginalMax,
    RewardRange,
    RunningScale,
    TeacherBonus,
)


def rollout(rewards: list[float], groups: list[int] | None = None, lengths: list[int] | None = None) -> pg.Batch:
    lengths = lengths or [2] * len(rewards)
    return pg.Batch(
        mask=torch.arange(max(lengths)) < torch.tensor(lengths)[:, None],
        group=torch.tensor(groups or [0] * len(rewards)),
        reward=torch.tensor(rewards, dtype=torch.float64),
    )


def advantages(batch: pg.Batch, *chain: pg.Advantage) -> list[float]:
    psi = replace(pg.GRPO, advantage=chain, terms=()).compute_advantages(batch)
    return [float(row[mask][0]) for row, mask in zip(psi, batch.mask, strict=True)]


def test_only_the_best_completion_leads() -> None:
    for rewards, expected in [
        ([0.0, 3, 1, 1], [0, 2, 0, 0]),
        ([3.0, 3, 1, 1], [0, 0, 0, 0]),
        ([-1.0, -3], [2, 0]),
        ([1.0], [0]),
    ]:
        assert advantages(rollout(rewards), MarginalMax()) == expected
    assert advantages(rollout([0.0, 3, 1, 2], [0, 0, 1, 1]), MarginalMax()) == [0, 3, 0, 1]
    explained = MarginalMax().explain(Explanation.of_rewards([0.0, 3.0]), [0.0, 3.0])
    assert explained is not None
    assert explained.values == (0.0, 3.0)


def test_the_lead_is_an_unbiased_gradient_of_the_expected_best() -> None:
    """Two completions of a Bernoulli policy, by enumeration: ∇E[max(R_1, R_2)] = 2(1 − p)·∇p."""
    p, estimate = 0.3, 0.0
    score = {1.0: 1 / p, 0.0: -1 / (1 - p)}  # ∇_p log π
    for a in (0.0, 1.0):
        for b in (0.0, 1.0):
            probability = (p if a else 1 - p) * (p if b else 1 - p)
            psi = advantages(rollout([a, b]), MarginalMax())
            estimate += probability * (psi[0] * score[a] + psi[1] * score[b])
    assert estimate == pytest.approx(2 * (1 - p))


def test_the_std_of_the_others() -> None:
    chain = (pg.LeaveOneOut(), pg.GroupStd(eps=0.0, leave_one_out=True))
    # of 0 the others are 1, 2, 3: mean 2, std 1. Of 3 they are 0, 1, 2. Of 1: 0, 2, 3.
    expected = [-2.0, (1 - 5 / 3) / math.sqrt(7 / 3), (2 - 4 / 3) / math.sqrt(7 / 3), 2.0]
    assert advantages(rollout([0.0, 1, 2, 3]), *chain) == pytest.approx(expected)
    assert advantages(rollout([0.0, 0, 1, 0]), *chain)[2] == 1  # the others are equal: not divided
    assert advantages(rollout([0.0, 1]), *chain) == [-1, 1]  # one sibling has no std
    assert advantages(rollout([0.1] * 5), *chain) == [0.0] * 5


def test_advantages_are_bounded_on_both_sides() -> None:
    assert advantages(rollout([0.0, 4, 0, 0]), pg.GroupMean(), ClipAdvantage(-0.5, 2)) == [-0.5, 2, -0.5, -0.5]


def test_a_teacher_adds_to_what_the_reward_says() -> None:
    batch = replace(
        rollout([0.0, 1.0]),
        logp_old=torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]).double(),
        logp_ref=torch.tensor([[-0.5, -3.0], [-1.0, -9.0]]).double(),
    )
    algorithm = replace(pg.GRPO, advantage=(pg.GroupMean(), TeacherBonus(0.5, clip=1.0)), terms=())
    assert algorithm.compute_advantages(batch).tolist() == [[-0.25, -1.0], [0.5, 0.0]]
    unread = replace(batch, has_reference=torch.tensor([True, False]))
    assert algorithm.compute_advantages(unread).tolist() == [[-0.25, -1.0], [0.5, 0.5]]
    assert algorithm.equation()["Ψ"] == "R_i − mean_g + 0.5·clip(log(π_ref/π_old)_t, ±1)"
    assert not algorithm.has_zero_advantage
    assert algorithm.reads_reward
    with pytest.raises(pg.ConfigError, match="learns from a teacher: set --teacher"):
        check_rollout(algorithm)


def test_rewards_are_clipped_before_a_kl() -> None:
    shaped = ClipReward(-1, 1)(rollout([-3.0, 0.5, 7.0]))
    assert shaped.reward.tolist() == [-1, 0.5, 1]


def test_a_running_scale_is_that_of_all_scores_so_far_and_survives_json() -> None:
    part = RunningScale(eps=0.0)
    state = part.init_state()
    algorithm = replace(pg.REINFORCE, shaping=(part,))
    seen: list[float] = []
    for rewards in ([1.0, 3.0], [5.0, 5.0], [0.0, 2.0]):
        batch = rollout(rewards)
        seen += rewards
        mean = sum(seen) / len(seen)
        std = math.sqrt(sum((x - mean) ** 2 for x in seen) / (len(seen) - 1))
        shaped = replace(algorithm, shaping=(part.with_state(state),)).shape_rewards(batch)
        assert shaped.reward.tolist() == pytest.approx([(x - mean) / std for x in rewards])
        state = json.loads(json.dumps(part.update_state(state, shaped, {})))
    assert state == {"count": 6, "mean": pytest.approx(8 / 3), "square": pytest.approx(64 - 6 * (8 / 3) ** 2)}
    assert RunningScale()(rollout([0.7, 0.7])).reward.tolist() == [0.0, 0.0]
    assert RunningScale(center=False)(rollout([0.7, 0.7])).reward.tolist() == [0.7, 0.7]


def test_the_shortest_correct_completion_gains_most() -> None:
    batch = rollout([1.0, 1.0, 1.0, 0.0, 0.0], lengths=[2, 4, 6, 2, 6])
    assert (GroupLength(1.0)(batch).reward - batch.reward).tolist() == [0.5, 0.0, -0.5, 0.0, -0.5]
    assert GroupLength()(rollout([1.0, 0.0])).reward.tolist() == [1.0, 0.0]  # equally long


def test_groups_outside_a_range_are_dropped() -> None:
    batch = rollout([0.0, 0, 1, 0, 1, 1], [0, 0, 1, 1, 2, 2])
    assert RewardRange().find_dropped(batch).tolist() == [True, True, False, False, True, True]
    assert RewardRange("drop", low=0.5, high=2)(batch).mask.any(1).tolist() == [False] * 4 + [True] * 2
    noisy = rollout([0.5, 0.51, 0.2, 0.9], [0, 0, 1, 1])
    assert pg.DropZeroVariance(tolerance=0.02).find_dropped(noisy).tolist() == [True, True, False, False]
    assert not pg.DropZeroVariance().find_dropped(noisy).any()
    assert pg.DAPO.filters[0].formula == "groups with max R = min R are dropped, ≤ 4 rounds of refill"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ClipAdvantage(0.5, 2), r"ClipAdvantage\.low must be at most 0"),
        (lambda: ClipReward(1, 0), r"ClipReward\.low must be below ClipReward\.high = 0"),
        (lambda: RewardRange(low=1, high=1), r"RewardRange\.low must be below RewardRange\.high = 1"),
        (lambda: GroupLength(0), r"GroupLength\.weight must be above 0"),
        (lambda: TeacherBonus(clip=0), r"TeacherBonus\.clip must be above 0 nats, or None"),
        (lambda: replace(pg.GRPO, advantage=(pg.GroupMean(), MarginalMax())), "put it first in advantage"),
    ],
)
def test_refuses(make: object, says: str) -> None:
    with pytest.raises(pg.ConfigError, match=says):
        make()  # type: ignore[operator]
