"""A replay buffer on a table: what takes whose place, how old it is, how it is corrected, and that a checkpoint holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.rollouts import collect_rollout
from doubles.table_runs import PROMPTS, rollouter, run, sampler
from policygrad.core.ratios import TruncatedIS
from policygrad.core.replay import ReplayBuffer
from policygrad.rollout.rollouter import Rollout
from policygrad.training.loop import StepResult

STEPS, SAMPLES = 6, 16


def replaying(**options: Any) -> pg.Algorithm:
    return replace(
        pg.CISPO, filters=(ReplayBuffer(**options),), update_rule=pg.GradientSteps()
    )  # versions count updates


def collect(algorithm: pg.Algorithm, flat: int = 2, **changed: Any) -> Rollout:
    return collect_rollout(
        rollouter(sampler(flat)),
        algorithm,
        pg.SamplingParams(max_tokens=3),
        prompts=PROMPTS,
        samples=SAMPLES,
        **changed,
    )


def counted(done: StepResult, name: str) -> float:
    return done.rollout.metrics[f"replay/{name}"].value


def ages(done: StepResult) -> list[int]:
    return [done.step - group.spec.key[2] for group in done.rollout.groups]


def test_with_an_empty_buffer_a_step_is_as_without_one() -> None:
    first, plain = collect(replaying()), collect(replace(replaying(), filters=()))
    assert torch.equal(first.batch.tokens, plain.batch.tokens)
    assert torch.equal(first.batch.mask, plain.batch.mask)
    assert [int(g.prompt_ids) for g in first.leftover_groups] == [2, 3, 4, 5, 6, 7]  # those with spread
    assert first.position == plain.position == PROMPTS
    found = {name: first.metrics[f"replay/{name}"].value for name in ("used", "missing", "kept")}
    assert found == {"used": 0, "missing": 2, "kept": 6}
    assert "replay/age" not in first.metrics


def test_earlier_groups_stand_in_the_places_of_groups_of_equal_rewards() -> None:
    first = collect(replaying())
    second = collect(replaying(), step=2, leftover_groups=first.leftover_groups)
    assert [g.spec.key[2] for g in second.groups] == [1, 1, 2, 2, 2, 2, 2, 2]
    assert all(group in first.leftover_groups for group in second.groups[:2])
    assert second.groups[0] is not second.groups[1]
    assert second.metrics["replay/used"].value == 2
    assert second.metrics["replay/age"].value == 1
    assert second.metrics["replay/kept"].value == 12
    assert second.metrics["frac_reward_zero_std"].value == 2 / 8  # of what was sampled
    assert second.metrics["completions/sampled"].value == PROMPTS * SAMPLES  # nothing more


def test_a_group_is_drawn_until_it_is_too_old_and_once_without_reuse() -> None:
    first = collect(replaying()).leftover_groups
    old = collect(replaying(max_age=2), step=4, leftover_groups=first)
    assert [g.spec.key[2] for g in old.groups] == [4] * PROMPTS
    assert {g.spec.key[2] for g in old.leftover_groups} == {4}
    assert old.metrics["replay/missing"].value == 2
    young = collect(replaying(max_age=2), step=3, leftover_groups=first)
    assert [g.spec.key[2] for g in young.groups[:2]] == [1, 1]
    once = collect(replaying(reuse=False), step=2, leftover_groups=first)
    assert not set(map(id, once.groups[:2])) & set(map(id, once.leftover_groups))
    assert once.metrics["replay/kept"].value == 6 - 2 + 6


def test_a_full_buffer_keeps_the_largest_spread() -> None:
    kept = collect(replaying(size=3), step=2, leftover_groups=collect(replaying()).leftover_groups).leftover_groups
    solved = [sum(t.reward or 0 for t in group.trajectories) for group in kept]
    every = [
        sum(t.reward or 0 for t in g.trajectories)
        for step in (1, 2)
        for g in collect(replaying(), step=step, leftover_groups=()).leftover_groups
    ]
    spread = sorted((s * (SAMPLES - s) for s in every), reverse=True)[:3]
    assert sorted((s * (SAMPLES - s) for s in solved), reverse=True) == spread


@pytest.fixture(scope="module")
def done() -> list[StepResult]:
    return run(replaying(), STEPS)


def test_replayed_groups_count_their_age_in_versions(done: list[StepResult]) -> None:
    assert sum(counted(d, "used") for d in done) > STEPS
    assert max(max(ages(d)) for d in done) > 1
    for d in done:
        old = torch.tensor(ages(d)).repeat_interleave(SAMPLES)
        mask, version = d.batch.mask, d.batch.version
        assert version is not None
        lag = torch.where(mask, d.step - 1 - version, 0)
        assert torch.equal(lag, torch.where(mask, old[:, None], 0))
        assert d.metrics["staleness/max"].value == max(ages(d))
        if used := [age for age in ages(d) if age]:
            assert d.metrics["replay/age"].value == pytest.approx(sum(used) / len(used))


def test_replayed_groups_are_corrected_by_the_policy_that_sampled_them(done: list[StepResult]) -> None:
    """μ is what the sampler said at the time: π_old/μ of a replayed token is that of the weights of now to those of then."""
    by_key = {group.spec.key: group for d in done for group in d.rollout.groups if d.step == group.spec.key[2]}
    assert len(by_key) >= PROMPTS
    seen = 0
    for d in done:
        batch, mask = d.batch, d.batch.mask
        assert batch.logp_sampler is not None
        assert d.algorithm.corrections == ((TruncatedIS(),) if any(ages(d)) else ())
        for group, age in zip(d.rollout.groups, ages(d), strict=True):
            if age and group.spec.key in by_key:
                assert group is by_key[group.spec.key]  # the same tokens and log-probabilities as when it was sampled
        if any(ages(d)):
            assert batch.logp_old is not None
            old = (torch.tensor(ages(d)) > 0).repeat_interleave(SAMPLES)
            gap = torch.where(mask, batch.logp_old - batch.logp_sampler, 0)
            assert float(gap[~old].abs().max()) < 1e-6
            assert float(gap[old].abs().max()) > 0.01
            weight = d.algorithm.apply_corrections(
                torch.ones_like(batch.logp_old), pg.Forward(batch.logp_old), batch, d.psi
            )
            torch.testing.assert_close(weight[mask], gap.exp().clamp(max=2.0)[mask])
            assert float(d.psi[old].abs().sum()) > 0  # they teach
            seen += 1
    assert seen >= 3


def test_with_the_samplers_policy_as_the_old_one_the_ratio_is_to_the_policy_that_sampled() -> None:
    for d in run(replace(replaying(), old_policy="sampler"), 4):
        assert torch.equal(d.batch.logp_old, d.batch.logp_sampler)
        assert d.algorithm.corrections == ()


def test_a_buffer_that_went_through_a_checkpoint_is_the_same_to_the_bit(done: list[StepResult]) -> None:
    for uninterrupted, piece in zip(done, run(replaying(), STEPS, pieces=True), strict=True):
        for name in ("tokens", "logp_sampler", "version", "reward", "mask", "truncated"):
            assert torch.equal(getattr(uninterrupted.batch, name), getattr(piece.batch, name)), name
        assert torch.equal(uninterrupted.psi, piece.psi)
        assert [g.spec.key for g in uninterrupted.rollout.groups] == [g.spec.key for g in piece.rollout.groups]
