"""The gradient belongs to the update: micro-batches, ranks, order, padding and merged duplicates change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.cases import naming
from doubles.random_batches import Random, Shape, close, extra_of, gradients, make, passed, policy, shapes
from doubles.selecting import Loudest
from policygrad.core.batch import PER_TOKEN
from policygrad.core.objective import with_selected_tokens

OWN_AGGREGATION = replace(
    pg.GRPO,
    name="own aggregation",
    terms=(
        pg.KLToReference(0.3, "k3", aggregation=pg.TokenMean()),
        pg.Entropy(0.1, aggregation=pg.SequenceSum()),
        pg.KLToReference(0.2, "k2"),
    ),
)
SELECTING = replace(pg.GRPO, name="selecting", corrections=(Loudest(),))
ALGORITHMS = {**pg.ALGORITHMS, OWN_AGGREGATION.name: OWN_AGGREGATION, SELECTING.name: SELECTING}
FIXED = Shape((4, 1, 3), 5, seed=3, binary=False)
Coefficients = tuple[Tensor, ...]


def rows_of(coef: Coefficients, rows: Tensor, width: int) -> Coefficients:
    return tuple(c[rows][:, :width] for c in coef)


def narrowed(batch: pg.Batch, width: int) -> pg.Batch:
    """The same completions with less padding."""
    fields = {name: getattr(batch, name) for name in PER_TOKEN}
    return replace(batch, **{name: field[:, :width] for name, field in fields.items() if field is not None})


def share(batch: pg.Batch, logits: Tensor, psi: Tensor, algorithm: pg.Algorithm, coef: Coefficients, rows: Tensor):
    """(∂loss/∂θ, objective) of the completions at `rows`, with their padding trimmed."""
    part = batch.select(rows)
    used = algorithm.read_tokens(part).any(0).nonzero()
    width = int(used.max()) + 1 if len(used) else 1
    part, own = narrowed(part, width), rows_of(coef, rows, width)
    logp = policy(logits, part.tokens, algorithm.read_tokens(part))
    out = passed(logp, part)
    loss = pg.surrogate(out, part, psi[rows][:, :width], algorithm, own)
    return gradients(loss, logits)[0], pg.objective(out, part, psi[rows][:, :width], algorithm, own)


def whole(name: str, shape: Shape):
    algorithm = ALGORITHMS[name].with_max_tokens(shape.width)
    batch, logits = make(shape, 0.2, extra_of(algorithm))
    batch = algorithm.apply_filters(batch)
    psi = algorithm.compute_advantages(batch)
    logp = policy(logits, batch.tokens, algorithm.read_tokens(batch))
    by_token, by_parameter = gradients(pg.surrogate(passed(logp, batch), batch, psi, algorithm), logp, logits)
    batch = with_selected_tokens(passed(logp, batch), batch, psi, algorithm)
    coef = algorithm.all_coefficients(batch)
    return algorithm, batch, logits, psi, coef, by_token, by_parameter


def test_shares_of_a_split_add_up() -> None:
    for name in ALGORITHMS:
        with naming(name):
            check_shares(name, FIXED, 3)


@pytest.mark.full
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=5, derandomize=True)
@given(shape=shapes(), parts=st.integers(1, 5))
def test_shares_of_any_split_add_up(name: str, shape: Shape, parts: int) -> None:
    check_shares(name, shape, parts)


def check_shares(name: str, shape: Shape, parts: int) -> None:
    """Micro-batches of any content and any order, on any rank: only whole-step Ψ and coefficients are shared."""
    algorithm, batch, logits, psi, coef, by_token, expected = whole(name, shape)
    owner = Random(shape.seed + 1).integers(parts, len(batch.mask))
    owner = owner[batch.group] if algorithm.gate.requires_full_groups else owner
    order = torch.argsort(Random(shape.seed + 2).uniform(len(batch.mask)))
    shares = [share(batch, logits, psi, algorithm, coef, order[owner[order] == rank]) for rank in range(parts)]
    close(torch.stack([g for g, _ in shares]).sum(0), expected, scale=by_token)
    logp = policy(logits, batch.tokens, algorithm.read_tokens(batch))
    value = pg.objective(passed(logp, batch), batch, psi, algorithm)
    torch.testing.assert_close(torch.stack([v for _, v in shares]).sum(), value, rtol=1e-12, atol=1e-12)


IN_ORDER = {"spiral"}
"""Rows that compare a completion with those before it in the batch: the order is part of the data."""


def test_order_and_names_of_groups_do_not_matter() -> None:
    for name in sorted(ALGORITHMS.keys() - IN_ORDER):
        with naming(name):
            check_other_order(name, FIXED)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - IN_ORDER))
@settings(max_examples=5, derandomize=True)
@given(shape=shapes())
def test_order_and_names_of_groups_do_not_matter_on_random_shapes(name: str, shape: Shape) -> None:
    check_other_order(name, shape)


def check_other_order(name: str, shape: Shape) -> None:
    """Everything, Ψ and coefficients included, is computed anew from permuted completions and renamed groups."""
    algorithm, batch, logits, psi, _, by_token, expected = whole(name, shape)
    order = torch.argsort(Random(shape.seed + 3).uniform(len(batch.mask)))
    shuffled = batch.select(order)
    shuffled = replace(shuffled, group=1000 - 7 * shuffled.group, selected=None)
    second = algorithm.compute_advantages(shuffled)
    close(second, psi[order])
    logp = policy(logits, shuffled.tokens, algorithm.read_tokens(shuffled))
    loss = pg.surrogate(passed(logp, shuffled), shuffled, second, algorithm)
    close(gradients(loss, logits)[0], expected, scale=by_token)


def test_merged_duplicates_with_summed_coefficients() -> None:
    for name, algorithm in ALGORITHMS.items():
        chooses = any(isinstance(part, pg.Downsample) for part in algorithm.filters)  # a fixed number of a prompt's
        if not (algorithm.gate.requires_full_groups or name in IN_ORDER or chooses):
            with naming(name):
                check_merged_duplicates(name)


def check_merged_duplicates(name: str) -> None:
    """Equal completions of one prompt are computed once."""
    algorithm, batch, logits, *_ = whole(name, Shape((3, 4), 5, seed=5, binary=False))
    twice = torch.cat([torch.arange(len(batch.mask)), torch.tensor([0, 0, 3])])
    doubled = algorithm.apply_filters(replace(batch.select(twice), in_statistics=None, selected=None))
    psi = algorithm.compute_advantages(doubled)
    logp = policy(logits, doubled.tokens, algorithm.read_tokens(doubled))
    doubled = with_selected_tokens(passed(logp, doubled), doubled, psi, algorithm)
    coef = algorithm.all_coefficients(doubled)
    by_token, expected = gradients(pg.surrogate(passed(logp, doubled), doubled, psi, algorithm, coef), logp, logits)
    n = len(batch.mask)
    merged = tuple(c[:n].index_add(0, twice[n:], c[n:]) for c in coef)
    close(
        share(doubled.select(torch.arange(n)), logits, psi, algorithm, merged, torch.arange(n))[0], expected, by_token
    )
    assert expected.abs().max() > 0


def test_token_selection_needs_the_full_update() -> None:
    algorithm, batch, logits, psi, coef, *_ = whole("selecting", Shape((3, 4), 5, seed=5, binary=False))
    bare, logp = replace(batch, selected=None), policy(logits, batch.tokens, batch.mask)
    with pytest.raises(pg.ConfigError, match=r"Loudest selects among all tokens of an update.*with_selected_tokens"):
        pg.surrogate(logp, bare, psi, algorithm, coef)
    by_halves = [
        with_selected_tokens(pg.Forward(logp[rows]), bare.select(rows), psi[rows], algorithm).selected
        for rows in (slice(3), slice(3, None))
    ]
    assert not torch.equal(torch.cat(by_halves), batch.selected)  # or the choice would not depend on the update
    with pytest.raises(pg.ConfigError, match="Loudest and Loudest each select tokens"):
        replace(algorithm, corrections=(Loudest(), Loudest()))
    with pytest.raises(pg.ConfigError, match="Loudest selects tokens of one gradient step, and TrustRegion"):
        replace(pg.TRPO, corrections=(Loudest(),))


def test_micro_batch_coefficients_differ_from_the_steps() -> None:
    """The test above can fail: per-micro-batch normalisation gives another gradient."""
    algorithm, batch, logits, psi, _, by_token, expected = whole("grpo", Shape((3, 4), 5, seed=5, binary=False))
    halves = (torch.arange(2), torch.arange(2, len(batch.mask)))
    own = [algorithm.all_coefficients(batch.select(rows)) for rows in halves]
    total = torch.zeros_like(expected)
    for rows, coef in zip(halves, own, strict=True):
        part = batch.select(rows)
        logp = policy(logits, part.tokens, part.mask)
        total = total + gradients(pg.surrogate(logp, part, psi[rows], algorithm, coef), logits)[0]
    assert (total - expected).abs().max() > 0.1 * by_token.abs().max()


def test_a_lone_coefficient_tensor_serves_every_term_without_an_aggregation_of_its_own() -> None:
    batch, logits = make(Shape((3, 4), 5, seed=5, binary=False), 0.2)
    psi, logp = pg.GRPO.compute_advantages(batch), policy(logits, batch.tokens, batch.mask)
    lone = pg.surrogate(logp, batch, psi, pg.GRPO, pg.GRPO.coefficients(batch))
    assert torch.equal(lone, pg.surrogate(logp, batch, psi, pg.GRPO))


def test_a_batch_selects_and_moves_all_of_its_fields() -> None:
    batch, _ = make(Shape((3, 4), 5, seed=5, binary=False), 0.2)
    batch = replace(batch, prompts=(torch.tensor([1, 2]), torch.tensor([3])))
    rows = torch.tensor([4, 1])
    chosen = batch.select(rows).to("cpu")
    assert torch.equal(chosen.group, batch.group[rows])
    assert torch.equal(chosen.mask, batch.mask[rows])
    assert torch.equal(chosen.logp_old.nan_to_num(), batch.logp_old[rows].nan_to_num())  # type: ignore[union-attr,index]
    assert [row.tolist() for row in chosen.prompts or ()] == [[1, 2], [3]]
