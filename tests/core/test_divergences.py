"""Divergences over the likeliest tokens, against a transcription of SDPO's loss, and with the gradient of their definition."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Random, Shape, gradients, make
from policygrad.core.batch import TopTokens
from policygrad.core.divergences import Divergence

V = 7


def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
    random = Random(seed)
    return (2 * random.normal(n, V)).requires_grad_(), (2 * random.normal(n, V)).log_softmax(-1)


def by_hand(logp: list[float], reference: list[float], how: Divergence) -> float:
    """One state, token by token, as Hübotter et al. 2026 and their code define it."""
    p, q = ([math.exp(x) for x in values] for values in (logp, reference))
    if how.top_k:
        ranked = p if how.top_of == "policy" else q
        chosen = sorted(range(len(p)), key=lambda a: -ranked[a])[: how.top_k]
        tops = [[values[a] for a in chosen] for values in (p, q)]
        if how.others == "one":
            p, q = ([*top, 1 - sum(top)] for top in tops)
        else:
            p, q = ([x / sum(top) for x in top] for top in tops)
    if how.alpha in (0, 1):
        first, second = (p, q) if how.alpha == 1 else (q, p)
        return sum(x * math.log(x / y) for x, y in zip(first, second, strict=True))
    middle = [how.alpha * y + (1 - how.alpha) * x for x, y in zip(p, q, strict=True)]
    of_p = sum(x * math.log(x / m) for x, m in zip(p, middle, strict=True))
    of_q = sum(y * math.log(y / m) for y, m in zip(q, middle, strict=True))
    return how.alpha * of_q + (1 - how.alpha) * of_p


@pytest.mark.parametrize("others", ["one", "none"])
@pytest.mark.parametrize("top_of", ["policy", "reference"])
@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.3, 1.0])
def test_each_form_is_its_definition(alpha: float, top_k: int, top_of: str, others: str) -> None:
    logits, reference = draw(5, seed=1)
    how = Divergence(alpha, top_k, top_of, others)  # type: ignore[arg-type]
    value = how.compute(logits.log_softmax(-1), reference)
    rows = zip(logits.log_softmax(-1).tolist(), reference.tolist(), strict=True)
    expected = torch.tensor([by_hand(ours, theirs, how) for ours, theirs in rows], dtype=torch.float64)
    torch.testing.assert_close(value.detach(), expected, rtol=0, atol=1e-12)
    # the choice of tokens does not move with small changes, so that the gradient is that of a difference
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    step = 1e-6
    for a in range(V):
        moved = logits.detach().clone()
        moved[:, a] += step
        above = how.compute(moved.log_softmax(-1), reference)
        moved[:, a] -= 2 * step
        below = how.compute(moved.log_softmax(-1), reference)
        torch.testing.assert_close(gradient[:, a], (above - below) / (2 * step), rtol=0, atol=1e-8)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_all_tokens_are_the_divergence_over_the_vocabulary(alpha: float) -> None:
    logits, reference = draw(4, seed=2)
    logp = logits.log_softmax(-1)
    whole = Divergence(alpha).compute(logp, reference)
    torch.testing.assert_close(Divergence(alpha, V - 1).compute(logp, reference), whole, rtol=0, atol=1e-12)
    assert torch.equal(Divergence(alpha, V).compute(logp, reference), whole)
    assert torch.equal(Divergence(alpha, 10 * V).compute(logp, reference), whole)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("others", ["one", "none"])
def test_excluded_tokens_have_no_part_in_it(alpha: float, others: str) -> None:
    """Top-k and top-p left two tokens of seven: whatever is chosen, the others have probability 0, also as one."""
    logits, reference = draw(3, seed=3)
    left = torch.zeros(V, dtype=torch.bool)
    left[[2, 5]] = True
    ours = logits.masked_fill(~left, -torch.inf).log_softmax(-1)
    theirs = reference.masked_fill(~left, -torch.inf).log_softmax(-1)
    value = Divergence(alpha, 3, "policy", others).compute(ours, theirs)  # type: ignore[arg-type]
    expected = Divergence(alpha).compute(ours[:, left], theirs[:, left])
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert gradient.isfinite().all()


def test_the_capped_ratio_multiplies_the_divergence_without_a_gradient_of_its_own() -> None:
    """SDPO's `is_clip`: min(π_θ/π_old, cap) of the sampled token."""
    batch, _ = make(Shape((3, 2), 5, seed=4, binary=False), 0.9)
    assert batch.logp_old is not None
    logp = (batch.logp_old + 0.5).nan_to_num(-1.0).requires_grad_()
    kl = (Random(5).normal(*batch.mask.shape) ** 2).requires_grad_()
    out, psi = pg.Forward(logp, kl_ref=kl), torch.zeros(batch.mask.shape, dtype=torch.float64)
    term = pg.ExactKLToReference(0.7, top_k=3, cap=1.2)
    algorithm = replace(pg.SDFT, terms=(term,), reference=pg.Reference(model="teacher"))
    of_logp, of_kl = gradients(pg.surrogate(out, batch, psi, algorithm), logp, kl)
    assert not of_logp.any()
    (coefficient,) = [algorithm.all_coefficients(batch)[1]]
    torch.testing.assert_close(of_kl, torch.where(batch.mask, 0.7 * 1.2 * coefficient, 0), rtol=1e-12, atol=0)


def test_the_authors_form_of_sdpo_is_one_term() -> None:
    term = pg.ExactKLToReference(alpha=0.5, top_k=100, cap=2.0)
    algorithm = replace(pg.SDPO, terms=(term,))
    assert (
        "min(r, 2)·∇JSD_0.5(π_ref, π_θ) over π_θ's 100 likeliest tokens, and the others as one"
        in algorithm.equation()["k"]
    )
    with pytest.raises(
        pg.ConfigError, match="accounts for stale samples by the ratio, which ExactKLToReference does not have"
    ):
        replace(pg.SDPO, terms=(pg.ExactKLToReference(),))
    with pytest.raises(pg.ConfigError, match="different alphas or tokens"):
        replace(pg.SDPO, terms=(term, replace(term, top_k=20)))


@pytest.mark.parametrize("others", ["one", "none"])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_likeliest_tokens_are_all_that_need_be_known_of_the_reference(
    alpha: float, top_k: int, others: Literal["one", "none"]
) -> None:
    logits, reference = draw(5, seed=2)
    how = Divergence(alpha, top_k, "reference", others)
    top = reference.topk(top_k)
    known = how.compute_top(logits.log_softmax(-1), TopTokens(top.indices.int(), top.values))
    whole = how.compute(logits.log_softmax(-1), reference)
    torch.testing.assert_close(known, whole, rtol=0, atol=1e-12)
    (a,), (b,) = (torch.autograd.grad(x.sum(), logits) for x in (known, whole))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_likeliest_tokens_that_leave_nothing_have_a_finite_divergence(alpha: float) -> None:
    logits, _ = draw(2, seed=3)
    certain = TopTokens(torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1))
    value = Divergence(alpha, 1, "reference").compute_top(logits.log_softmax(-1), certain)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
