"""Dynamic sampling takes what is missing, carries what is over, and a checkpoint holds it to the bit."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import policygrad as pg
from doubles.rollouts import collect_rollout
from doubles.table_runs import PROMPTS, rollouter, run, sampler
from policygrad.checkpoint.manifest import decode_json, encode_json
from policygrad.core.ratios import TruncatedIS
from policygrad.rollout import serialization
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.dynamic_sampling import next_round_size
from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec, Segment, StepMarks, Trajectory
from policygrad.tasks.base import Example
from policygrad.training.step_log import build_completion_rows


def collect(algorithm: pg.Algorithm, flat: int = 2, prompts: int = PROMPTS, **changed: Any) -> Rollout:
    return collect_rollout(
        rollouter(sampler(flat)), algorithm, pg.SamplingParams(max_tokens=3), prompts=prompts, samples=16, **changed
    )


def refilled(**options: Any) -> pg.Algorithm:
    return replace(
        pg.CISPO, filters=(pg.DropZeroVariance(**options),), update_rule=pg.GradientSteps()
    )  # versions count updates


@pytest.mark.parametrize(
    ("missing", "good", "seen", "expected"),
    [
        (64, 0, 0, 64),  # nothing seen yet
        (8, 56, 64, 11),  # 8/0.875 = 9.14, and √(8·0.125)/0.875 = 1.14 more
        (48, 16, 64, 64),  # 192 and more: never over the step's size
        (64, 0, 64, 64),  # none kept: nobody knows
        (1, 32, 64, 4),  # 2 + √0.5/0.5 = 3.41
        (3, 5, 5, 3),  # all kept
    ],
)
def test_the_next_round_by_hand(missing: int, good: int, seen: int, expected: int) -> None:
    assert next_round_size(missing, good, seen, 64) == expected


@settings(max_examples=60)
@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 64))
def test_a_round_takes_at_least_what_is_missing_and_at_most_a_step(missing: int, good: int, aside: int) -> None:
    count = next_round_size(missing, good, good + aside, 64)
    assert missing <= count <= 64
    assert count <= next_round_size(missing, good, good + aside + 1, 64)  # a lower rate never takes fewer


def test_a_second_round_takes_what_is_missing_and_what_is_over_waits() -> None:
    """6 of 8 prompts have spread: 2 are missing, 2/0.75 + √0.5/0.75 = 3.6 are sampled, where 8 were."""
    results = collect(refilled(), flat=0, position=0)
    assert results.position == PROMPTS  # nothing to refill
    results = collect(refilled())
    assert results.position == PROMPTS + 4  # prompts 0 to 3 again, two of them flat
    assert [int(p[0]) for p in results.batch.prompts or ()] == [2, 3, 4, 5, 6, 7, 2, 3]
    assert results.leftover_groups == ()
    assert results.metrics["completions/sampled_per_trained"].value == 12 / 8
    other = collect(refilled(), position=2)  # 2 … 7, 0, 1 and then 2, 3, 4, 5, of which two are over
    assert [int(g.prompt_ids) for g in other.leftover_groups] == [4, 5]
    assert {name: other.metrics[f"dynamic/{name}"].value for name in ("unfilled", "leftover", "discarded")} == {
        "unfilled": 0,
        "leftover": 0,
        "discarded": 0,
    }


def test_what_is_carried_goes_first_and_less_is_sampled() -> None:
    first = collect(refilled(), position=2)
    second = collect(refilled(), position=first.position, step=2, leftover_groups=first.leftover_groups)
    assert second.groups[:2] == first.leftover_groups
    assert torch.equal(second.batch.tokens[:32], batch_groups(first.leftover_groups).tokens)
    assert second.position == first.position + 6 + 5  # 6, 7, 0, 1, 2, 3 leave two missing: (2 + √⅔)/⅔ = 4.2
    assert second.metrics["dynamic/leftover"].value == 2
    assert second.metrics["dynamic/unfilled"].value == 0
    assert second.metrics["frac_reward_zero_std"].value == 3 / 11  # of what this step has sampled: 0, 1 and 0 again


def test_without_carrying_what_is_over_is_thrown_away_and_counted() -> None:
    results = collect(refilled(keep_leftovers=False), position=2)
    assert results.leftover_groups == ()
    assert results.metrics["dynamic/discarded"].value == 2
    given_some = collect(
        refilled(keep_leftovers=False), position=2, leftover_groups=collect(refilled(), position=2).leftover_groups
    )
    assert torch.equal(given_some.batch.tokens, results.batch.tokens)


def test_a_step_samples_at_most_its_rounds_and_at_least_a_prompt() -> None:
    results = collect(refilled(max_rounds=3), flat=PROMPTS)
    assert results.position == 3 * PROMPTS
    assert results.metrics["dynamic/unfilled"].value == PROMPTS
    waiting = collect(refilled(), flat=0).groups
    full = collect(refilled(), flat=0, leftover_groups=waiting, step=2)
    assert full.groups[:-1] == waiting[:-1]
    assert full.position == 1


def test_other_algorithms_are_as_they_were() -> None:
    results = collect(pg.GRPO)
    assert results.position == PROMPTS
    assert not [name for name in results.metrics if name.startswith("dynamic/")]
    assert results.metrics["completions/sampled_per_trained"].value == 1.0
    assert collect(pg.GRPO, leftover_groups=results.groups).groups[0] is not results.groups[0]


# --- one step stale


def test_what_a_filter_leaves_out_is_logged_with_its_reward() -> None:
    """None would say that nobody could judge it."""
    (done,) = run(refilled(mode="drop"), 1)
    rows, out = build_completion_rows(done, str), ~done.batch.mask.any(1)
    dropped = [row["reward"] for row, left in zip(rows, out, strict=True) if left]
    assert dropped == [1.0] * 32  # of the two prompts that are always solved
    assert {row["reward"] for row in rows} == {0.0, 1.0}


def test_carried_groups_are_stale_samples_and_are_corrected_for() -> None:
    """π_old is the learner's policy at every row; where another one drew it, π_old/μ weighs it, capped."""
    done = run(refilled(), 5)
    assert [bool(d.rollout.metrics["dynamic/leftover"].value) for d in done].count(True) >= 2
    for before, now in pairwise(done):
        n = 16 * len(before.rollout.leftover_groups)
        batch, mask = now.batch, now.batch.mask
        assert batch.version is not None
        assert now.rollout.groups[: n // 16] == before.rollout.leftover_groups
        assert bool((batch.version[:n][mask[:n]] == now.step - 2).all())
        assert bool((batch.version[n:][mask[n:]] == now.step - 1).all())
        assert now.metrics["staleness/max"].value == float(n > 0)
        assert now.algorithm.corrections == ((TruncatedIS(),) if n else ())
        if n:
            assert batch.logp_old is not None
            assert batch.logp_sampler is not None
            gap = torch.where(mask, batch.logp_old - batch.logp_sampler, 0)
            assert float(gap[:n].abs().max()) > 0.01  # the weights have moved
            assert float(gap[n:].abs().max()) < 1e-6
            weight = now.algorithm.apply_corrections(
                torch.ones_like(batch.logp_old), pg.Forward(batch.logp_old), batch, now.psi
            )
            torch.testing.assert_close(weight[:n][mask[:n]], gap.exp().clamp(max=2.0)[:n][mask[:n]])


def test_over_a_run_every_group_with_spread_is_trained_on_once() -> None:
    """What has been sampled and is not flat is what was trained on, and what waits at the end."""
    done, size = run(refilled(max_rounds=8), 6), 16
    assert all(d.rollout.metrics["dynamic/unfilled"].value == 0 for d in done)
    sampled = [d.rollout.metrics["completions/sampled"].value for d in done]
    flat = [n * d.rollout.metrics["frac_reward_zero_std"].value for n, d in zip(sampled, done, strict=True)]
    trained = [d.rollout.metrics["completions/trained"].value for d in done]
    assert trained == [PROMPTS * size] * 6
    assert sum(sampled) - sum(flat) == pytest.approx(sum(trained) + size * len(done[-1].rollout.leftover_groups))
    keys = [g.spec.key for d in done for g in d.rollout.groups]
    assert len(keys) == len(set(keys))


def test_the_samplers_word_makes_their_own_policy_the_ratios() -> None:
    done = run(replace(refilled(), old_policy="sampler"), 4)
    assert any(d.rollout.metrics["dynamic/leftover"].value for d in done)
    for d in done:
        assert torch.equal(d.batch.logp_old, d.batch.logp_sampler)
        assert d.algorithm.corrections == ()


def test_what_is_carried_through_a_checkpoint_is_the_same_to_the_bit() -> None:
    whole = run(refilled(), 3)
    assert any(done.rollout.leftover_groups for done in whole[:-1])
    for uninterrupted, piece in zip(whole, run(refilled(), 3, pieces=True), strict=True):
        for name in ("tokens", "logp_sampler", "version", "reward", "mask", "truncated"):
            assert torch.equal(getattr(uninterrupted.batch, name), getattr(piece.batch, name)), name
        assert torch.equal(uninterrupted.psi, piece.psi)
        assert uninterrupted.rollout.completions == piece.rollout.completions


def test_every_field_of_a_group_comes_back() -> None:
    drawn = Segment(torch.tensor([3, 1]), torch.tensor([-0.1, -1 / 3]), torch.tensor([4, 5]))
    output = Segment(torch.tensor([7, 7, 7]))
    routes = torch.arange(16, dtype=torch.int16).view(8, 1, 2)  # the prompt's 2 tokens and these 6, a layer, 2 experts
    plain = Segment(torch.tensor([2]), torch.tensor([-2.5]), 6, routes)
    one = Trajectory(
        (drawn, output, plain),
        "a “b”",
        True,
        (0.1, None),
        1 / 3,
        StepMarks((1, 5), (0.5, 0.0)),
        {"x": 0.7},
        turn_states=("hall", ("hall", 2)),
        reward_parts=(0.25, None),
        feedback="too long",
        demonstration=True,
        stop_reason="turns",
        failure="the environment's Guess.step raised",
        notes=("a request was refused",),
        reward_remedy="write it to a file",
        role="solver",
        peers="solver/1",
        columns={"cart": ["tea"]},
    )
    changed = [f.name for f in fields(Trajectory) if getattr(one, f.name) != f.default]
    assert changed == [f.name for f in fields(Trajectory)], "a new field: does it come back?"
    two = Trajectory((Segment(torch.zeros(0, dtype=torch.int64), torch.zeros(0), 6),), "", False)
    start = EpisodeSpec(Example("9", {"a": 1}), (0, 0, 3, 9), 12)  # type: ignore[arg-type]
    group = EpisodeGroup(start, torch.tensor([9, 9]), (one, two), (("right", 1.0), ("short", 0.5)))
    begun = replace(group.spec, key=(0, 0, 3, 8, 5, 2), prefix=torch.tensor([1, 2, 3]))
    other = replace(group, spec=begun, trajectories=(two, one))
    tensors, values = serialization.pack_rollouts([group, other], [])
    mine, rest = serialization.split_tensors(tensors | {"weights/a": torch.ones(1)})
    assert list(rest) == ["weights/a"]
    values = decode_json(json.loads(json.dumps(encode_json(values, "leftover_groups"))))
    results, ahead = serialization.unpack_rollouts(mine, values, lambda i: Example(str(i), {"a": 1}))
    assert ahead == ()
    assert [g.spec.key for g in results] == [(0, 0, 3, 9), (0, 0, 3, 8, 5, 2)]
    assert results[0].spec.prefix is None
    assert results[1].spec.prefix is not None
    assert results[1].spec.prefix.tolist() == [1, 2, 3]
    assert results[1].spec.example.prompt == "8"
    back = results[0].trajectories[0]
    assert (back.text, back.truncated, back.turn_rewards, back.reward, back.metrics) == (
        one.text,
        True,
        (0.1, None),
        1 / 3,
        {"x": 0.7},
    )
    assert back.step_marks == one.step_marks
    assert (back.reward_parts, back.feedback) == (one.reward_parts, one.feedback)
    assert (back.notes, back.reward_remedy, back.columns) == (one.notes, one.reward_remedy, one.columns)
    assert results[0].reward_weights == group.reward_weights
    assert len(set(back.turn_states)) == 2  # numbers that tell them apart
    assert torch.equal(back.routed_experts, one.routed_experts)
    assert results[0].trajectories[1].routed_experts is None
    for name in ("tokens", "mask", "logp", "version"):
        assert torch.equal(getattr(back, name), getattr(one, name))
    assert [s.is_sampled for s in back.segments] == [True, False, True]
    assert back.segments[2].version == 6
    assert results[0].trajectories[1].reward is None
    assert back.demonstration is True
    assert serialization.unpack_rollouts(*serialization.pack_rollouts((), ()), lambda i: Example("")) == ((), ())  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", [refilled(), pg.GDPO, pg.REMAX], ids=lambda a: a.name)
def test_every_field_of_a_rollout_comes_back(algorithm: pg.Algorithm) -> None:
    there = collect(algorithm, prompts=PROMPTS - 1)
    tensors, values = serialization.pack_rollouts((), [there, there])
    values = decode_json(json.loads(json.dumps(encode_json(values, "queued_rollouts"))))
    _, (_, back) = serialization.unpack_rollouts(tensors, values, rollouter(sampler()).examples)
    for field in fields(there.batch):
        one, other = getattr(there.batch, field.name), getattr(back.batch, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, field.name
            assert torch.equal(one, other), field.name
        elif field.name == "prompts":
            assert [p.tolist() for p in one] == [p.tolist() for p in other]
        else:
            assert one == other, field.name
    assert {name: m.value for name, m in there.metrics.items()} == {name: m.value for name, m in back.metrics.items()}
    assert (there.position, there.messages, there.completions) == (back.position, back.messages, back.completions)
    assert [g.spec.key for g in there.leftover_groups] == [g.spec.key for g in back.leftover_groups]
