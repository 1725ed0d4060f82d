"""The variance-minimising baseline: by enumeration what it promises, by hand what it computes, and where it falls back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.enumeration import (
    COMPLETIONS,
    LONGEST,
    MASK,
    REWARD,
    THETA,
    conditionals,
    logp_of,
    token_logp,
    true_gradient,
)
from doubles.random_batches import Random, Shape, close, make, shapes
from policygrad.core import masked
from policygrad.core.advantages import FrozenRunningMean
from policygrad.core.validation import check_sampling

QUICK = settings(max_examples=40, derandomize=True)
TOKEN_SCORES = torch.autograd.functional.jacobian(lambda theta: torch.where(MASK, token_logp(theta), 0), THETA).flatten(
    2
)
"""∇_θ log π(o_t) [15, T, P] of every completion of the enumerated model."""
SCORES = TOKEN_SCORES.sum(1)
"""∇_θ log π(o) [15, P]."""
NORM = SCORES.square().sum(1)
SUM_PI_SQUARED = (2 * conditionals(THETA)).exp().sum(-1)
ENERGY = MASK * torch.where(MASK, 1 - 2 * token_logp(THETA).exp() + SUM_PI_SQUARED, 0).cumsum(1)
"""W_t [15, T]."""
PROBABILITY = logp_of(THETA).exp()
BEST = ((PROBABILITY * NORM * REWARD).sum() / (PROBABILITY * NORM).sum()).item()
"""b* = E[R‖s‖²]/E[‖s‖²]."""
MEAN = (PROBABILITY * REWARD).sum().item()
LENGTH = MASK.sum(1).double()
PROXY = ((PROBABILITY * LENGTH * REWARD).sum() / (PROBABILITY * LENGTH).sum()).item()


def moments(link: pg.OptimalBaseline | pg.LeaveOneOut | pg.GroupMean | pg.RunningMean, G: int) -> tuple[Tensor, float]:
    """(mean [T, V, V], total variance) of a group's gradient estimate 1/G Σ_i Σ_t Ψ_t s_t, over all groups of G completions."""
    tuples = torch.cartesian_prod(*[torch.arange(len(COMPLETIONS))] * G).reshape(-1, G)
    rows = tuples.flatten()
    group = torch.arange(len(tuples)).repeat_interleave(G)
    batch = pg.Batch(
        mask=MASK[rows],
        group=group,
        reward=REWARD[rows],
        grad_logp_sq_norm=NORM[rows],
        logp_old=token_logp(THETA)[rows],
        sum_pi_squared=SUM_PI_SQUARED[rows],
    )
    psi = pg.Algorithm(advantage=(link,)).compute_advantages(batch)
    estimate = (psi[:, None] @ TOKEN_SCORES[rows]).reshape(len(tuples), G, -1).mean(1)
    probability = logp_of(THETA)[tuples].sum(1).exp()
    mean = probability @ estimate
    variance = probability @ (estimate - mean).square().sum(1)
    return mean.reshape(LONGEST, *THETA.shape[1:]), variance.item()


@pytest.mark.parametrize("norm", ["exact", "length", "logits"])
@pytest.mark.parametrize("G", [2, 3])
def test_leave_one_out_is_unbiased(norm, G: int) -> None:
    close(moments(pg.OptimalBaseline(norm), G)[0], true_gradient())


@pytest.mark.parametrize("norm", ["exact", "length", "logits"])
def test_the_plug_in_is_biased(norm, record_property: pytest.RecordProperty) -> None:
    """Not even a multiple of the true gradient, as the group mean's is."""
    result, truth = moments(pg.OptimalBaseline(norm, leave_one_out=False), 3)[0], true_gradient()
    bias = ((result - truth).norm() / truth.norm()).item()
    cosine = torch.cosine_similarity(result.flatten(), truth.flatten(), dim=0).item()
    record_property("bias", bias)
    record_property("cosine", cosine)
    print(f"plug-in, {norm}: bias {bias:.4f} of the gradient's norm, cosine {cosine:.4f}")
    assert bias > 0.1
    assert cosine < 1 - 1e-5
    assert cosine < torch.cosine_similarity(moments(pg.GroupMean(), 3)[0].flatten(), truth.flatten(), dim=0)


