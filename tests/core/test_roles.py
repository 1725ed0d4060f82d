"""Custom parts: they must inherit the base of their role, may keep state and have an open length; update rules need protocols."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Shape, make
from policygrad.core.metrics import Metrics


class Uninherited:
    """A gate in everything but its base class."""

    def weight(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return ratio

    def value(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return ratio * psi


class TwoArguments(pg.Gate):
    def weight(self, ratio: Tensor, psi: Tensor) -> Tensor:  # type: ignore[override]
        return ratio

    def value(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return ratio * psi


class NoValue(pg.Gate):
    def weight(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return ratio


class EmptyTerm(pg.Term):
    pass


class Doubled(pg.Advantage):
    """An advantage that needs `fields`."""

    def __init__(self, fields: Any) -> None:
        self.needs = fields  # type: ignore[misc]

    def __call__(self, psi: Tensor, batch: pg.Batch) -> Tensor:
        return 2 * psi


class UnknownOutput(pg.LossTerm):
    forward_needs = frozenset({"entropies"})

    def objective(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        return out.logp


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a gate without a base": (
        lambda: replace(pg.GRPO, gate=Uninherited()),  # type: ignore[arg-type]
        ["is not a gate: a part in gate inherits policygrad.Gate"],
    ),
    "a function as an advantage": (
        lambda: replace(pg.GRPO, advantage=(len,)),  # type: ignore[arg-type]
        ["is not an advantage: a part in advantage inherits policygrad.Advantage"],
    ),
    "an object as a term": (
        lambda: replace(pg.GRPO, terms=(3,)),  # type: ignore[arg-type]
        ["3 is not a term: a part in terms inherits policygrad.Term or policygrad.LossTerm"],
    ),
    "a missing method": (lambda: replace(pg.GRPO, gate=NoValue()), ["NoValue is a gate without value()", "base.Gate"]),
    "a method with other arguments": (
        lambda: replace(pg.GRPO, gate=TwoArguments()),
        ["TwoArguments.weight takes (ratio, psi), and a gate is called with (ratio, psi, batch)"],
    ),
    "a term without methods": (lambda: replace(pg.GRPO, terms=(EmptyTerm(),)), ["without score(), value()"]),
    "a gate among the advantages": (
        lambda: replace(pg.GRPO, advantage=(pg.Clip(),)),  # type: ignore[arg-type]
        ["Clip(low=0.2, high=0.2, c=None) is not an advantage but a gate: put it into gate"],
    ),
    "a ratio as a gate": (
        lambda: replace(pg.GRPO, gate=pg.Token()),  # type: ignore[arg-type]
        ["Token() is not a gate but a ratio: put it into ratio"],
    ),
    "a filter as shaping": (
        lambda: replace(pg.GRPO, shaping=(pg.MaskTruncated(),)),  # type: ignore[arg-type]
        ["is not reward shaping but a filter: put it into filters"],
    ),
    "an update rule as a critic": (
        lambda: replace(pg.GRPO, critic=pg.GradientSteps()),  # type: ignore[arg-type]
        ["is not a critic but an update rule: put it into update_rule"],
    ),
    "an unknown batch field": (
        lambda: replace(pg.GRPO, advantage=(Doubled({"logp_reff"}),)),
        ["Doubled.needs contains 'logp_reff'", "not a field of Batch: did you mean 'logp_ref'?"],
    ),
    "a string instead of a set": (
        lambda: replace(pg.GRPO, advantage=(Doubled("logp_ref"),)),
        ["Doubled.needs must be a set of names", "not 'logp_ref'"],
    ),
    "an unknown output field": (
        lambda: replace(pg.GRPO, terms=(UnknownOutput(),)),
        ["UnknownOutput.forward_needs contains 'entropies'", "not a field of Forward: did you mean 'entropy'?"],
    ),
}


@pytest.mark.parametrize(("build", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_part_is_refused_with_reason_and_remedy(build: Callable[[], Any], expected: list[str]) -> None:
    with pytest.raises(pg.ConfigError) as error:
        build()
    assert [text for text in expected if text not in str(error.value)] == []


@dataclass(frozen=True)
class Momentum(pg.Advantage):
    """Ψ − the last rollout's mean reward, which is the part's state."""

    share: float = 0.5
    seen: float = field(default=0.0, repr=False)

    def init_state(self) -> dict[str, Any]:
        return {"seen": 0.0}

    def update_state(self, state: dict[str, Any], batch: pg.Batch, metrics: Any) -> dict[str, Any]:
        return {"seen": float(batch.reward[batch.counted].mean())}

    def with_state(self, state: dict[str, Any]) -> Momentum:
        return replace(self, seen=state["seen"])

    def __call__(self, psi: Tensor, batch: pg.Batch) -> Tensor:
        return psi - self.share * self.seen


def test_custom_part_keeps_state() -> None:
    algorithm = replace(pg.REINFORCE, advantage=(pg.BatchMean(), Momentum()))
    batch, _ = make(Shape((4,), 3, seed=1, binary=True))
    state = algorithm.update_state(algorithm.init_state(), batch)
    mean = float(batch.reward[batch.counted].mean())
    assert state == {"advantage.1": {"seen": mean}}
    moved = algorithm.with_state(state).compute_advantages(batch) - algorithm.compute_advantages(batch)
    torch.testing.assert_close(moved[batch.mask], torch.full_like(moved[batch.mask], -0.5 * mean))


@dataclass(frozen=True)
class Budgeted(pg.Aggregation):
    """An aggregation with an open length."""

    length: int | None = None

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        return mask.double() / (self.length or 1)


def test_open_length_of_a_custom_part_is_set_to_the_budget() -> None:
    algorithm = replace(
        pg.GRPO, aggregation=Budgeted(), terms=(pg.KLToReference(aggregation=Budgeted()),)
    ).with_max_tokens(32)
    assert algorithm.aggregation.length == 32
    (term,) = algorithm.terms
    assert term.aggregation == Budgeted(32)
    assert pg.TokenMean().length == 0


class Gradients:
    """A learner's problem with gradients only."""

    def split(self, epoch: int, minibatches: int) -> list[Gradients]:
        return [self] * minibatches

    def accumulate(self) -> Metrics:
        return {}

    def descend(self) -> Metrics:
        return {}


