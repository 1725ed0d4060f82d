"""Every row of the matrix has the gradient and the value of a literal transcription of its paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.cases import naming
from doubles.paper_variants import EXTRA_FIELDS, ROWS, TABLE
from doubles.random_batches import Random, Shape, close, distributions, gradients, make, passed, policy, shapes
from policygrad.core.objective import with_selected_tokens
from policygrad.papers.completions import read_batch

# The spread of log π_θ − log π_old: none, inside and around GSPO's range, around PPO's, far outside on both sides.
OFF_POLICY = {"on-policy": None, "slightly off": 3e-4, "off": 0.15, "strongly off": 1.5}
SEED = 3


def test_the_table_is_complete() -> None:
    assert set(ROWS) == set(pg.ALGORITHMS)


def both(name: str, shape: Shape, off_policy: float | None) -> tuple[list[Tensor], list[Tensor]]:
    """[objective, ∂/∂log π_θ, ∂/∂θ] of the library and of the transcription."""
    algorithm, transcription = TABLE[name]
    batch, logits = make(shape, off_policy, EXTRA_FIELDS.get(name))
    logp = policy(logits, batch.tokens, algorithm.read_tokens(batch))
    rollout = algorithm.apply_filters(with_old_policy(batch, algorithm, logp))
    psi = algorithm.compute_advantages(rollout)
    kept = algorithm.corrections or "logp_old" in algorithm.gate.needs
    step = rollout if kept else replace(rollout, logp_old=batch.logp_old)
    out = passed(logp, step, algorithm)
    step = with_selected_tokens(out, step, psi, algorithm)
    given = replace(with_old_policy(batch, algorithm, logp), selected=step.selected)  # what a paper leaves to chance
    over_vocabulary = distributions(logp, given) if "kl_ref" in algorithm.forward_needs else None
    paper = transcription(read_batch(given, logp, over_vocabulary), shape.width)
    expected = [paper.detach(), *gradients(paper, logp, logits)]
    loss = pg.surrogate(out, step, psi, algorithm)
    actual = [pg.objective(out, step, psi, algorithm), *gradients(-loss, logp, logits)]
    return actual, expected


def with_old_policy(batch: pg.Batch, algorithm: pg.Algorithm, logp: Tensor) -> pg.Batch:
    """Fill logp_old for a part that reads it at rollout time: on-policy, π_old is the policy itself."""
    if batch.logp_old is None and "logp_old" in algorithm.needs:
        return replace(batch, logp_old=logp.detach())
    return batch


def check_against_paper(name: str, off_policy: float | None, shape: Shape) -> None:
    (value, by_token, by_parameter), (paper, paper_by_token, paper_by_parameter) = both(name, shape, off_policy)
    close(by_token, paper_by_token)
    close(by_parameter, paper_by_parameter, scale=paper_by_token)
    torch.testing.assert_close(value, paper, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spread", OFF_POLICY)
def test_gradient_and_value_are_the_papers(spread: str) -> None:
    """Groups of 4, 1 and 3 with holes and an empty completion; rewards of 0 and 1 and others in turn."""
    for number, name in enumerate(TABLE):
        with naming(name):
            check_against_paper(name, OFF_POLICY[spread], Shape((4, 1, 3), 5, seed=SEED, binary=number % 2 == 0))
            if OFF_POLICY[spread] == 0.15:
                check_against_paper(name, 0.15, Shape((4, 1, 3), 5, seed=SEED, binary=number % 2 == 1))


def test_the_fixed_shape_has_holes_an_empty_completion_and_several_lengths() -> None:
    mask = make(Shape((4, 1, 3), 5, seed=SEED, binary=True))[0].mask
    assert not mask.any(1).all()
    assert (mask[:, :-1] < mask[:, 1:]).any()
    assert len(set(mask.sum(1).tolist())) > 3


@pytest.mark.full
@pytest.mark.parametrize("name", TABLE)
@settings(max_examples=8, derandomize=True)
@given(off_policy=st.sampled_from(list(OFF_POLICY.values())), shape=shapes())
def test_gradient_and_value_are_the_papers_on_random_shapes(name: str, off_policy: float | None, shape: Shape) -> None:
    check_against_paper(name, off_policy, shape)


def test_transcriptions_have_non_zero_gradients() -> None:
    for name in TABLE:
        with naming(name):
            check_non_zero_gradient(name)


def check_non_zero_gradient(name: str) -> None:
    """A fixed batch with a gradient that is not 0, clipped on both sides where the gate clips."""
    shape = Shape((4, 4, 4), 6, seed=7, binary=False)
    (_, by_token, _), _ = both(name, shape, 1.5)
    assert by_token.abs().max() > 1e-3
    algorithm = TABLE[name][0]
    if isinstance(algorithm.gate, pg.Clip):
        batch, logits = make(shape, 1.5, EXTRA_FIELDS.get(name))
        batch = algorithm.apply_filters(batch)
        change = (policy(logits, batch.tokens, batch.mask) - batch.logp_old).detach()
        ratio = algorithm.ratio(change, batch.mask)  # type: ignore[misc]
        psi = algorithm.compute_advantages(batch)
        below, above = algorithm.gate.clipped(ratio, psi, batch)
        assert bool((below & batch.mask).any()) is bool((psi < 0).any())  # only successes are imitated by raft_pp
        assert (above & batch.mask).any()


def test_a_bare_leaf_of_log_probabilities() -> None:
    """No model at all: plain tensors from any training code, NaN at padded positions, gradient exactly 0 there."""
    for name in TABLE:
        with naming(name):
            algorithm, _ = TABLE[name]
            batch, logits = make(Shape((3, 4), 5, seed=11, binary=False), 0.15, EXTRA_FIELDS.get(name))
            read = algorithm.read_tokens(batch)
            logp = policy(logits, batch.tokens, read).detach()
            grads = []
            for padding in (float("nan"), 0.0):
                leaf = torch.where(read, logp, padding).requires_grad_()
                rollout = algorithm.apply_filters(padded_with(batch, padding))
                loss = pg.surrogate(
                    passed(leaf, rollout, algorithm), rollout, algorithm.compute_advantages(rollout), algorithm
                )
                grads.append(gradients(loss, leaf)[0])
            assert torch.equal(*grads)
            assert grads[0][~read].abs().sum() == 0
            assert torch.isfinite(grads[0]).all()


def padded_with(batch: pg.Batch, padding: float) -> pg.Batch:
    def fill(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(batch.mask, x, padding)

    names = ("logp_old", "logp_ref", "logp_sampler", "values", "weight", "token_reward", "entropy", "implicit_reward")
    return replace(batch, **{name: fill(getattr(batch, name)) for name in names})


def test_a_gate_with_another_ratio_is_still_the_chain_rule() -> None:
    """Ratio and gate are independent: a capped weight on the sequence ratio is sg[clip(s)] Ψ log π."""
    batch, _ = make(Shape((4, 4), 5, seed=3, binary=False), 0.5)
    algorithm = replace(pg.CISPO, ratio=pg.Sequence(), gate=pg.ClippedImportance(0.9, 1.1), filters=())
    logp = torch.where(batch.mask, Random(5).normal(*batch.mask.shape), 0.0).requires_grad_()
    psi = algorithm.compute_advantages(batch)
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(len(logp)):
        where = batch.mask[i]
        s = (logp[i][where] - batch.logp_old[i][where]).mean().exp().clamp(0.9, 1.1).detach()  # type: ignore[index]
        expected = expected + (s * psi[i][where] * logp[i][where]).sum() / batch.mask.sum()
    close(*gradients(-pg.surrogate(logp, batch, psi, algorithm), logp), *gradients(expected, logp))
