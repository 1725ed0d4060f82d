"""What a part returns is checked where it is called: another shape, no tensor, NaN, and a part that is not frozen name the part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Shape, make
from policygrad.core.batch import Batch, Forward
from policygrad.core.objective import measure_forward

ROWS = 4


@dataclass(frozen=True)
class PerCompletion(pg.Advantage):
    """[B] in the place of [B, T]."""

    def __call__(self, psi: Tensor, batch: pg.Batch) -> Tensor:
        return batch.reward


@dataclass(frozen=True)
class Nothing(pg.Advantage):
    """A forgotten return."""

    def __call__(self, psi: Tensor, batch: pg.Batch) -> Tensor:
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class ByZero(pg.Advantage):
    """NaN wherever the batch is not empty."""

    def __call__(self, psi: Tensor, batch: pg.Batch) -> Tensor:
        return psi * 0 / 0


@dataclass(frozen=True)
class ReadsReference(pg.Advantage):
    """A sum with the reference's log-probabilities."""

    needs = frozenset({"logp_ref"})

    def __call__(self, psi: Tensor, batch: pg.Batch) -> Tensor:
        assert batch.logp_ref is not None
        return psi + batch.logp_ref


@dataclass(frozen=True)
class FlatGate(pg.Gate):
    """A weight and a value per completion."""

    weight_too: bool = True

    def weight(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return ratio[:, 0] if self.weight_too else ratio

    def value(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return ratio[:, 0]


@dataclass(frozen=True)
class FlatRatio(pg.Ratio):
    """One ratio per completion."""

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return log_ratio.sum(1).exp()


@dataclass(frozen=True)
class FlatTerm(pg.Term):
    """One score per completion."""

    def score(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        return batch.reward

    def value(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        return out.logp


@dataclass(frozen=True)
class FlatLoss(pg.LossTerm):
    """One loss per completion."""

    def objective(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        return out.logp.sum(1)


@dataclass(frozen=True)
class FlatCorrection(pg.Correction):
    """One factor per completion."""

    def __call__(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        return torch.ones_like(batch.reward)


@dataclass(frozen=True)
class FlatAggregation(pg.Aggregation):
    """One coefficient per completion."""

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        return mask.double().sum(1)


@dataclass(frozen=True)
class Rewards(pg.Shaping):
    """A tensor in the place of a batch."""

    def __call__(self, batch: pg.Batch) -> pg.Batch:
        return batch.reward  # type: ignore[return-value]


@dataclass(frozen=True)
class Endless(pg.Shaping):
    """Rewards that are not finite."""

    def __call__(self, batch: pg.Batch) -> pg.Batch:
        return replace(batch, reward=batch.reward / 0)


@dataclass(frozen=True)
class Half(pg.Filter):
    """Fewer rows than it was given."""

    def __call__(self, batch: pg.Batch) -> pg.Batch:
        return batch.select(torch.arange(2))


def square(width: int = ROWS) -> Batch:
    """Completions, all of them sampled to their last token: as many as tokens each where `width` is theirs."""
    random = torch.Generator().manual_seed(3)
    mask = torch.ones(ROWS, width, dtype=torch.bool)
    draw = torch.randn(ROWS, width, generator=random, dtype=torch.float64)
    reward = torch.tensor([1.0, 0.0, 1.0, 0.25], dtype=torch.float64)
    return Batch(mask=mask, group=torch.tensor([0, 0, 1, 1]), reward=reward, logp_old=draw, logp_ref=draw)


def loss(algorithm: pg.Algorithm, batch: Batch) -> Tensor:
    psi = replace(algorithm, advantage=()).compute_advantages(batch)
    out = torch.zeros_like(psi).requires_grad_()
    return pg.surrogate(out, batch, psi, algorithm)


BASE = replace(pg.GRPO, terms=())
SHAPES: dict[str, tuple[Callable[[Batch], Any], str]] = {
    "advantage": (lambda b: replace(BASE, advantage=(PerCompletion(),)).compute_advantages(b), "PerCompletion"),
    "gate": (lambda b: loss(replace(BASE, gate=FlatGate()), b), r"FlatGate\.weight"),
    "ratio": (lambda b: loss(replace(BASE, ratio=FlatRatio()), b), "FlatRatio"),
    "term": (lambda b: loss(replace(BASE, terms=(FlatTerm(),)), b), r"FlatTerm\.score"),
    "loss term": (lambda b: loss(replace(BASE, terms=(FlatLoss(),)), b), r"FlatLoss\.objective"),
    "correction": (lambda b: loss(replace(BASE, corrections=(FlatCorrection(),)), b), "FlatCorrection"),
    "aggregation": (lambda b: loss(replace(BASE, aggregation=FlatAggregation()), b), "FlatAggregation"),
}


@pytest.mark.parametrize("width", [ROWS, ROWS + 3], ids=["as many completions as tokens", "more tokens"])
@pytest.mark.parametrize(("call", "name"), SHAPES.values(), ids=SHAPES.keys())
def test_a_part_that_returns_one_number_per_completion_is_named_with_both_shapes(
    call: Callable[[Batch], Any], name: str, width: int
) -> None:
    """Where B = T, [B] would broadcast along the tokens, and nobody would see it."""
    says = rf"^{name} returned shape \[{ROWS}\], expected \[B, T\] = \[{ROWS}, {width}\].*value\[:, None\]\.expand"
    with pytest.raises(pg.ConfigError, match=says):
        call(square(width))


def test_a_gate_whose_value_alone_has_another_shape_is_named_by_the_metrics() -> None:
    batch, algorithm = square(), replace(BASE, gate=FlatGate(weight_too=False))
    out = Forward(torch.zeros(ROWS, ROWS, dtype=torch.float64))
    with pytest.raises(pg.ConfigError, match=r"^FlatGate\.value returned shape \[4\]"):
        measure_forward(out, batch, BASE.compute_advantages(batch), algorithm, algorithm.all_coefficients(batch))


def test_a_part_that_returns_nothing_is_named() -> None:
    with pytest.raises(pg.ConfigError, match=r"^Nothing returned None, expected a tensor \[B, T\] = \[4, 4\]"):
        replace(BASE, advantage=(Nothing(),)).compute_advantages(square())


def test_shaping_that_returns_no_batch_is_named() -> None:
    with pytest.raises(pg.ConfigError, match=r"^Rewards returned a Tensor, expected a Batch: .*replace\(batch, reward"):
        replace(BASE, shaping=(Rewards(),)).compute_advantages(square())


def test_filter_that_removes_rows_is_named() -> None:
    with pytest.raises(
        pg.ConfigError, match=r"^Half returned a batch of shape \[2, 4\], expected .*set its mask to False"
    ):
        replace(BASE, filters=(Half(),)).apply_filters(square())


@pytest.mark.parametrize("chain", [(ByZero(), pg.GroupMean()), (pg.GroupMean(), ByZero(), pg.GroupStd())])
def test_nan_advantages_name_the_link_that_made_them(chain: tuple[pg.Advantage, ...]) -> None:
    """Every link after it returns NaN too."""
    with pytest.raises(pg.NumericsError) as caught:
        replace(BASE, advantage=chain).compute_advantages(square())
    place = f"advantage.{chain.index(ByZero())}"
    assert str(caught.value).startswith(
        f"ByZero in {place} returned NaN or infinite numbers although all its inputs are"
    )
    assert caught.value.part == "ByZero"


def test_nan_input_is_named_instead_of_the_link() -> None:
    batch = square()
    assert batch.logp_ref is not None
    broken = replace(batch, logp_ref=batch.logp_ref / 0)
    with pytest.raises(
        pg.NumericsError, match=r"^ReadsReference in advantage\.0 .*Batch\.logp_ref, which it reads, contains such"
    ):
        replace(BASE, advantage=(ReadsReference(),)).compute_advantages(broken)


def test_rewards_that_shaping_made_infinite_name_the_shaping() -> None:
    with pytest.raises(pg.NumericsError, match=r"^Endless in shaping\.0 returned NaN or infinite numbers although"):
        replace(BASE, shaping=(Endless(),)).compute_advantages(square())


def test_nan_off_the_mask_is_ignored() -> None:
    """Padding may hold anything, in what a part returns as in a batch."""

    @dataclass(frozen=True)
    class OffTheMask(pg.Advantage):
        def __call__(self, psi: Tensor, batch: pg.Batch) -> Tensor:
            return psi.masked_fill(~batch.mask, float("nan"))

    batch, _ = make(Shape((3, 4), 5, seed=2, binary=True))
    psi = replace(BASE, advantage=(OffTheMask(),)).compute_advantages(batch)
    assert bool(psi.isfinite().all())
    assert bool((psi[~batch.mask] == 0).all())


def test_a_part_that_is_a_dataclass_and_not_frozen_is_refused_when_the_algorithm_is_built() -> None:
    @dataclass
    class Loose(pg.Gate):
        width: float = 0.2

        def weight(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
            return ratio

        def value(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
            return ratio * psi

    with pytest.raises(pg.ConfigError, match=r"^Loose in gate is a dataclass that is not frozen, .*above class Loose"):
        replace(pg.GRPO, gate=Loose())