def test_b_star_has_the_least_total_variance_of_all_constants() -> None:
    """The variance is a parabola in b: its vertex is b*, below every point of a grid, the mean and the length proxy."""

    def variance(b: float) -> float:
        return moments(FrozenRunningMean(baseline=b), 1)[1]

    low, middle, high = variance(-1.0), variance(0.0), variance(1.0)
    vertex = (low - high) / (2 * (low + high - 2 * middle))
    assert vertex == pytest.approx(BEST, abs=1e-12)
    least = variance(BEST)
    assert all(least < variance(BEST + step) for step in (-3.0, -0.3, -0.01, 0.01, 0.3, 3.0))
    print(f"total variance: b = 0 {middle:.4f}, mean {variance(MEAN):.4f}, |o| {variance(PROXY):.4f}, b* {least:.4f}")
    assert least < variance(MEAN)
    assert least < variance(PROXY)
    assert len({round(b, 3) for b in (BEST, MEAN, PROXY)}) == 3


def test_estimated_from_few_siblings_its_weights_are_noise_from_more_they_pay() -> None:
    """Of two completions both baselines are the other's reward; of three the weights cost more than they save, here."""
    (two, plain_two), (three, plain_three), (four, plain_four) = (
        (moments(pg.OptimalBaseline(), G)[1], moments(pg.LeaveOneOut(), G)[1]) for G in (2, 3, 4)
    )
    print(
        f"total variance, b* / mean of the others: G=2 {two:.4f} / {plain_two:.4f}, G=3 {three:.4f} / {plain_three:.4f}"
    )
    print(f"G=4 {four:.4f} / {plain_four:.4f}; with the true b* {moments(FrozenRunningMean(baseline=BEST), 4)[1]:.4f}")
    assert two == pytest.approx(plain_two, rel=1e-12)
    assert three > plain_three
    assert four < plain_four


# A baseline for every token: W_t by the logits.


def test_in_a_table_the_norm_by_the_logits_is_the_score_norm() -> None:
    """Each position has parameters of its own, which are its logits: W_t = ‖Σ_{s≤t} ∇log π(o_s)‖² there."""
    exact = TOKEN_SCORES.cumsum(1).square().sum(-1)
    torch.testing.assert_close(ENERGY[MASK], exact[MASK], rtol=1e-12, atol=0)


def variance_of(baseline: Tensor) -> float:
    """Total variance of Σ_t (R − b_t) s_t of one completion, for baselines [T] that are constants of the position."""
    estimate = ((REWARD[:, None] - baseline) * MASK)[:, None].matmul(TOKEN_SCORES).squeeze(1)
    return (PROBABILITY @ (estimate - PROBABILITY @ estimate).square().sum(1)).item()


def weighted_by(weight: Tensor) -> Tensor:
    """E[W_t R]/E[W_t] [T]."""
    return PROBABILITY @ (weight * REWARD[:, None]) / (PROBABILITY @ weight)


def test_the_token_baseline_has_less_variance_than_one_for_the_completion_and_more_than_the_tokens_norms() -> None:
    """With exact expectations. Where positions share no parameters, the minimum weights a token by its norm, not by W_t."""
    norms = TOKEN_SCORES.square().sum(-1)
    by_energy, by_norm = variance_of(weighted_by(ENERGY)), variance_of(least := weighted_by(norms))
    constant, mean = (variance_of(torch.full((LONGEST,), b, dtype=torch.float64)) for b in (BEST, MEAN))
    print(f"total variance: mean {mean:.4f}, b* {constant:.4f}, W_t {by_energy:.4f}, the tokens' norms {by_norm:.4f}")
    assert by_norm < by_energy < constant < mean
    for step in torch.eye(LONGEST, dtype=torch.float64):
        assert by_norm < min(variance_of(least + 0.1 * step), variance_of(least - 0.1 * step))


