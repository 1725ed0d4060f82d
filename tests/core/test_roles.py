"""Parts of one's own: what inherits its role's base or declares all of it is taken, anything else refused when it is built."""

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
from policygrad.core.validation import _MEANS, ROLES


class Duck:
    """A gate that inherits nothing and says nothing but what it does."""

    def weight(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return ratio

    def value(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return ratio * psi


class Whole(Duck):
    """The same, with all that a gate says."""

    needs: frozenset[str] = frozenset()
    group_statistic, length, on_policy, token_ratio, whole_groups, formula = False, 0, False, False, False, "r"
    select_needs: frozenset[str] = frozenset()

    def init(self) -> None:
        return None

    def at(self, state: Any) -> Whole:
        return self

    def update(self, state: Any, batch: pg.Batch, metrics: Any) -> Any:
        return state

    def report(self, batch: pg.Batch) -> Metrics:
        return {}

    def clipped(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> None:
        return None

    def select(self, out: Any, batch: pg.Batch, psi: Tensor) -> Tensor:
        return batch.mask


class OfTwo(pg.Gate):
    """A gate that asks for less than it is called with."""

    def weight(self, ratio: Tensor, psi: Tensor) -> Tensor:  # type: ignore[override]
        return ratio

    def value(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return ratio * psi


class Unfinished(pg.Gate):
    """A gate without its value."""

    def weight(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return ratio


class Silent(pg.Term):
    """A term without anything."""


class Doubled(pg.Advantage):
    """An advantage that reads what `fields` names."""

    def __init__(self, fields: Any) -> None:
        self.needs = fields  # type: ignore[misc]

    def __call__(self, psi: Tensor, batch: pg.Batch) -> Tensor:
        return 2 * psi


class Curious(pg.LossTerm):
    """A loss term that reads a quantity which no forward pass gives."""

    forward_needs = frozenset({"entropies"})

    def objective(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        return out.logp


class Plain:
    """Called, and of no role."""

    def __call__(self, *given: Any) -> Any:
        return given[0]


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a gate that says nothing": (
        lambda: replace(pg.GRPO, gate=Duck()),  # type: ignore[arg-type]
        ["Duck, as a gate, does not say", "class Duck(policygrad.Gate)", "or declare it"],
    ),
    "a function-like advantage": (
        lambda: replace(pg.GRPO, advantage=(Plain(),)),  # type: ignore[arg-type]
        ["Plain, as an advantage, does not say", "class Plain(policygrad.Advantage)"],
    ),
    "a method that is not written": (
        lambda: replace(pg.GRPO, gate=Unfinished()),
        ["Unfinished is a gate without value()", "base.Gate"],
    ),
    "a method with other arguments": (
        lambda: replace(pg.GRPO, gate=OfTwo()),
        ["OfTwo.weight takes (ratio, psi), and a gate is called with (ratio, psi, batch)"],
    ),
    "a term that is not written": (lambda: replace(pg.GRPO, terms=(Silent(),)), ["without score(), value()"]),
    "a gate among the advantages": (
        lambda: replace(pg.GRPO, advantage=(pg.Clip(),)),  # type: ignore[arg-type]
        ["Clip(low=0.2, high=0.2) is not an advantage", "It is a gate: put it into gate"],
    ),
    "a ratio as a gate": (
        lambda: replace(pg.GRPO, gate=pg.Token()),  # type: ignore[arg-type]
        ["Token() is not a gate", "It is a ratio: put it into ratio"],
    ),
    "a filter as shaping": (
        lambda: replace(pg.GRPO, shaping=(pg.MaskTruncated(),)),  # type: ignore[arg-type]
        ["is not reward shaping", "It is a filter: put it into filters"],
    ),
    "an update rule as a critic": (
        lambda: replace(pg.GRPO, critic=pg.GradientSteps()),  # type: ignore[arg-type]
        ["is not a critic", "It is an update rule: put it into step"],
    ),
    "a field that there is not": (
        lambda: replace(pg.GRPO, advantage=(Doubled({"logp_reff"}),)),
        ["Doubled.needs names 'logp_reff'", "no field of Batch: did you mean 'logp_ref'?"],
    ),
    "a word in place of a set": (
        lambda: replace(pg.GRPO, advantage=(Doubled("logp_ref"),)),
        ["Doubled.needs is a set of names", "not 'logp_ref'"],
    ),
    "a quantity that no forward pass gives": (
        lambda: replace(pg.GRPO, terms=(Curious(),)),
        ["Curious.forward_needs names 'entropies'", "no field of Forward: did you mean 'entropy'?"],
    ),
}


@pytest.mark.parametrize(("build", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(build: Callable[[], Any], said: list[str]) -> None:
    with pytest.raises(pg.ConfigError) as error:
        build()
    assert [words for words in said if words not in str(error.value)] == []


def test_each_attribute_that_is_left_out_is_named_with_what_it_means() -> None:
    """Whole is a gate for want of nothing; without any one of what it says it is none."""
    batch, _ = make(Shape((1,), 1, seed=0, binary=True))
    assert replace(pg.GRPO, gate=Whole()).gate.weight(torch.ones(1, 1), torch.ones(1, 1), batch) == 1  # type: ignore[arg-type]
    for name in (
        "needs",
        "group_statistic",
        "select",
        "select_needs",
        "length",
        "formula",
        "init",
        "update",
        "at",
        "report",
        "on_policy",
        "token_ratio",
        "whole_groups",
        "clipped",
    ):

        class Lacking(Whole):
            def __getattribute__(self, asked: str, missing: str = name) -> Any:
                if asked == missing:
                    raise AttributeError(asked)
                return super().__getattribute__(asked)

        with pytest.raises(pg.ConfigError) as error:
            replace(pg.GRPO, gate=Lacking())  # type: ignore[arg-type]
        assert f"Lacking, as a gate, does not say {name} ({_MEANS[name]})" in str(error.value)


def test_what_a_part_may_declare_has_a_meaning_to_show() -> None:
    settings = {"critic", "reference", "reward_model"}  # whose bases are the parts themselves
    for field_, role in ROLES.items():
        for base in role.bases if field_ not in settings else ():
            written = {n for n in dir(base) if getattr(getattr(base, n), "__isabstractmethod__", False)}
            assert {n for n in dir(base) if not n.startswith("_")} - written - _MEANS.keys() == set(), base


@dataclass(frozen=True)
class Momentum(pg.Advantage):
    """Ψ − the last rollout's mean, with a memory that a base keeps nothing of."""

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


def test_a_users_part_remembers_too() -> None:
    algorithm = replace(pg.REINFORCE, advantage=(pg.BatchMean(), Momentum()))
    batch, _ = make(Shape((4,), 3, seed=1, binary=True))
    state = algorithm.update_state(algorithm.init_state(), batch)
    mean = float(batch.reward[batch.counted].mean())
    assert state == {"advantage.1": {"seen": mean}}
    moved = algorithm.with_state(state).compute_advantages(batch) - algorithm.compute_advantages(batch)
    torch.testing.assert_close(moved[batch.mask], torch.full_like(moved[batch.mask], -0.5 * mean))


@dataclass(frozen=True)
class Budgeted(pg.Aggregation):
    """A user's aggregation with an open length."""

    length: int | None = None

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        return mask.double() / (self.length or 1)


def test_an_open_length_of_a_users_part_is_the_budget() -> None:
    algorithm = replace(
        pg.GRPO, aggregation=Budgeted(), terms=(pg.KLToReference(aggregation=Budgeted()),)
    ).with_max_tokens(32)
    assert algorithm.aggregation.length == 32
    (term,) = algorithm.terms
    assert term.aggregation == Budgeted(32)
    assert pg.TokenMean().length == 0


class Gradients:
    """A learner's problem that knows gradients alone."""

    def split(self, epoch: int, minibatches: int) -> list[Gradients]:
        return [self] * minibatches

    def accumulate(self) -> Metrics:
        return {}

    def descend(self) -> Metrics:
        return {}


def test_an_update_rule_asks_for_the_piece_that_it_needs() -> None:
    assert isinstance(Gradients(), pg.GradientProblem)
    assert pg.GradientSteps(2, 2)(Gradients()) == {}
    with pytest.raises(
        pg.ConfigError, match=r"TrustRegion asks .* CurvatureProblem, and Gradients lacks .*fisher.*GradientSteps"
    ):
        pg.TrustRegion()(Gradients())
    with pytest.raises(
        pg.ConfigError, match=r"DualDescent asks .* AdaptiveProblem, and Gradients lacks adapted, measured:"
    ):
        pg.DualDescent()(Gradients())

    @dataclass
    class Owned:
        learner: object

    class TheirLearner:
        pass

    with pytest.raises(pg.ConfigError, match="GradientProblem, and TheirLearner lacks accumulate, descend, split"):
        pg.GradientSteps()(Owned(TheirLearner()))
