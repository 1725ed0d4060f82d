"""The vine's surrogate: hand numbers, the quotient itself by autograd, and the policy gradient where nothing is left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.enumeration import COMPLETIONS, EOS, LONGEST, REWARD, THETA, VOCABULARY, true_gradient
from doubles.paper_variants import vine_without_baseline
from doubles.random_batches import Random, Shape, close, gradients, make, policy
from policygrad.core.objective import gate_weight
from policygrad.core.validation import check_sampling
from policygrad.papers.completions import read_batch

VINE = pg.TRPO_VINE


def state(q: list[float], old: list[float], weight: list[float] | None = None) -> pg.Batch:
    """One state: Q̂ and π_old of each token."""
    n = len(q)
    return pg.Batch(
        mask=torch.ones(n, 1, dtype=torch.bool),
        group=torch.zeros(n, dtype=torch.int64),
        reward=torch.tensor(q, dtype=torch.float64),
        logp_old=torch.tensor(old, dtype=torch.float64).log()[:, None],
        weight=None if weight is None else torch.tensor(weight, dtype=torch.float64)[:, None],
    )


def test_hand_numbers() -> None:
    """Two tokens of probability 0.6 and 0.2, worth 1 and 0: ŵ = ¾, ¼; the policy now gives them 0.3 and 0.4."""
    batch = state([1.0, 0.0], [0.6, 0.2], [1.5, 0.5])
    psi = VINE.compute_advantages(batch)
    torch.testing.assert_close(psi[:, 0], torch.tensor([0.25, -0.75]).double())
    logp = torch.tensor([[0.3], [0.4]]).double().log().requires_grad_()
    weight, ratio = gate_weight(pg.Forward(logp), batch, psi, VINE)
    torch.testing.assert_close(ratio[:, 0], torch.tensor([0.5, 2.0]).double())
    torch.testing.assert_close(weight[:, 0], torch.tensor([0.5, 2.0]).double() / 0.875)  # m = ¾·½ + ¼·2
    value = pg.objective(logp, batch, psi, VINE)
    torch.testing.assert_close(value, torch.tensor(0.3 / 0.7 - 0.75).double())  # Σ πQ/Σ π, less Q̄
    gradient = gradients(-pg.surrogate(logp, batch, psi, VINE), logp)[0]
    torch.testing.assert_close(gradient[:, 0], torch.tensor([12 / 49, -12 / 49]).double())  # ±(3/7)(4/7)


def test_constants_and_single_tokens_have_no_gradient() -> None:
    batch = state([0.3, 0.9, 0.1], [0.5, 0.2, 0.1], [2.0, 0.7, 0.3])
    logp = torch.tensor([[-1.0], [-2.0], [-0.5]]).double().requires_grad_()
    higher = replace(batch, reward=batch.reward + 100)
    result = [gradients(pg.surrogate(logp, b, VINE.compute_advantages(b), VINE), logp)[0] for b in (batch, higher)]
    close(result[1], result[0], tolerance=1e-11)
    assert result[0].abs().max() > 0.01
    raw = replace(VINE, advantage=())  # the paper's: no baseline at all
    close(gradients(pg.surrogate(logp, batch, batch.reward[:, None], raw), logp)[0], result[0])
    for b in (state([0.3], [0.5]), replace(batch, reward=torch.full((3,), 0.7).double())):
        assert (VINE.compute_advantages(b) == 0).all()


@pytest.mark.parametrize("weights", ["weights", None])
@pytest.mark.parametrize("off_policy", [None, 0.15, 1.5])
@pytest.mark.parametrize("seed", range(4))
def test_gradient_is_that_of_the_printed_quotient(weights: str | None, off_policy: float | None, seed: int) -> None:
    algorithm = replace(VINE, advantage=())
    batch, logits = make(Shape((4, 3, 4), 3, seed=seed, binary=False), off_policy, weights)
    logp = policy(logits, batch.tokens, batch.mask)
    paper = vine_without_baseline(read_batch(batch, logp), 3)
    psi = algorithm.compute_advantages(batch)
    mine = gradients(-pg.surrogate(logp, batch, psi, algorithm), logp, logits)
    for got, expected in zip(mine, gradients(paper, logp, logits), strict=True):
        close(got, expected)
        assert expected.abs().max() > 1e-3
    torch.testing.assert_close(pg.objective(logp, batch, psi, algorithm), paper.detach(), rtol=1e-12, atol=1e-12)


def test_repeated_samples_are_one_weighted_row() -> None:
    """Eq. 16 over K = 5 draws, three of which are one token, against the three tokens with weights 3, 1, 1."""
    q, old, now = torch.tensor([0.2, 1.0, 0.4]).double(), torch.tensor([0.5, 0.3, 0.2]).double(), Random(0).normal(3)
    times = torch.tensor([3, 1, 1])
    theta = now.clone().requires_grad_()
    r = (torch.log_softmax(theta, 0).exp() / old).repeat_interleave(times)
    (expected,) = torch.autograd.grad((r * q.repeat_interleave(times)).sum() / r.sum(), theta)
    batch = state(q.tolist(), old.tolist(), (times.double() * 3 / 5).tolist())
    theta = now.clone().requires_grad_()
    logp = torch.log_softmax(theta, 0)[:, None]
    close(gradients(-pg.surrogate(logp, batch, VINE.compute_advantages(batch), VINE), theta)[0], expected)


def test_all_tokens_of_all_states_are_the_policy_gradient() -> None:
    """Every state that is visited, by how often, K = the vocabulary, Q exact: ∇J, over the 15 completions of a bigram policy."""
    logits = torch.log_softmax(THETA, -1)

    def step(prefix: tuple[int, ...]) -> Tensor:
        return logits[len(prefix), prefix[-1] if prefix else EOS]

    def worth(prefix: tuple[int, ...]) -> Tensor:
        if prefix in COMPLETIONS:
            return REWARD[COMPLETIONS.index(prefix)]
        return sum(step(prefix)[a].exp() * worth((*prefix, a)) for a in range(VOCABULARY))  # type: ignore[return-value]

    def visits(prefix: tuple[int, ...]) -> Tensor:
        return (
            torch.stack([step(prefix[:t])[a] for t, a in enumerate(prefix)]).sum().exp() if prefix else torch.ones(())
        )

    states = [p for n in range(LONGEST) for p in itertools.product(range(1, VOCABULARY), repeat=n)]
    places = [(s, a) for s in states for a in range(VOCABULARY)]
    old = torch.stack([step(s)[a] for s, a in places])[:, None]
    often = torch.stack([visits(s) for s, _ in places])[:, None] * len(states)
    batch = pg.Batch(
        mask=torch.ones(len(places), 1, dtype=torch.bool),
        group=torch.arange(len(states)).repeat_interleave(VOCABULARY),
        reward=torch.stack([worth((*s, a)) for s, a in places]),
        logp_old=old,
        weight=VOCABULARY * old.exp() * often,
    )
    theta = THETA.clone().requires_grad_()
    now = torch.log_softmax(theta, -1)
    logp = torch.stack([now[len(s), s[-1] if s else EOS, a] for s, a in places])[:, None]
    gradient = gradients(-pg.surrogate(logp, batch, VINE.compute_advantages(batch), VINE), theta)[0]
    close(gradient, true_gradient())
    assert gradient.abs().max() > 0.01


@pytest.mark.parametrize("change", [95.0, -95.0])
def test_extreme_ratios_stay_finite_and_add_up(change: float) -> None:
    """float32; the shares ŵ·r/m of a state are a distribution whatever the ratios are."""
    batch = replace(state([1.0, 0.0, 1.0], [0.5, 0.3, 0.2]), reward=torch.tensor([1.0, 0.0, 1.0]))
    batch = replace(batch, logp_old=batch.logp_old.float())  # type: ignore[union-attr]
    for shift in (torch.full((3, 1), change), torch.tensor([[change], [0.0], [-change]])):
        leaf = (batch.logp_old + shift).requires_grad_()
        psi = VINE.compute_advantages(batch)
        weight, _ = gate_weight(pg.Forward(leaf), batch, psi, VINE)
        assert weight.isfinite().all()
        assert float(weight.mean()) == pytest.approx(1.0, abs=1e-5)
        assert gradients(pg.surrogate(leaf, batch, psi, VINE), leaf)[0].isfinite().all()


def test_no_micro_batch_may_split_a_state() -> None:
    """Half of a state's tokens normalise by themselves: another gradient, so that a learner is told (`whole_groups`)."""
    batch = state([1.0, 0.0, 0.5, 0.2], [0.4, 0.3, 0.2, 0.1])
    psi, coef = VINE.compute_advantages(batch), VINE.all_coefficients(batch)
    logp = Random(1).normal(4, 1).requires_grad_()
    uninterrupted = gradients(pg.surrogate(logp, batch, psi, VINE, coef), logp)[0]
    halves = torch.zeros_like(uninterrupted)
    for rows in (torch.arange(2), torch.arange(2, 4)):
        part = pg.surrogate(logp[rows], batch.select(rows), psi[rows], VINE, tuple(c[rows] for c in coef))
        halves = halves + gradients(part, logp)[0]
    assert (halves - uninterrupted).abs().max() > 0.01
    assert VINE.gate.requires_full_groups
    assert not pg.GRPO.gate.requires_full_groups


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "no state": (lambda: pg.Vine(states=0), ["Vine.states must be at least 1 per prompt"]),
    "one action": (lambda: pg.Vine(actions=1), ["Vine.actions must be at least 2", "not 1"]),
    "no completion": (lambda: pg.Vine(samples=0), ["Vine.samples must be at least 1"]),
    "a filter": (
        lambda: replace(VINE, filters=(pg.DropZeroVariance(),)),
        ["DropZeroVariance reads full completions", "filters=()"],
    ),
    "shaping": (
        lambda: replace(VINE, shaping=(pg.SoftOverlong(),)),
        ["SoftOverlong reads full completions", "shaping=()"],
    ),
    "something of whole answers": (
        lambda: replace(VINE, advantage=(pg.Vine(), pg.GreedyBaseline())),
        ["GreedyBaseline takes the reward to go", "after Vine"],
    ),
    "not first": (
        lambda: replace(VINE, advantage=(pg.GroupMean(), pg.Vine())),
        ["Vine starts from the rewards", "put it first"],
    ),
    "a critic": (lambda: replace(VINE, critic=pg.Critic()), ["no advantage uses the critic", "critic=None"]),
    "a normaliser nobody differentiates": (
        lambda: replace(VINE, terms=()),
        ["no term has its derivative", "terms=(SelfNormalisation(),)"],
    ),
    "a derivative of nothing": (lambda: replace(VINE, gate=pg.Importance()), ["set gate=SelfNormalised()"]),
    "another ratio": (lambda: replace(VINE, ratio=pg.Sequence()), ["SelfNormalised needs per-token ratios"]),
    "a correction": (
        lambda: replace(VINE, old_policy="learner", corrections=(pg.TruncatedIS(),)),
        ["TruncatedIS would weight", "only in SelfNormalised's numerator", "old_policy='sampler'"],
    ),
    "a mean by length": (lambda: replace(VINE, aggregation=pg.SequenceMean()), ["SequenceMean by length"]),
    "nothing drawn but the likeliest": (
        lambda: check_sampling(VINE, 4, 0.0),
        ["at temperature 0 only one is ever sampled"],
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(build: Callable[[], Any], message: list[str]) -> None:
    with pytest.raises(pg.ConfigError) as error:
        build()
    assert [words for words in message if words not in str(error.value)] == []


def test_not_refused() -> None:
    check_sampling(VINE, 1, 1.0)  # the states of a single completion
    replace(VINE, advantage=(pg.Vine(distinct=False),))
    clipped = replace(
        VINE, gate=pg.Clip(), terms=(), update_rule=pg.GradientSteps(epochs=2)
    )  # Σ ŵ r Ψ, its weights fixed
    assert not clipped.gate.requires_full_groups
    replace(VINE, update_rule=pg.GradientSteps(epochs=4))
