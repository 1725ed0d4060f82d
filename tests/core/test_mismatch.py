"""Rejection by the distance between policy and sampler, and weights with two bounds or the mean 1: numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import policygrad as pg
from policygrad.core.staleness import resolve_old_policy
from policygrad.parts import MismatchMask

LOG = math.log
OLD = torch.tensor([[0.0, 0.0, 0.0], [LOG(2), LOG(0.5), 9.0]], dtype=torch.float64) - 3
SAMPLER = torch.zeros(2, 3, dtype=torch.float64) - 3
SAMPLER[1, 2] = float("nan")
BATCH = pg.Batch(
    mask=torch.tensor([[True, True, True], [True, True, False]]),
    group=torch.zeros(2, dtype=torch.int64),
    reward=torch.tensor([1.0, 0.0], dtype=torch.float64),
    logp_old=OLD,
    logp_sampler=SAMPLER,
)
PSI = torch.ones(2, 3, dtype=torch.float64)


def factor(part: pg.Correction, batch: pg.Batch = BATCH) -> list[list[float]]:
    """The factors of two completions: one of ρ = 1, 1, 1, and one of ρ = 2, ½."""
    first, second = part(pg.Forward(OLD), batch, PSI).tolist()
    return [first, second[:2]]


def test_a_completions_mean_weight_by_hand() -> None:
    """Of min(ρ, 1.5) at ρ = 2 and ½ it is 1, where their product is 1 too and the tokens' own are 1.5 and ½."""
    assert factor(pg.TruncatedIS(1.5, "mean")) == [[1.0] * 3, [1.0] * 2]
    assert factor(pg.TruncatedIS(1.2, "mean")) == [[1.0] * 3, pytest.approx([0.85] * 2)]
    assert factor(pg.TruncatedIS(1.2, "mean", low=0.6)) == [[1.0] * 3, pytest.approx([0.9] * 2)]
    assert pg.TruncatedIS(1.2, "mean", normalise=True).normaliser(BATCH) == pytest.approx((1 + 0.85) / 2)
    assert pg.TruncatedIS(1.2, "mean").formula == "× mean_t min(ρ, 1.2),  ρ = π_old/μ per token"
    shown = replace(BATCH, demonstration=torch.tensor([True, False]))
    assert factor(pg.TruncatedIS(1.2, "mean"), shown) == [[1.0] * 3, pytest.approx([0.85] * 2)]
    with pytest.raises(pg.ConfigError, match=r"TruncatedIS\.level must be 'token' \(each its own\)"):
        pg.TruncatedIS(level="completion")  # type: ignore[arg-type]


def test_which_completions_and_tokens_are_kept() -> None:
    same = [1.0, 1.0, 1.0]
    for part, expected in [
        (MismatchMask(), [1, 1]),  # the geometric mean of 2 and ½ is 1, and so is the product
        (MismatchMask("ratio", "sum"), [1, 1]),
        (MismatchMask("ratio", "any", 1.9), [0, 0]),
        (MismatchMask("ratio", "any", 2.1), [1, 1]),  # the lower bound is 1/2.1
        (MismatchMask("ratio", "token", 1.9, 0.4), [0, 1]),
        (MismatchMask("ratio", "token", 2.1, 0.6), [1, 0]),
        (MismatchMask("k2", "mean", LOG(2) ** 2 / 2 - 1e-9), [0, 0]),
        (MismatchMask("k2", "mean", LOG(2) ** 2 / 2 + 1e-9), [1, 1]),
        (MismatchMask("k3", "token", 0.25), [0, 1]),  # 1 − log 2 = 0.307 and −½ + log 2 = 0.193
        (MismatchMask("k3", "sum", 0.51), [1, 1]),  # ½ together
        (MismatchMask("k3", "sum", 0.49), [0, 0]),
        (MismatchMask("k3", "mean", 0.26), [1, 1]),
        (MismatchMask("tv", "token", 0.04), [0, 1]),  # e^−3 = 0.0498 more, and half of it less
    ]:
        assert factor(part) == [same, expected], part


def test_a_window_follows_the_policy() -> None:
    window = MismatchMask("ratio", "token", 1.5, of="current")
    moved = pg.Forward(SAMPLER + LOG(1.4))
    assert window(moved, BATCH, PSI)[BATCH.mask].tolist() == [1.0] * 5
    assert window(pg.Forward(SAMPLER + LOG(1.6)), BATCH, PSI)[BATCH.mask].tolist() == [0.0] * 5
    assert window.needs == {"logp_sampler"}


