"""Learning from a teacher: by hand, by enumeration, over the vocabulary, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import policygrad as pg
from doubles.enumeration import (
    MASK,
    REFERENCE,
    THETA,
    expected_gradient,
    frozen_visits,
    logp_of,
    token_logp,
)
from doubles.random_batches import VOCABULARY, Random, Shape, close, gradients, make, policy, shapes
from policygrad.core import masked
from policygrad.core.validation import check_rollout


def batch_of(teacher: list[list[float]], old: list[list[float]]) -> pg.Batch:
    """NaN = not sampled."""
    logp = torch.tensor(old, dtype=torch.float64)
    return pg.Batch(
        mask=~logp.isnan(),
        group=torch.zeros(len(logp), dtype=torch.int64),
        reward=torch.full((len(logp),), 9.0, dtype=torch.float64),
        logp_old=logp,
        logp_ref=torch.tensor(teacher, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (pg.TeacherLogRatio(), [1.0, 0.0, -2.0, 4.0]),
        (pg.TeacherLogRatio(0.5), [0.5, 0.0, -1.0, 2.0]),
        (pg.TeacherLogRatio(discount=0.5), [1.0, 0.0, 0.0, 4.0]),  # 1 + (−2 + 4/2)/2, over the hole: one step
        (pg.TeacherLogRatio(discount=1.0), [3.0, 0.0, 2.0, 4.0]),
        (pg.TeacherLogRatio(0.0), [0.0, 0.0, 0.0, 0.0]),
    ],
    ids=str,
)
def test_hand_numbers(part: pg.TeacherLogRatio, expected: list[float]) -> None:
    """A row with a tool's token in its midst; the reward of 9 is not read."""
    nan = math.nan
    batch = batch_of([[-1.0, nan, -3.0, -1.0]], [[-2.0, nan, -1.0, -5.0]])
    psi = replace(pg.DISTILL, advantage=(part,)).compute_advantages(batch)
    assert psi.tolist() == [expected]
    assert part.report(batch)["teacher/kl"].value == pytest.approx(-(1 - 2 + 4) / 3, rel=1e-15)


def test_no_completion_at_all() -> None:
    nan = math.nan
    batch = batch_of([[nan, nan]], [[nan, nan]])
    assert pg.DISTILL.compute_advantages(batch).tolist() == [[0.0, 0.0]]
    assert pg.DISTILL.report(batch) == {}


@settings(max_examples=25)
@given(shape=shapes())
def test_discounted_sum_counts_sampled_tokens_only(shape: Shape) -> None:
    batch, _ = make(shape)
    x = torch.where(batch.mask, Random(shape.seed).normal(*batch.mask.shape), math.nan)
    for rate in (0.0, 0.3, 1.0):
        result = masked.discounted_reverse_cumsum(x, batch.mask, rate)
        for row, where, got in zip(x, batch.mask, result, strict=True):
            values = row[where]
            expected = [sum(rate ** (s - t) * values[s] for s in range(t, len(values))) for t in range(len(values))]
            close(got[where], torch.stack(expected) if expected else got[where], tolerance=1e-11)
            assert (got[~where] == 0).all()


ON_POLICY = replace(pg.DISTILL, aggregation=pg.SequenceSum())


def gap() -> Tensor:
    """log π_T − log π_old [15, T], of every completion."""
    return token_logp(REFERENCE) - token_logp(THETA)


def test_token_level_gradient_is_that_of_each_states_kl() -> None:
    """By enumeration: E Ψ_t ∇log π = −∇ Σ_s d(s) KL(π_θ‖π_T)(s), the visits d frozen."""
    result = expected_gradient(ON_POLICY, 1, psi=torch.where(MASK, gap(), 0))
    close(result, frozen_visits(lambda p, q: -(p.exp() * (p - q)).sum(-1)))


def test_completion_level_gradient_is_that_of_the_sequence_kl() -> None:
    """Discount 1: −∇KL(π_θ‖π_T) of completions, the visits' change included; it is another gradient than the tokens'."""
    psi = masked.discounted_reverse_cumsum(gap(), MASK, 1.0)
    theta = THETA.clone().requires_grad_()
    kl = (logp_of(theta).exp() * (logp_of(theta) - logp_of(REFERENCE))).sum()
    expected = gradients(-kl, theta)[0]
    close(expected_gradient(ON_POLICY, 1, psi=psi), expected)
    alone = expected_gradient(ON_POLICY, 1, psi=torch.where(MASK, gap(), 0))
    assert (alone - expected).abs().max() > 0.05 * expected.abs().max()