def test_the_token_baseline_by_hand() -> None:
    """Three completions of 1, 2 and 3 sampled tokens, a tool's token in between, reward 1, 0, 0. π = ½ throughout.

    With Σ_a π_a² = ½ a norm is ½, with 1/3 it is 1/3; only the first token of the second completion has it so.
    W_1 = ½, ⅓, ½;  W_2 = –, ⅚, 1;  W_3 = –, –, 1½.
    """
    batch = group_of([1.0, 0.0, 0.0], [math.nan] * 3, [1, 3, 3])
    batch = replace(
        batch,
        mask=batch.mask & torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1]]).bool(),
        logp_old=torch.full((3, 3), -math.log(2)),
        sum_pi_squared=torch.tensor([[1 / 2, math.nan, math.nan], [1 / 3, math.nan, 1 / 2], [1 / 2, 1 / 2, 1 / 2]]),
        token_reward=torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.6], [0.0, 0.0, 0.0]]),
    )
    plug_in = pg.Algorithm(advantage=(pg.OptimalBaseline("logits", leave_one_out=False),)).compute_advantages(batch)
    first_token, second = (0.5 + 0.2) / (4 / 3), 0.5 / (11 / 6)
    expected = [[1 - first_token, 0, 0], [0.6 - first_token, 0, 0.6 - second], [-first_token, -second, 0]]
    torch.testing.assert_close(plug_in, torch.tensor(expected))
    without = pg.Algorithm(advantage=(pg.OptimalBaseline("logits"),)).compute_advantages(batch)
    expected = [[1 - 0.2 / (5 / 6), 0, 0], [0.6 - 0.5, 0, 0.6], [-0.7 / (5 / 6), -0.6, -0.8]]
    torch.testing.assert_close(without, torch.tensor(expected))


def test_a_norm_by_the_logits_is_of_one_distribution() -> None:
    """Where π_old is the sampler, π(o) beside Σ π² is still the learner's: the baseline is that of the same weights."""
    batch, _ = make(Shape((4, 5), 6, 3, binary=True), 0.3, "sum_pi_squared")
    learner = batch.logp_old
    assert learner is not None
    sampled = replace(pg.OTB, old_policy="sampler")
    assert sampled.needs == {"logp_learner", "sum_pi_squared"}
    report = replace(batch, logp_old=batch.logp_sampler)
    with pytest.raises(pg.ConfigError, match=r"needs Batch\.logp_learner"):
        sampled.compute_advantages(report)
    expected = pg.OTB.compute_advantages(batch)
    assert torch.equal(sampled.compute_advantages(replace(report, logp_learner=learner)), expected)
    assert not torch.allclose(pg.OTB.compute_advantages(report), expected, rtol=1e-2)  # what it was, mixed


def test_a_certain_policy_has_no_energy_and_the_mean_remains() -> None:
    batch = group_of([0.0, 1.0, 0.5], [math.nan] * 3)
    batch = replace(batch, logp_old=torch.zeros(3, 2), sum_pi_squared=torch.ones(3, 2))
    torch.testing.assert_close(first(batch, pg.OptimalBaseline("logits")), first(batch, pg.LeaveOneOut()))
    plug_in = pg.OptimalBaseline("logits", leave_one_out=False)
    torch.testing.assert_close(first(batch, plug_in), first(batch, pg.GroupMean()))


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_the_estimate_tends_to_b_star(leave_one_out: bool) -> None:
    rows = torch.multinomial(PROBABILITY, 40_000, replacement=True, generator=torch.Generator().manual_seed(0))
    n, R = NORM[rows].flatten(), REWARD[rows]
    batch = pg.Batch(mask=MASK[rows], group=torch.zeros_like(rows), reward=R, grad_logp_sq_norm=n)
    b = R - first(batch, pg.OptimalBaseline(leave_one_out=leave_one_out))
    assert b.mean().item() == pytest.approx(BEST, abs=0.02)
    assert b.std() < 1e-3


def first(batch: pg.Batch, link: pg.OptimalBaseline | pg.LeaveOneOut | pg.GroupMean) -> Tensor:
    """Ψ [B] at the first sampled token."""
    return masked.first_valid(pg.Algorithm(advantage=(link,)).compute_advantages(batch), batch.mask)