def test_denominators_count_all_tokens_or_those_that_are_kept() -> None:
    for denominators, expected in (("all", [0.2] * 5), ("kept", [0.25] * 3 + [0.0, 0.25])):
        mask = MismatchMask("ratio", "token", 1.9, 0.4, denominators=denominators)  # type: ignore[arg-type]
        algorithm = replace(pg.DAPO, corrections=(mask,), terms=(pg.KLToReference(0.1),))
        policy, term = algorithm.all_coefficients(BATCH)
        assert policy[BATCH.mask].tolist() == pytest.approx(expected)
        assert torch.equal(policy, term)


def test_weights_of_mean_one_do_not_rescale_penalties() -> None:
    weights = pg.TruncatedIS(1.5, normalise=True)  # 1, 1, 1, 1.5, 0.5: the mean is 1
    assert weights.normaliser(BATCH) == pytest.approx(1.0)
    assert factor(weights)[1] == pytest.approx([1.5, 0.5])
    bounded = pg.TruncatedIS(1.5, low=0.75, normalise=True)
    assert factor(bounded)[1] == [1.5, 0.75]
    assert bounded.normaliser(BATCH) == pytest.approx(5.25 / 5)
    algorithm = replace(pg.DAPO, corrections=(bounded,), terms=(pg.KLToReference(0.1),))
    policy, term = algorithm.all_coefficients(BATCH)
    assert policy[BATCH.mask].tolist() == pytest.approx([0.2 / 1.05] * 5)
    assert term[BATCH.mask].tolist() == pytest.approx([0.2] * 5)
    sequences = replace(BATCH, logp_old=OLD + torch.tensor([[LOG(2)], [0.0]]))  # products 8 and 1
    assert pg.TruncatedIS(2.0, "sequence", normalise=True).normaliser(sequences) == pytest.approx(1.5)


def test_stale_samples_are_rejected_and_not_reweighted() -> None:
    stale = replace(BATCH, version=torch.zeros(2, 3, dtype=torch.int64))
    mask = replace(pg.DAPO, corrections=(MismatchMask(),))
    assert resolve_old_policy(mask, stale, 2) == (mask, stale)
    both = replace(pg.DAPO, corrections=(MismatchMask(), pg.TruncatedIS(math.inf)))
    assert resolve_old_policy(both, stale, 2) == (both, stale)


def test_the_rejected_fraction_is_measured() -> None:
    assert MismatchMask("ratio", "token", 1.9, 0.4).report(BATCH)["mismatch/rejected"].value == pytest.approx(0.2)
    assert MismatchMask(of="current").report(BATCH) == {}
    assert MismatchMask().report(replace(BATCH, logp_old=None)) == {}


def test_demonstrations_are_never_rejected() -> None:
    shown = replace(BATCH, demonstration=torch.tensor([False, True]))
    for level in ("mean", "sum", "any", "token"):
        assert factor(MismatchMask("k2", level, 0.01), shown)[1] == [1, 1]  # type: ignore[arg-type]


def test_an_empty_batch_keeps_nothing_and_nothing_fails() -> None:
    empty = replace(BATCH, mask=torch.zeros(2, 3, dtype=torch.bool))
    algorithm = replace(pg.DAPO, corrections=(MismatchMask(denominators="kept"), pg.TruncatedIS(normalise=True)))
    assert float(algorithm.coefficients(empty).abs().sum()) == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MismatchMask(high=0.9), r"MismatchMask\.high must be at least 1 with 'ratio'"),
        (lambda: MismatchMask("k3", low=0.5), r"MismatchMask\.low must be None with 'k3', not 0\.5"),
        (lambda: MismatchMask(of="current", denominators="kept"), r"denominators must be 'all' with of='current'"),
        (lambda: pg.TruncatedIS(low=1.5), r"TruncatedIS\.low must be in \[0, 1\]"),
        (
            lambda: replace(pg.DPPO, corrections=(MismatchMask(),)),
            "corrects for π_old/μ, which old_policy='sampler' makes 1",
        ),
    ],
)
def test_refuses(make: object, says: str) -> None:
    with pytest.raises(pg.ConfigError, match=says):
        make()  # type: ignore[operator]
