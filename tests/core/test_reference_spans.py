"""A teacher of another tokenizer: the log-ratio of a span of text, by hand, by loops and by enumeration, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import policygrad as pg
from doubles.paper_variants import EXTRA_FIELDS
from doubles.random_batches import Random, Shape, close, gradients, make, passed, policy, shapes
from policygrad.papers.objectives import paper_objective

TEACHER = pg.Reference(model="x", tokenizer="x")


def batch_of(spans: list[int]) -> pg.Batch:
    """Two tokens of one span, one of none, and one alone; NaN where nothing may be read."""
    teacher = [torch.nan if end < 0 else x for end, x in zip(spans, [0.0, -2.5, 7.0, -1.0], strict=True)]
    return pg.Batch(
        mask=torch.ones(1, 4, dtype=torch.bool),
        group=torch.zeros(1, dtype=torch.int64),
        reward=torch.full((1,), 9.0, dtype=torch.float64),
        logp_old=torch.tensor([[-1.0, -2.0, -9.0, -3.0]], dtype=torch.float64),
        logp_ref=torch.tensor([teacher], dtype=torch.float64),
        reference_spans=torch.tensor([spans]),
    )


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (pg.TeacherLogRatio(), [0.5, 0.5, 0.0, 2.0]),  # −2.5 − (−1 − 2), and −1 − (−3)
        (pg.TeacherLogRatio(0.5), [0.25, 0.25, 0.0, 1.0]),
        (pg.TeacherLogRatio(discount=1.0), [2.5, 2.5, 2.0, 2.0]),
        (pg.TeacherLogRatio(discount=0.5), [1.0, 1.0, 1.0, 2.0]),  # 0.5 + (0 + 2/2)/2: three steps
    ],
    ids=str,
)
def test_every_token_of_a_span_has_the_span_s_log_ratio(part: pg.TeacherLogRatio, expected: list[float]) -> None:
    batch = batch_of([1, 1, -1, 3])
    assert replace(pg.DISTILL, advantage=(part,)).compute_advantages(batch).tolist() == [expected]
    assert part.report(batch)["teacher/kl"].value == pytest.approx(-2.5 / 3, rel=1e-15)  # per token that is in a span


def test_a_bonus_and_a_penalty_over_spans_by_hand() -> None:
    batch = batch_of([1, 1, -1, 3])
    bonus = pg.TeacherBonus(0.5, clip=1.0)(torch.ones(1, 4, dtype=torch.float64), batch)
    assert bonus.tolist() == [[1.25, 1.25, 1.0, 1.5]]
    penalised = pg.KLInReward(beta=0.5)(batch).token_reward
    assert penalised is not None
    assert penalised.tolist() == [[0.0, 0.25, 0.0, 1.0]]
    assert pg.KLInReward(beta=0.5, level="sequence")(batch).reward.tolist() == [10.25]


def random_spans(mask: torch.Tensor, seed: int) -> torch.Tensor:
    """Spans of one to three sampled tokens, and tokens of none."""
    generator = torch.Generator().manual_seed(seed)
    spans = torch.full(mask.shape, -1)
    for row in range(len(mask)):
        places = mask[row].nonzero()[:, 0].tolist()
        while places:
            size, is_span = (
                int(torch.randint(1, 4, (), generator=generator)),
                bool(torch.rand((), generator=generator) < 0.8),
            )
            span, places = places[:size], places[size:]
            if is_span:
                spans[row, span] = span[-1]
    return spans


@settings(max_examples=25)
@given(shape=shapes())
def test_the_gradient_is_that_of_the_definition(shape: Shape) -> None:
    """Σ over spans of r·(log π_T(span) − log π_old(span)), divided by the tokens, at 1e-12."""
    batch, logits = make(shape, 0.15)
    assert batch.tokens is not None
    assert batch.logp_old is not None
    spans = random_spans(batch.mask, shape.seed)
    teacher = Random(shape.seed + 1).normal(*batch.mask.shape)
    batch = replace(batch, logp_ref=teacher, reference_spans=spans)
    logp = policy(logits, batch.tokens, batch.mask)
    total, result = logits.sum() * 0, pg.DISTILL.compute_advantages(batch)
    for row in range(len(batch.mask)):
        for end in {int(x) for x in spans[row] if x >= 0}:
            members = [t for t in range(spans.shape[1]) if int(spans[row, t]) == end]
            log_ratio = sum(float(teacher[row, t] - batch.logp_old[row, t]) for t in members)
            for t in members:
                close(result[row, t], torch.tensor(log_ratio, dtype=torch.float64), tolerance=1e-12)
                total = total + log_ratio * torch.exp(logp[row, t] - batch.logp_old[row, t]) / batch.mask.sum()
    loss = pg.surrogate(pg.Forward(logp), batch, result, pg.DISTILL)
    close(*gradients(-loss, logits), *gradients(total, logits))


@pytest.mark.parametrize("name", ["distill", "ppo", "rloo", "reinforce_pp"])
@pytest.mark.parametrize("seed", range(3))
def test_the_papers_objectives_over_spans(name: str, seed: int) -> None:
    """What `policygrad verify` compares a run with: a teacher's signal, a penalty at each token, and one of the completion."""
    algorithm, shape = pg.ALGORITHMS[name], Shape((4, 1, 3), 5, seed=seed, binary=seed % 2 == 0)
    batch, logits = make(shape, 0.15, EXTRA_FIELDS.get(name))
    teacher = Random(shape.seed + 1).normal(*batch.mask.shape)
    batch = replace(batch, logp_ref=teacher, reference_spans=random_spans(batch.mask, shape.seed))
    logp = policy(logits, batch.tokens, batch.mask)
    psi = algorithm.compute_advantages(batch)
    loss = pg.surrogate(passed(logp, batch, algorithm), batch, psi, algorithm)
    paper = paper_objective(algorithm, batch, logp, shape.width)
    close(gradients(-loss, logp)[0], gradients(paper, logp)[0])


