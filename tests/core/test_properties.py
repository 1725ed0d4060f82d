"""Properties of coefficients, reductions and metrics on random input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Shape, close, make, shapes
from policygrad.core import masked
from policygrad.core.metrics import Max, Mean, Metrics, Min, Sum, masked_mean, merge

QUICK = settings(max_examples=40, derandomize=True)
Total = Callable[[Tensor, Tensor], float]  # (mask, group) -> what the coefficients sum to


def completions(mask: Tensor) -> int:
    return int(mask.any(1).sum())


TOTALS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Total]] = {
    "sequence sum": (pg.SequenceSum(), lambda m, g: float(m.sum()) / completions(m)),
    "sequence mean": (pg.SequenceMean(), lambda m, g: 1.0),
    "token mean": (pg.TokenMean(), lambda m, g: 1.0),
    "group token mean": (pg.GroupTokenMean(), lambda m, g: 1.0),
    "fixed length": (pg.FixedLength(9), lambda m, g: float(m.sum()) / (9 * completions(m))),
    "fixed length, open": (pg.FixedLength(), lambda m, g: float(m.sum()) / (m.shape[1] * completions(m))),
}


@pytest.mark.parametrize(("aggregate", "total"), TOTALS.values(), ids=TOTALS.keys())
@QUICK
@given(shape=shapes(max_groups=5, max_size=5, max_width=8))
def test_coefficients_sum_to_their_total(aggregate, total: Total, shape: Shape) -> None:
    batch, _ = make(shape)
    c = aggregate(batch.mask, batch.group)
    assert c.dtype == torch.float64
    assert (c[~batch.mask] == 0).all()
    expected = total(batch.mask, batch.group) if batch.mask.any() else 0.0
    assert c.sum().item() == pytest.approx(expected, rel=1e-14)


@QUICK
@given(shape=shapes(max_groups=5, max_size=5, max_width=8))
def test_coefficients_are_shared_as_documented(shape: Shape) -> None:
    """Each completion's share is 1/B under the sequence mean, each prompt's 1/#groups under the group token mean."""
    batch, _ = make(shape)
    mask, group = batch.mask, batch.group
    if not mask.any():
        return
    by_completion = pg.SequenceMean()(mask, group).sum(1)[mask.any(1)]
    torch.testing.assert_close(by_completion, torch.full_like(by_completion, 1 / completions(mask)))
    prompts = group[mask.any(1)].unique()
    share = pg.GroupTokenMean()(mask, group)
    for prompt in prompts:
        assert share[group == prompt].sum().item() == pytest.approx(1 / len(prompts), rel=1e-14)
    tokens = pg.GroupTokenMean()(mask, group)[(group == prompts[0])[:, None] & mask]
    assert (tokens == tokens[0]).all()


@QUICK
@given(shape=shapes(max_groups=5, max_size=5, max_width=8))
def test_group_power_scales_each_group_by_a_power_of_its_size(shape: Shape) -> None:
    batch, _ = make(shape)
    plain = pg.SequenceSum()(batch.mask, batch.group)
    root = pg.SequenceSum(group_power=0.5)(batch.mask, batch.group)
    for g in batch.group.unique():
        size = int(batch.mask[batch.group == g].any(1).sum())
        torch.testing.assert_close(root[batch.group == g], plain[batch.group == g] * math.sqrt(size))


CENTRED = {"leave-one-out": (pg.LeaveOneOut(),), "mean": (pg.GroupMean(),), "z": (pg.GroupMean(), pg.GroupStd())}


@pytest.mark.parametrize("chain", CENTRED.values(), ids=CENTRED.keys())
@QUICK
@given(shape=shapes(max_groups=5, max_size=5, max_width=8), shift=st.sampled_from([-8.0, 0.5, 4.0]))
def test_group_baselines_are_centred_and_do_not_see_a_shift(chain, shape: Shape, shift: float) -> None:
    batch, _ = make(shape)
    algorithm = pg.Algorithm(advantage=chain)
    psi = masked.first_valid(algorithm.compute_advantages(batch), batch.mask)
    sums = torch.zeros(len(shape.groups), dtype=torch.float64).index_add(0, batch.group, psi)
    assert sums.abs().max() < 1e-12
    moved = algorithm.compute_advantages(replace(batch, reward=batch.reward + shift))
    close(masked.first_valid(moved, batch.mask), psi, tolerance=1e-11)


@QUICK
@given(shape=shapes(max_groups=5, max_size=5, max_width=8))
def test_ragged_reductions_agree_with_loops(shape: Shape) -> None:
    batch, _ = make(shape)
    x, keep = batch.reward, batch.mask.any(1)
    groups = masked.Groups(batch.group, keep)
    for i, g in enumerate(batch.group.tolist()):
        members = x[(batch.group == g) & keep]
        assert groups.size[i] == len(members)
        if len(members) > 1:
            assert groups.mean(x)[i].item() == pytest.approx(members.mean().item(), rel=1e-12, abs=1e-12)
            assert groups.std(x, 1)[i].item() == pytest.approx(members.std().item(), rel=1e-9, abs=1e-12)
        assert bool(groups.is_constant(x)[i]) == (len(members) == 0 or bool((members == members[0]).all()))
    to_go = masked.reverse_cumsum(batch.mask.double())
    assert torch.equal(to_go[:, 0], batch.lengths.double())


METRICS = {"mean": Mean, "sum": Sum, "max": Max, "min": Min}
numbers = st.integers(-(2**20), 2**20).map(float)  # sums of them are exact


@st.composite
def metrics(draw: st.DrawFn) -> Metrics:
    made: Metrics = {}
    for name, kind in METRICS.items():
        if draw(st.booleans()):
            made[name] = Mean(draw(numbers), draw(st.integers(0, 9))) if kind is Mean else kind(draw(numbers))
    return made


@QUICK
@given(a=metrics(), b=metrics(), c=metrics())
def test_merging_is_associative_and_commutative_with_a_neutral_element(a: Metrics, b: Metrics, c: Metrics) -> None:
    assert merge(merge(a, b), c) == merge(a, merge(b, c)) == merge(a, b, c)
    assert merge(a, b) == merge(b, a)
    assert merge(a, {}) == merge({}, a) == a


@QUICK
@given(values=st.lists(numbers, min_size=1, max_size=12), cut=st.integers(0, 12))
def test_merged_shares_equal_the_total(values: list[float], cut: int) -> None:
    """No mean of means: unequal shares weigh by what they counted."""
    x = torch.tensor(values, dtype=torch.float64)
    where = torch.ones_like(x, dtype=torch.bool)
    parts = [masked_mean(part[None], keep[None]) for part, keep in ((x[:cut], where[:cut]), (x[cut:], where[cut:]))]
    assert merge(*({"x": part} for part in parts))["x"].value == pytest.approx(sum(values) / len(values), abs=1e-9)


def test_the_mean_counts_only_true_positions() -> None:
    x = torch.tensor([[1.0, 9.0], [4.0, math.nan]])
    where = torch.tensor([[True, False], [True, False]])
    assert masked_mean(x, where).value == 2.5
    assert Mean(0.0, 0).value == 0.0
