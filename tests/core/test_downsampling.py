"""More completions than are trained on: who is chosen, what is counted, and that nothing else changes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Shape, close, gradients, make, policy, shapes
from policygrad.core.filters import FrozenDownsample, max_variance_subset
from policygrad.core.validation import check_sampling
from policygrad.papers.completions import (
    Completion,
    Prompts,
    clipped_surrogate,
    group_z_score,
    read_batch,
    standard_deviation,
    total,
)

GRPO = replace(pg.GRPO, terms=())
BY = ["random", "max_variance", "best_one", "shortest", "reward_per_token"]


def group(rewards: list[float], lengths: list[int] | None = None) -> pg.Batch:
    """One prompt's completions."""
    lengths = lengths or [1] * len(rewards)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return pg.Batch(
        mask=mask,
        group=torch.zeros(len(rewards), dtype=torch.int64),
        reward=torch.tensor(rewards, dtype=torch.float64),
    )


def test_hand_numbers() -> None:
    """R = [0, 0, 1, 0], two of the four: the z-scores stay those of all four, a chosen one's coefficient is 1/4 · 4/2 = 1/2."""
    batch = group([0.0, 0.0, 1.0, 0.0])
    part = pg.Downsample(2, "max_variance")
    chosen = part.choose(batch)
    assert chosen.sum() == 2
    assert bool(chosen[2])
    kept = part(batch)
    algorithm = replace(GRPO, filters=(part,), advantage=(pg.GroupMean(), pg.GroupStd(eps=0.0)))
    assert algorithm.compute_advantages(kept)[:, 0].tolist() == pytest.approx([-0.5, -0.5, 1.5, -0.5])
    assert algorithm.coefficients(kept)[:, 0].tolist() == [0.5 if c else 0.0 for c in chosen]
    alone = replace(part, statistics="kept")(batch)  # R = [1, 0], std 1/√2
    psi = algorithm.compute_advantages(alone)[:, 0]
    assert psi[chosen].abs().tolist() == pytest.approx([0.5**0.5] * 2)
    assert psi[~chosen].tolist() == [0.0, 0.0]
    assert algorithm.coefficients(alone)[:, 0].tolist() == [0.5 if c else 0.0 for c in chosen]
    assert alone.counted.tolist() == chosen.tolist()


@pytest.mark.parametrize(
    ("rewards", "keep", "expected"),
    [
        ([0, 1, 0, 1, 1, 0], 4, [0, 0, 1, 1]),  # as many right as wrong
        ([0, 0, 0, 0, 0, 1], 4, [0, 0, 0, 1]),
        ([0.0, 0.5, 0.6, 0.7, 10.0], 2, [0.0, 10.0]),
        ([0.0, 4.0, 5.0, 5.1, 5.2], 3, [0.0, 5.1, 5.2]),
        ([3.0, 3.0, 3.0], 2, [3.0, 3.0]),
        ([1.0, 2.0], 5, [1.0, 2.0]),
    ],
)
def test_max_variance_subset_by_hand(rewards: list[float], keep: int, expected: list[float]) -> None:
    reward = torch.tensor(rewards)
    assert sorted(reward[max_variance_subset(reward, keep)].tolist()) == pytest.approx(expected)


@settings(max_examples=60)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=7), st.integers(1, 7))
def test_max_variance_subset_is_the_maximum(rewards: list[float], keep: int) -> None:
    reward = torch.tensor(rewards, dtype=torch.float64)
    result = max_variance_subset(reward, keep)
    assert len(set(result.tolist())) == min(keep, len(rewards))
    best = max(float(reward[list(s)].var(correction=0)) for s in combinations(range(len(rewards)), len(result)))
    assert float(reward[result].var(correction=0)) == pytest.approx(best, rel=1e-9, abs=1e-12)


@settings(max_examples=40)
@given(shapes(max_size=6), st.integers(1, 4), st.sampled_from(BY), st.integers(0, 50))
def test_downsampling_keeps_the_number_per_group(shape: Shape, keep: int, by: str, rollout: int) -> None:
    batch, _ = make(shape)
    part = FrozenDownsample(keep, by, rollout=rollout)  # type: ignore[arg-type]
    chosen, available = part.choose(batch), batch.mask.any(1)
    assert not bool((chosen & ~available).any())
    for g in batch.group.unique():
        here = batch.group == g
        assert int(chosen[here].sum()) == min(keep, int(available[here].sum()))
    everything = replace(part, keep=99)(batch)
    assert torch.equal(everything.weight[available], torch.ones_like(everything.weight[available]))  # type: ignore[index]


def test_choices_differ_by_rollout_and_repeat_after_resume() -> None:
    batch = group([0.0] * 40)
    algorithm = replace(GRPO, filters=(pg.Downsample(20),))
    state, seen = algorithm.init_state(), []
    for _ in range(3):
        seen.append(algorithm.with_state(state).apply_filters(batch).weight)
        state = algorithm.update_state(state, batch)
    assert state == {"filters.0": {"rollouts": 3}}
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(algorithm.with_state({"filters.0": {"rollouts": 1}}).apply_filters(batch).weight, seen[1])
    other = replace(algorithm, filters=(pg.Downsample(20, seed=1),))
    assert not torch.equal(other.with_state(other.init_state()).apply_filters(batch).weight, seen[0])