@settings(max_examples=10)
@given(shape=shapes())
def test_spans_of_one_token_change_nothing(shape: Shape) -> None:
    batch, _ = make(shape, 0.15)
    batch = replace(batch, logp_ref=Random(shape.seed + 1).normal(*batch.mask.shape))
    single = torch.where(batch.mask, torch.arange(batch.mask.shape[1]), -1)
    for discount in (0.0, 0.4, 1.0):
        algorithm = replace(pg.DISTILL, advantage=(pg.TeacherLogRatio(discount=discount),))
        with_spans = algorithm.compute_advantages(replace(batch, reference_spans=single))
        assert torch.equal(with_spans, algorithm.compute_advantages(batch))


def test_the_mean_gradient_is_that_of_the_kl_between_spans() -> None:
    """By enumeration: two tokens of three values each are a span, of which the teacher gives each text a probability."""
    theta = Random(0).normal(4, 3).requires_grad_()  # the first token, and the second after each first
    teacher = Random(1).normal(9).log_softmax(0)
    first, second = theta[0].log_softmax(0), theta[1:].log_softmax(-1)
    kl, result = theta.sum() * 0, torch.zeros_like(theta)
    for number, (a, b) in enumerate(itertools.product(range(3), repeat=2)):
        logp = torch.stack([first[a], second[a, b]])
        kl = kl + logp.sum().exp() * (logp.sum() - teacher[number])
        batch = pg.Batch(
            mask=torch.ones(1, 2, dtype=torch.bool),
            group=torch.zeros(1, dtype=torch.int64),
            reward=torch.zeros(1, dtype=torch.float64),
            logp_old=logp.detach()[None],
            logp_ref=torch.tensor([[0.0, float(teacher[number])]], dtype=torch.float64),
            reference_spans=torch.tensor([[1, 1]]),
        )
        algorithm = replace(pg.DISTILL, aggregation=pg.SequenceSum())
        loss = pg.surrogate(logp[None], batch, algorithm.compute_advantages(batch), algorithm)
        result = result - logp.detach().sum().exp() * torch.autograd.grad(loss, theta, retain_graph=True)[0]
    close(result, gradients(-kl, theta)[0])


def test_what_a_teacher_reads_is_folded_into_spans() -> None:
    """The teacher's five tokens of the first completion are 1 + 2 of two spans and two of none; the second has none at all."""
    batch = pg.Batch(
        mask=torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool),
        group=torch.tensor([0, 0]),
        reward=torch.zeros(2),
        tokens=torch.tensor([[5, 6, 7], [8, 9, 0]]),
        prompts=(torch.tensor([1, 2]),),
        reference_prompts=(torch.tensor([30]), torch.tensor([31, 32])),
        reference_tokens=(torch.tensor([40, 41, 42, 43, 44]), torch.empty(0, dtype=torch.int64)),
        reference_places=(torch.tensor([0, 2, 2, -1, -1]), torch.empty(0, dtype=torch.int64)),
        reference_spans=torch.tensor([[0, 2, 2], [-1, -1, -1]]),
    )
    read = batch.as_reference_reads()
    assert read.tokens is not None
    assert read.tokens.tolist() == [[40, 41, 42, 43, 44], [0] * 5]
    assert read.mask.tolist() == [[True, True, True, False, False], [False] * 5]
    assert [x.tolist() for x in read.prompts or ()] == [[30], [31, 32]]
    folded = batch.fold_reference(torch.tensor([[-1.0, -2.0, -4.0, torch.nan, -8.0], [-16.0] * 5]))
    assert folded.tolist() == [[-1.0, 0.0, -6.0], [0.0, 0.0, 0.0]]
    second = batch.select(torch.tensor([1]))
    assert [len(second.reference_tokens), len(second.reference_places)] == [1, 1]
    assert second.as_reference_reads().mask.tolist() == [[False]]
    assert batch.without_texts().reference_tokens == ()
    with pytest.raises(
        pg.ConfigError, match=r"reference_tokens and reference_places need one entry for each completion"
    ):
        replace(batch, reference_places=batch.reference_places[:1])


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (pg.GRPO, r"KLToReference compares tokens one by one.*use TeacherLogRatio\(\), TeacherBonus\(\) or KLInReward"),
        (replace(pg.DISTILL, terms=(pg.ExactKLToReference(),)), "ExactKLToReference compares tokens one by one"),
        (pg.PRIME, "compares tokens one by one"),
    ],
    ids=["term", "exact", "reward model"],
)
def test_parts_that_compare_single_tokens_are_refused(algorithm: pg.Algorithm, says: str) -> None:
    with pytest.raises(pg.ConfigError, match=says):
        replace(algorithm, reference=TEACHER)


@pytest.mark.parametrize(
    ("options", "has"),
    [
        ({"teachers": ("a=x", "b=y")}, "teachers"),
        ({"model": "x", "templates": ("{answer} {prompt}",)}, "templates"),
    ],
    ids=["teachers", "templates"],
)
def test_a_tokenizer_needs_one_other_model(options: dict[str, Any], has: str) -> None:
    with pytest.raises(pg.ConfigError, match=rf"Reference\.tokenizer='t'.* has {has}"):
        pg.Reference(tokenizer="t", **options)


def test_a_run_needs_the_tokenizer_s_model() -> None:
    """Told of a run alone: on the command line --teacher comes after the tokenizer."""
    [says] = pg.Reference(tokenizer="t").find_run_conflicts(pg.DISTILL)
    assert says.startswith("Reference.tokenizer='t' is that of another model, and Reference has none: set --teacher")