def group_of(reward: list[float], norm: list[float], lengths: list[int] | None = None) -> pg.Batch:
    """One prompt, float32."""
    n = torch.tensor(lengths or [2] * len(reward))
    return pg.Batch(
        mask=torch.arange(int(n.max())) < n[:, None],
        group=torch.zeros(len(n), dtype=torch.int64),
        reward=torch.tensor(reward),
        grad_logp_sq_norm=torch.tensor(norm),
    )


BY_HAND = {
    "leave-one-out": (pg.OptimalBaseline(), [-1 / 3, -3 / 8, 1.0, -1 / 2]),
    "plug-in": (pg.OptimalBaseline(leave_one_out=False), [-0.3, -0.3, 0.7, -0.3]),
    "length": (pg.OptimalBaseline("length"), [-1 / 6, -1 / 4, 1.0, -1 / 5]),
    "length, plug-in": (pg.OptimalBaseline("length", leave_one_out=False), [-1 / 7, -1 / 7, 6 / 7, -1 / 7]),
}


@pytest.mark.parametrize(("link", "expected"), BY_HAND.values(), ids=BY_HAND.keys())
def test_the_worked_example(link: pg.OptimalBaseline, expected: list[float]) -> None:
    """R = [0, 0, 1, 0] with ‖s‖² = [1, 2, 3, 4] and |o| = [1, 3, 1, 2]: a tool token in between does not count."""
    batch = group_of([0.0, 0.0, 1.0, 0.0], [1.0, 2.0, 3.0, 4.0], [1, 3, 1, 3])
    batch = replace(batch, mask=batch.mask & torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 1]]).bool())
    torch.testing.assert_close(first(batch, link), torch.tensor(expected))


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("norm", ["exact", "length"])
def test_without_spread_psi_is_exactly_0(norm, leave_one_out: bool) -> None:
    batch = group_of([0.7] * 8, Random(3).uniform(8).tolist(), [3, 1, 4, 1, 5, 9, 2, 6])
    assert torch.equal(first(batch, pg.OptimalBaseline(norm, leave_one_out)), torch.zeros(8))
    alone = group_of([0.7], [2.0])
    assert torch.equal(first(alone, pg.OptimalBaseline(norm, leave_one_out)), torch.zeros(1))


def test_where_no_score_has_a_norm_the_mean_remains() -> None:
    """A policy that could not have done otherwise: no weights, so equal ones."""
    rewards = [0.0, 1.0, 0.25]
    none = group_of(rewards, [0.0] * 3)
    torch.testing.assert_close(first(none, pg.OptimalBaseline()), first(none, pg.LeaveOneOut()))
    torch.testing.assert_close(first(none, pg.OptimalBaseline(leave_one_out=False)), first(none, pg.GroupMean()))
    one = group_of(rewards, [0.0, 5.0, 0.0])
    torch.testing.assert_close(first(one, pg.OptimalBaseline()), torch.tensor([-1.0, 1 - 0.125, 0.25 - 1]))


def test_large_norm_keeps_small_siblings() -> None:
    """One completion the policy hardly gives among near-certain ones: subtracting its share from the whole would leave 0/0."""
    batch = group_of([1.0, 0.0, 0.5], [1e20, 1e-20, 3e-20])
    torch.testing.assert_close(first(batch, pg.OptimalBaseline()), torch.tensor([1 - 0.375, -1.0, -0.5]))


def test_masked_from_the_gradient_is_weight_0() -> None:
    """A truncated completion whose reward counts: it has no score to weigh by (NaN here), so it is heard in the fallback alone."""
    batch = replace(group_of([0.0, 1.0, 0.5, 8.0], [1.0, 3.0, 2.0, float("nan")]), truncated=torch.arange(4) == 3)
    batch = pg.MaskTruncated(keep_in_statistics=True)(batch)
    for link in (pg.OptimalBaseline(), pg.OptimalBaseline("length")):
        without = group_of([0.0, 1.0, 0.5], [1.0, 3.0, 2.0])
        torch.testing.assert_close(first(batch, link), torch.cat([first(without, link), torch.zeros(1)]))
    silent = replace(batch, grad_logp_sq_norm=torch.zeros(4))
    torch.testing.assert_close(first(silent, pg.OptimalBaseline()), first(silent, pg.LeaveOneOut()))
    assert first(silent, pg.LeaveOneOut())[0] == pytest.approx(-9.5 / 3)