def test_update_rule_names_the_methods_that_a_learner_lacks() -> None:
    assert isinstance(Gradients(), pg.GradientProblem)
    assert pg.GradientSteps(2, 2)(Gradients()) == {}
    with pytest.raises(
        pg.ConfigError, match=r"TrustRegion needs CurvatureProblem, and Gradients lacks .*fisher.*GradientSteps"
    ):
        pg.TrustRegion()(Gradients())
    with pytest.raises(pg.ConfigError, match=r"DualDescent needs AdaptiveProblem, and Gradients lacks adapt, measure:"):
        pg.DualDescent()(Gradients())

    @dataclass
    class Problem:
        learner: object

    class OtherLearner:
        pass

    with pytest.raises(pg.ConfigError, match="GradientProblem, and OtherLearner lacks accumulate, descend, split"):
        pg.GradientSteps()(Problem(OtherLearner()))


def test_state_is_applied_without_validating_the_algorithm_again(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = replace(pg.REINFORCE, terms=(pg.KLToReference(target=0.01),))
    state = algorithm.init_state() | {"terms.0": {"beta": 0.5}}
    monkeypatch.setattr(
        "policygrad.core.algorithm.validate_algorithm", lambda algorithm: pytest.fail("validated again")
    )
    moved = algorithm.with_state(state)
    assert isinstance(moved, pg.Algorithm)
    assert moved.terms == (pg.KLToReference(beta=0.5, target=0.01),)
    assert algorithm.terms == (pg.KLToReference(target=0.01),)
