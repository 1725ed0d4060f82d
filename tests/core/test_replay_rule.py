"""The rule of the replay buffer: what it keeps, what it draws, and beside what it means nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import policygrad as pg
from policygrad.core.replay import ReplayBuffer, measure_worth
from policygrad.errors import ConfigError
from policygrad.lab.setting import unsupported_reason


@pytest.mark.parametrize(
    ("rewards", "worth"),
    [
        ([1, 0, 0, 0], 1.5),  # 3/4 + 3 · 1/4
        ([1, 1, 0, 0], 2.0),
        ([1, 1, 1, 0], 1.5),
        ([1, 1, 0, 0, 1, 1, 0, 0], 4.0),  # twice as many completions: twice as much
        ([0.5, 0.1, None], 0.4),  # a completion that failed does not count
        ([1, 1, 1], 0.0),
        ([None, None], 0.0),
    ],
)
def test_a_group_is_worth_its_spread_times_its_size(rewards: list[float | None], worth: float) -> None:
    assert measure_worth(rewards) == pytest.approx(worth, abs=1e-15)


def test_the_worth_is_that_of_trl_up_to_its_epsilon() -> None:
    """TRL: Σ |A|·std, A = (R − mean)/(std + 1e-4), std over n − 1."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.25], dtype=torch.float64)
    std = rewards.std()
    trl = float((((rewards - rewards.mean()) / (std + 1e-4)).abs() * std).sum())
    assert measure_worth(rewards.tolist()) == pytest.approx(trl, rel=3e-4)
    assert measure_worth(rewards.tolist()) * float(std / (std + 1e-4)) == pytest.approx(trl, rel=1e-12)


def test_the_groups_that_are_worth_most_are_kept_and_of_equal_ones_the_newest() -> None:
    buffer = ReplayBuffer(size=3)
    assert buffer.choose_kept([0.5, 0.8, 0.3, 0.9, 0.7]) == [1, 3, 4]
    assert buffer.choose_kept([1.0, 2.0, 1.0, 1.0]) == [1, 2, 3]
    assert buffer.choose_kept([1.0]) == [0]


def test_groups_are_drawn_in_proportion_to_their_worth_and_none_twice() -> None:
    buffer = ReplayBuffer()
    first = Counter(buffer.draw([1.0, 3.0, 4.0], 1, step)[0] for step in range(4000))
    assert [first[i] / 4000 for i in range(3)] == pytest.approx([1 / 8, 3 / 8, 1 / 2], abs=0.03)
    assert sorted(buffer.draw([1.0, 3.0, 4.0], 5, 1)) == [0, 1, 2]  # no more than there are
    assert buffer.draw([], 2, 1) == buffer.draw([1.0], 0, 1) == []
    many = [1.0] * 50
    assert buffer.draw(many, 9, 3) == buffer.draw(many, 9, 3)  # of the step and the seed alone
    assert buffer.draw(many, 9, 3) != buffer.draw(many, 9, 4)
    assert buffer.draw(many, 9, 3) != ReplayBuffer(seed=1).draw(many, 9, 3)


def test_a_batch_passes_unchanged_and_groups_of_equal_rewards_are_those_to_replace() -> None:
    batch = pg.Batch(
        mask=torch.ones(4, 3, dtype=torch.bool),
        group=torch.tensor([0, 0, 1, 1]),
        reward=torch.tensor([1.0, 1.0, 0.0, 1.0]),
    )
    assert ReplayBuffer()(batch) is batch
    assert ReplayBuffer().find_dropped(batch).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (pg.DISTILL, "no link of the advantage of distill compares them. Add GroupMean"),
        (pg.REMAX, "no link of the advantage of remax"),
        (pg.PPO, "no link of the advantage of ppo"),
        (pg.TRPO_VINE, "ReplayBuffer"),
        (replace(pg.GRPO, filters=(pg.NoPositiveResampling(),)), "ReplayBuffer replaces some of them first"),
        (pg.LUFFY, "ReplayBuffer replaces groups of equal rewards before a demonstration joins them"),
    ],
)
def test_what_does_not_go_with_a_replay_buffer_is_refused(algorithm: pg.Algorithm, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(algorithm, filters=(ReplayBuffer(), *algorithm.filters))


def test_one_filter_replaces_groups() -> None:
    with pytest.raises(
        ConfigError, match=r"DropZeroVariance decides which groups are replaced.*the only one that does"
    ):
        replace(pg.GRPO, filters=(ReplayBuffer(), pg.DropZeroVariance()))
    with pytest.raises(ConfigError, match=r"ReplayBuffer decides which groups are replaced: put it first"):
        replace(pg.GRPO, filters=(pg.DropZeroVariance("drop"), ReplayBuffer()))
    replace(pg.GRPO, filters=(ReplayBuffer(), pg.DropZeroVariance("drop"), pg.MaskTruncated()))


def test_settings_out_of_range_are_refused() -> None:
    for changed in ({"size": 0}, {"max_age": 0}, {"seed": -1}):
        with pytest.raises(ConfigError, match=rf"ReplayBuffer\.{min(changed)} must be"):
            ReplayBuffer(**changed)  # type: ignore[arg-type]


def test_the_lab_says_that_it_has_no_earlier_steps() -> None:
    reason = unsupported_reason(replace(pg.GRPO, filters=(ReplayBuffer(),)), 4)
    assert reason is not None
    assert "leave out its replay buffer" in reason