def literal(batch: pg.Batch, leave_one_out: bool) -> Tensor:
    """Ψ [B] by loops."""
    counted = batch.mask.any(1).tolist()
    out = torch.zeros_like(batch.reward)
    for i in range(len(out)):
        group = [j for j in range(len(out)) if counted[j] and batch.group[j] == batch.group[i]]
        over = [j for j in group if j != i or not leave_one_out]
        if counted[i] and len({batch.reward[j].item() for j in group}) > 1:
            n = [batch.grad_logp_sq_norm[j].item() for j in over]  # type: ignore[index]
            out[i] = batch.reward[i] - sum(w * batch.reward[j] for w, j in zip(n, over, strict=True)) / sum(n)
    return out


@pytest.mark.parametrize("leave_one_out", [True, False])
@QUICK
@given(shape=shapes(max_groups=5, max_size=5, max_width=8), scale=st.sampled_from([1.0, 1e-9, 64.0]))
def test_ragged_batches_agree_with_loops(leave_one_out: bool, shape: Shape, scale: float) -> None:
    batch, _ = make(shape)
    n = 0.1 + Random(shape.seed + 1).uniform(len(batch.mask))
    batch = replace(batch, grad_logp_sq_norm=torch.where(batch.mask.any(1), n, torch.nan))
    link = pg.OptimalBaseline(leave_one_out=leave_one_out)
    psi, one = first(batch, link), torch.ones((), dtype=torch.float64)
    close(psi, literal(batch, leave_one_out), scale=one)
    close(first(replace(batch, grad_logp_sq_norm=scale * batch.grad_logp_sq_norm), link), psi, scale=one)  # type: ignore[operator]
    close(first(replace(batch, reward=batch.reward + 4), link), psi, scale=one, tolerance=1e-11)
    flat = replace(batch, grad_logp_sq_norm=torch.full_like(n, scale))
    close(first(flat, link), first(batch, pg.LeaveOneOut() if leave_one_out else pg.GroupMean()), scale=one)


def test_token_rewards_count_towards_the_total_and_to_go() -> None:
    batch = replace(group_of([0.0, 1.0], [1.0, 2.0]), token_reward=torch.tensor([[0.5, 0.25], [0.0, -1.0]]))
    psi = pg.Algorithm(advantage=(pg.OptimalBaseline(),)).compute_advantages(batch)
    torch.testing.assert_close(psi, torch.tensor([[0.75, 0.25], [-0.75, -0.75]]))


def test_needs_and_refusals() -> None:
    exact, proxy = replace(pg.RLOO, advantage=(pg.OptimalBaseline(),)), pg.OPO
    assert exact.needs == {"grad_logp_sq_norm", "logp_old", "logp_ref"}
    assert proxy.needs == frozenset()
    batch = replace(group_of([0.0, 1.0], [1.0, 2.0]), grad_logp_sq_norm=None)
    with pytest.raises(ValueError, match=r"OptimalBaseline needs Batch\.grad_logp_sq_norm.*norm='length'"):
        first(batch, pg.OptimalBaseline())
    with pytest.raises(ValueError, match=r"'exact'.*'length'.*or 'logits'.*not 'lenght'"):
        pg.OptimalBaseline("lenght")  # type: ignore[arg-type]
    assert pg.OTB.needs == {"logp_old", "sum_pi_squared"}
    with pytest.raises(ValueError, match=r"OptimalBaseline needs Batch\.sum_pi_squared.*learner's `evaluate`"):
        first(replace(batch, logp_old=-torch.ones(2, 2)), pg.OptimalBaseline("logits"))
    with pytest.raises(ValueError, match="OptimalBaseline compares the samples of one prompt"):
        check_sampling(exact, 1, 1.0)
    with pytest.raises(ValueError, match=r"Batch\.grad_logp_sq_norm has shape \[3\]"):
        replace(batch, grad_logp_sq_norm=torch.ones(3))
