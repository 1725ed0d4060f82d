"""Rollouts on a table of logits: rewards reach the batch, failures leave it, dynamic sampling refills up to its cap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.rollouts import collect_rollout
from doubles.tabular_sampler import TabularSampler, TabularTokenizer
from policygrad.rewards.base import RewardScores
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.rollouter import Rollouter
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec, Segment, Trajectory
from policygrad.samplers.base import SamplingParams
from policygrad.tasks.base import Example


def solved(prompts: Sequence[str], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> RewardScores:
    """1 when the first token is the column `answer`."""
    return RewardScores([float(text.split()[:1] == [a]) for text, a in zip(texts, columns["answer"], strict=True)], {})


def run(algorithm: pg.Algorithm, sampler: TabularSampler, score: Any = solved, **changed: Any) -> Any:
    options = {"prompts": 4, "samples": 8, "step": 1, "position": 0} | changed
    rollouter = Rollouter(lambda i: Example(str(i % 4), {"answer": "1"}), TabularTokenizer(), sampler, score)  # type: ignore[arg-type, return-value]
    return collect_rollout(rollouter, algorithm, SamplingParams(max_tokens=3), **options)


def test_a_rollout_is_groups_of_completions_with_their_rewards() -> None:
    rollout = run(pg.GRPO, TabularSampler(4, 3, 4), position=2)
    batch = rollout.batch
    assert rollout.position == 6
    assert batch.group.tolist() == [g for g in range(4) for _ in range(8)]
    assert [p.tolist() for p in batch.prompts] == [[2], [3], [0], [1]]
    assert rollout.prompts[:8] == ("2",) * 8
    first = torch.tensor([text.split()[:1] == ["1"] for text in rollout.completions])
    assert torch.equal(batch.reward.bool(), first)
    assert rollout.metrics["reward"].value == pytest.approx(float(first.float().mean()))
    assert rollout.metrics["entropy"].value == pytest.approx(float(torch.tensor(4.0).log()), rel=1e-6)  # uniform table
    assert torch.allclose(batch.logp_sampler[batch.mask].exp(), torch.tensor(0.25))
    assert bool(((batch.lengths == 3) | (~batch.truncated)).all())


def test_the_same_position_and_step_draw_the_same_and_others_do_not() -> None:
    a, b, c = (run(pg.GRPO, TabularSampler(4, 3, 4), step=s).completions for s in (1, 1, 2))
    assert a == b != c


def test_a_completion_without_a_reward_takes_no_part() -> None:
    def score(prompts: Any, texts: Sequence[str], columns: Any) -> RewardScores:
        return RewardScores(
            [None if i % 8 < 7 else 1.0 for i in range(len(texts))], {}, {"raised": 28}, messages=["boom"]
        )

    rollout = run(pg.GRPO, TabularSampler(4, 3, 4), score)
    assert rollout.batch.counted.sum() == 4
    assert rollout.messages == ("boom",)
    assert rollout.metrics["rewards/failed_raised"].value == 28
    assert rollout.metrics["reward"].value == 1.0
    psi = pg.GRPO.compute_advantages(rollout.batch)
    assert torch.equal(psi, torch.zeros_like(psi))  # a group left with one member teaches nothing


def test_refill_fills_the_step_with_groups_that_have_spread() -> None:
    algorithm = replace(pg.CISPO, filters=(pg.DropZeroVariance(max_rounds=5),))
    sampler = TabularSampler(4, 3, 4)
    sampler.table[0, 0, 1] = sampler.table[1, 0, 1] = 50.0  # prompts 0 and 1 are always solved
    rollout = run(algorithm, sampler)
    assert rollout.position == 8
    assert {int(p) for p in rollout.prompts} == {2, 3}
    assert rollout.batch.weight is None
    assert rollout.metrics["frac_reward_zero_std"].value == pytest.approx(
        0.5
    )  # of everything sampled, not of what was kept
    assert not rollout.messages


def test_refill_stops_at_its_cap_and_reports() -> None:
    algorithm = replace(pg.CISPO, filters=(pg.DropZeroVariance(max_rounds=3),))
    sampler = TabularSampler(4, 3, 4)
    sampler.table[:3, 0, 1] = 50.0
    rollout = run(algorithm, sampler)
    batch = rollout.batch
    assert rollout.position == 12
    assert "still have equal rewards after 3 rounds" in rollout.messages[0]
    assert rollout.metrics["dynamic/unfilled"].value == 1
    assert len(batch.mask) == 32
    assert batch.weight[:24].unique().tolist() == [pytest.approx(4 / 3)]
    assert batch.weight[24:].unique().tolist() == [0.0]


@pytest.mark.parametrize("mode", ["refill", "reweight", "drop"])
def test_every_prompt_solved_is_reported_and_moves_nothing(mode: Any) -> None:
    algorithm = replace(pg.CISPO, filters=(pg.DropZeroVariance(mode, max_rounds=2),))
    sampler = TabularSampler(4, 3, 4)
    sampler.table[:, 0, 1] = 50.0
    rollout = run(algorithm, sampler)
    assert rollout.position == (8 if mode == "refill" else 4)
    assert rollout.metrics["reward"].value == 1.0
    assert float(algorithm.coefficients(rollout.batch).abs().sum()) == 0.0
    assert bool(rollout.messages) is (mode == "refill")


def test_a_batch_of_nothing_is_still_a_batch() -> None:
    nothing = Segment(torch.tensor([], dtype=torch.int64), torch.tensor([]), torch.tensor([], dtype=torch.int64))
    start = EpisodeSpec(Example("1", {}), (0, 0, 0, 0), 3)  # type: ignore[arg-type]
    groups = [
        EpisodeGroup(start, torch.tensor([1]), (Trajectory((nothing,), "", False, reward=r),)) for r in (1.0, None)
    ]
    batch = batch_groups(groups)
    psi = pg.GRPO.compute_advantages(replace(batch, logp_ref=batch.logp_sampler))
    loss = pg.surrogate(
        torch.zeros(batch.mask.shape, requires_grad=True), replace(batch, logp_ref=batch.logp_sampler), psi, pg.GRPO
    )
    assert loss.item() == 0.0