def test_a_random_choice_is_fair() -> None:
    """Over rollouts a completion's weight has the mean 1, whatever its place and reward: in expectation, the gradient of all."""
    batch = group([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    weights = torch.stack([FrozenDownsample(2, rollout=i)(batch).weight[:, 0] for i in range(3000)])  # type: ignore[index]
    assert weights.unique().tolist() == [0.0, 3.0]
    error = (2 / 3000) ** 0.5  # the weight's variance is 3² · ⅓ − 1 = 2
    assert float((weights.mean(0) - 1).abs().max()) < 4 * error


CHAINS = {
    "group": (pg.GroupMean(), pg.GroupStd()),
    "magistral": (pg.GroupMean(), pg.BatchStd()),
    "leave one out": (pg.LeaveOneOut(),),
    "optimal, length": (pg.OptimalBaseline("length"),),
    "optimal, exact": (pg.OptimalBaseline("exact"),),
    "batch mean": (pg.BatchMean(),),
    "gae, whitened": (pg.GAE(), pg.Whiten()),
    "process": (pg.ProcessReward(),),
    "prefix values": (pg.PrefixValue(),),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("by", ["random", "max_variance", pytest.param("shortest", marks=pytest.mark.full)])
@settings(max_examples=10)
@given(shape=shapes(max_size=6))
def test_dropped_completions_count_in_statistics(chain: str, by: str, shape: Shape) -> None:
    """all: Ψ is to the bit what it is without the part. kept: what it is in a batch of the chosen alone."""
    batch, _ = make(shape, 0.1, "steps" if chain in ("process", "prefix values") else "token_reward")
    batch = replace(batch, grad_logp_sq_norm=1 + batch.lengths.double() ** 2)

    def advantages(of: pg.Batch) -> Tensor:
        psi = of.reward.new_zeros(of.mask.shape)
        psi = pg.REINFORCE.compute_advantages(of) if chain not in ("process", "prefix values") else psi
        for link in CHAINS[chain]:
            psi = link(psi, of)
        return torch.where(of.mask, psi, 0)

    part = pg.Downsample(2, by)  # type: ignore[arg-type]
    assert torch.equal(advantages(part(batch)), advantages(batch))
    chosen = part.choose(batch)
    kept = advantages(replace(part, statistics="kept")(batch))
    close(kept[chosen], advantages(batch.select(chosen)), scale=torch.ones(1))
    assert float(kept[~chosen].abs().sum()) == 0


def clipped(o: Completion, A: float) -> Tensor:
    """1/|o| Σ_t min(r Â, clip(r) Â)."""
    return total(clipped_surrogate(o, t, A) for t in range(len(o))) / len(o)


def best(outputs: list[Completion], keep: int) -> list[Completion]:
    """PODS, max-variance down-sampling by its definition: of all subsets the one whose rewards vary most."""
    size = min(keep, len(outputs))
    return list(max(combinations(outputs, size), key=lambda s: standard_deviation([o.reward for o in s], ddof=0)))


def pods(prompts: Prompts) -> Tensor:
    """PODS with GRPO: 1/m Σ_{i∈S} 1/|o_i| Σ_t min(…) over all prompts' S, Â from the rewards of S alone."""
    chosen = [best(outputs, 3) for outputs in prompts]
    J = total([])
    for S in chosen:
        for o in S:
            J = J + clipped(o, group_z_score(o, S))
    return J / max(1, sum(map(len, chosen)))


def counted(prompts: Prompts) -> Tensor:
    """The same S with Â from all N, each prompt as heavy as if all had trained: Σ_g N/|S| Σ_{i∈S} over the step's N's."""
    J = total([])
    for outputs in prompts:
        S = best(outputs, 3)
        for o in S:
            J = J + len(outputs) / len(S) * clipped(o, group_z_score(o, outputs))
    return J / max(1, sum(map(len, prompts)))


@pytest.mark.parametrize(("statistics", "paper"), [("kept", pods), ("all", counted)])
@pytest.mark.parametrize("off_policy", [None, 0.15, 1.5])
@settings(max_examples=15, derandomize=True)
@given(shape=shapes(max_size=6))
def test_gradient_and_value_are_those_of_the_definition(
    statistics: str, paper: object, off_policy: float | None, shape: Shape
) -> None:
    batch, logits = make(replace(shape, binary=False), off_policy)
    algorithm = replace(GRPO, filters=(pg.Downsample(3, "max_variance", statistics),))  # type: ignore[arg-type]
    logp = policy(logits, batch.tokens, batch.mask)
    J = paper(read_batch(batch, logp))  # type: ignore[operator]
    kept = algorithm.apply_filters(batch)
    psi = algorithm.compute_advantages(kept)
    loss = pg.surrogate(logp, kept, psi, algorithm)
    expected = gradients(J, logp, logits)
    for result, wanted in zip(gradients(-loss, logp, logits), expected, strict=True):
        close(result, wanted, scale=expected[0])
    torch.testing.assert_close(pg.objective(logp, kept, psi, algorithm), J.detach(), rtol=1e-12, atol=1e-12)


def test_the_shortest_and_the_most_rewarded_per_token_by_hand() -> None:
    """Of equal ones any: five of length 1, 2, 2, 3 and 4, with R/|o| of 0, 1/2, 0, 1/3 and 1/2."""
    batch = group([0.0, 1.0, 0.0, 1.0, 2.0], [1, 2, 2, 3, 4])
    shortest = {tuple(FrozenDownsample(2, "shortest", rollout=i).choose(batch).int().tolist()) for i in range(20)}
    assert shortest == {(1, 1, 0, 0, 0), (1, 0, 1, 0, 0)}
    efficient = {
        tuple(FrozenDownsample(3, "reward_per_token", rollout=i).choose(batch).int().tolist()) for i in range(20)
    }
    assert efficient == {(0, 1, 0, 1, 1)}


def test_the_best_and_another_as_often_as_any() -> None:
    """Authors of PF-PPO: one of the highest reward, and one of all others with equal chances, also one that is as good."""
    batch = group([0.0, 1.0, 0.5, 1.0, 0.0])
    pairs = [
        tuple(FrozenDownsample(2, "best_one", rollout=i).choose(batch).nonzero().flatten().tolist())
        for i in range(2000)
    ]
    counts = {pair: pairs.count(pair) / len(pairs) for pair in set(pairs)}
    expected = dict.fromkeys(((0, 1), (1, 2), (1, 3), (1, 4)), 1 / 4)
    assert counts == pytest.approx(expected, abs=0.04)
    worst = {
        FrozenDownsample(2, "max_variance", "kept", rollout=i).choose(batch).long() @ batch.reward.long()
        for i in range(3)
    }
    assert {int(x) for x in worst} == {1}  # the best and the worst: PF-PPO's BW


def gfpo(prompts: Prompts, chosen: set[int]) -> Tensor:
    """GFPO, eq. 2: 1/Σ_S|o| Σ_S Σ_t min(r Â, clip(r) Â), Â = m (R − μ_S)/σ_S; S is any of the rows with the k least lengths."""
    J, tokens = total([]), 0
    for outputs in prompts:
        S = [o for o in outputs if o.row in chosen]
        assert sorted(map(len, S)) == sorted(map(len, outputs))[: len(S)]
        assert len(S) == min(2, len(outputs))
        mu = math.fsum(o.reward for o in S) / len(S)
        sigma = standard_deviation([o.reward for o in S], ddof=0)
        tokens += sum(map(len, S))
        for o in S:
            A = (o.reward - mu) / (sigma + 1e-4)
            J = J + total(clipped_surrogate(o, t, A) for t in range(len(o)))
    return J / max(1, tokens)


@settings(max_examples=25, derandomize=True)
@given(shape=shapes(max_size=6), off_policy=st.sampled_from([None, 0.15, 1.5]))
def test_gfpo_is_its_definition(shape: Shape, off_policy: float | None) -> None:
    batch, logits = make(replace(shape, binary=False), off_policy)
    part = pg.Downsample(2, "shortest", "kept")
    algorithm = replace(pg.GFPO, filters=(part,), terms=())
    logp = policy(logits, batch.tokens, batch.mask)
    J = gfpo(read_batch(batch, logp), set(part.choose(batch).nonzero().flatten().tolist()))
    kept = algorithm.apply_filters(batch)
    psi = algorithm.compute_advantages(kept)
    loss = pg.surrogate(logp, kept, psi, algorithm)
    expected = gradients(J, logp, logits)
    for result, wanted in zip(gradients(-loss, logp, logits), expected, strict=True):
        close(result, wanted, scale=expected[0])
    torch.testing.assert_close(pg.objective(logp, kept, psi, algorithm), J.detach(), rtol=1e-12, atol=1e-12)


def test_refusals() -> None:
    algorithm = replace(GRPO, filters=(pg.Downsample(8),))
    with pytest.raises(
        pg.ConfigError, match="trains on 8 samples per prompt, and there are 4: set samples_per_prompt to 8"
    ):
        check_sampling(algorithm, 4, 1.0)
    with pytest.raises(pg.ConfigError, match=r"Downsample\.keep to 4 or less"):
        pg.Run(algorithm=algorithm, samples_per_prompt=4)
    check_sampling(algorithm, 8, 1.0)
    with pytest.raises(pg.ConfigError, match="put it last in filters"):
        replace(GRPO, filters=(pg.Downsample(), pg.MaskTruncated()))
    replace(GRPO, filters=(pg.DropZeroVariance(), pg.MaskTruncated(), pg.Downsample()))
    for bad, says in (
        ({"keep": 0}, "keep"),
        ({"by": "luck"}, "'random', 'max_variance', 'best_one', 'shortest' or 'reward_per_token'"),
        ({"statistics": "some"}, "'all' or 'kept'"),
        ({"seed": -1}, "seed"),
    ):
        with pytest.raises(pg.ConfigError, match=says):
            pg.Downsample(**bad)  # type: ignore[arg-type]