@settings(max_examples=20)
@given(shape=shapes())
def test_the_exact_kl_is_its_defining_sum(shape: Shape) -> None:
    """GKD with the policy's own answers and the reverse KL: −β/N Σ_t Σ_a π(a) log(π(a)/π_T(a))."""
    batch, logits = make(shape, 0.15)
    assert batch.tokens is not None
    teacher = logits.detach() + 0.5 * Random(shape.seed + 1).normal(*logits.shape)
    algorithm = replace(pg.DISTILL, advantage=(pg.TeacherLogRatio(0.0),), terms=(pg.ExactKLToReference(0.7),))
    states = torch.cat([torch.full_like(batch.tokens[:, :1], VOCABULARY), batch.tokens[:, :-1]], 1)
    now, theirs = torch.log_softmax(logits[states], -1), torch.log_softmax(teacher[states], -1)
    kl = torch.where(batch.mask, (now.exp() * (now - theirs)).sum(-1), torch.nan)
    paper = logits.sum() * 0
    for i, t in batch.mask.nonzero().tolist():
        p, q = (torch.softmax(x[int(states[i, t])], -1) for x in (logits, teacher))
        for a in range(VOCABULARY):
            paper = paper - 0.7 * p[a] * torch.log(p[a] / q[a]) / batch.mask.sum()
    out = pg.Forward(policy(logits, batch.tokens, batch.mask), kl_ref=kl)
    psi = algorithm.compute_advantages(batch)
    close(*gradients(-pg.surrogate(out, batch, psi, algorithm), logits), *gradients(paper, logits))
    torch.testing.assert_close(pg.objective(out, batch, psi, algorithm), paper.detach(), rtol=1e-12, atol=1e-12)


def test_a_teacher_far_away_gives_finite_gradients() -> None:
    """float32, log-ratios of ±95 both to the teacher and to π_old."""
    batch = batch_of([[-95.0, 0.0], [0.0, -95.0]], [[0.0, -95.0], [-95.0, 0.0]])
    single = {n: getattr(batch, n).float() for n in ("reward", "logp_old", "logp_ref")}
    batch = replace(batch, **single)
    logp = torch.tensor([[-95.0, 0.0], [0.0, -95.0]], requires_grad=True)
    loss = pg.surrogate(logp, batch, pg.DISTILL.compute_advantages(batch), pg.DISTILL)
    assert torch.isfinite(gradients(loss, logp)[0]).all()


def test_distillation_reads_no_reward() -> None:
    assert not pg.DISTILL.reads_reward
    assert "logp_ref" in pg.DISTILL.needs
    for other in (
        pg.GRPO,
        pg.REINFORCE,
        pg.PRIME,
        pg.Algorithm(),
        replace(pg.DISTILL, advantage=(pg.GroupMean(),)),
        replace(pg.DISTILL, filters=(pg.DropZeroVariance(),)),
    ):
        assert other.reads_reward


REFUSED = {
    "a negative coefficient": (lambda: pg.TeacherLogRatio(-1.0), ["TeacherLogRatio.coefficient", "-1"]),
    "a discount above 1": (lambda: pg.TeacherLogRatio(discount=1.5), ["TeacherLogRatio.discount", "[0, 1]", "1.5"]),
    "a negative β": (lambda: pg.ExactKLToReference(-0.1), ["ExactKLToReference.beta", "-0.1"]),
    "after another link": (
        lambda: replace(pg.DISTILL, advantage=(pg.GroupMean(), pg.TeacherLogRatio())),
        ["TeacherLogRatio starts from", "put it first"],
    ),
    "no reference": (lambda: replace(pg.DISTILL, reference=None), ["needs a reference, and reference is None"]),
    "a teacher that is refreshed": (
        lambda: pg.Reference(refresh_every=5, model="x"),
        ["Reference.model='x' is frozen", "unset either"],
    ),
    "a teacher that follows a stall": (
        lambda: pg.Reference(refresh_after_stall=5, model="x"),
        ["Reference.model='x'"],
    ),
    "a reference that nobody reads": (
        lambda: replace(pg.DAPO, reference=pg.Reference(model="x")),
        ["reference.model is 'x'", "no part of dapo uses", "distill"],
    ),
    "no teacher in a run": (
        lambda: check_rollout(pg.DISTILL),
        ["distill learns from a teacher: set --teacher", "--teacher", "Reference(model=…)"],
    ),
    "a trust region with the exact KL": (
        lambda: replace(pg.TRPO, terms=(pg.ExactKLToReference(),)),
        ["TrustRegion evaluates candidate weights", "KLToReference(form='r*k1')"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    make, says = REFUSED[case]
    with pytest.raises(pg.ConfigError) as error:
        make()
    assert all(text in str(error.value) for text in says), error.value


def test_fields_that_are_missing_are_named() -> None:
    batch = batch_of([[-1.0]], [[-1.0]])
    for name in ("logp_ref", "logp_old"):
        with pytest.raises(pg.ConfigError, match=rf"TeacherLogRatio needs Batch\.{name}"):
            pg.DISTILL.compute_advantages(replace(batch, **{name: None}))
    algorithm = replace(pg.DISTILL, terms=(pg.ExactKLToReference(),))
    with pytest.raises(pg.ConfigError, match=r"ExactKLToReference needs Forward\.kl_ref"):
        pg.surrogate(batch.logp_old, batch, algorithm.compute_advantages(batch), algorithm)  # type: ignore[arg-type]


def test_formula() -> None:
    assert pg.DISTILL.equation()["Ψ"] == "log(π_ref/π_old)_t"
    assert pg.TeacherLogRatio(2.0, 0.9).formula == "2·Σ_{s≥t} 0.9^{s−t}·log(π_ref/π_old)_s"
    assert pg.Reference(model="runs/grpo-1").formula == "the model runs/grpo-1, frozen"
    check_rollout(replace(pg.DISTILL, reference=pg.Reference(model="runs/grpo-1")))
