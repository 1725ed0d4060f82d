"""A part states what it does not fit in its own class; validation asks, and needs no line for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from torch import Tensor

import policygrad as pg
from policygrad.core.base import Filter, Gate
from policygrad.core.validation import check_rollout, check_sampling


@dataclass(frozen=True)
class Tempered(Gate):
    """A gate of a package of somebody else's, with rules of its own and no call of super()."""

    def weight(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return ratio.sqrt()

    def value(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return 2 * ratio.sqrt() * psi

    def find_conflicts(self, algorithm: pg.Algorithm) -> Iterator[str]:
        if algorithm.critic is not None:
            yield "Tempered has no use for a critic: set critic=None"

    def find_run_conflicts(self, algorithm: pg.Algorithm) -> Iterator[str]:
        if algorithm.update_rule.updates > 2:
            yield "Tempered drifts after two updates: set update_rule=GradientSteps(2)"

    def find_sampling_conflicts(self, samples_per_prompt: int, temperature: float) -> Iterator[str]:
        if temperature > 1:
            yield "Tempered was derived for temperatures up to 1: lower sampling.temperature"


TEMPERED = replace(pg.GRPO, name="tempered", gate=Tempered())


def test_an_algorithm_refuses_what_a_part_objects_to() -> None:
    with pytest.raises(pg.ConfigError, match="Tempered has no use for a critic: set critic=None"):
        replace(TEMPERED, advantage=(pg.GAE(),), critic=pg.Critic())


def test_a_run_refuses_what_a_part_objects_to_there_alone() -> None:
    check_rollout(TEMPERED)
    drifting = replace(TEMPERED, update_rule=pg.GradientSteps(3))  # built: a custom loop may
    with pytest.raises(pg.ConfigError, match="Tempered drifts after two updates"):
        check_rollout(drifting)
    check_sampling(TEMPERED, samples_per_prompt=4, temperature=1.0)
    with pytest.raises(pg.ConfigError, match="Tempered was derived for temperatures up to 1"):
        check_sampling(TEMPERED, samples_per_prompt=4, temperature=1.5)


def test_the_rules_of_a_parts_bases_hold_although_it_states_some_of_its_own() -> None:
    with pytest.raises(pg.ConfigError, match="Tempered needs a ratio, and ratio is None"):
        replace(TEMPERED, ratio=None)

    @dataclass(frozen=True)
    class Last(pg.Downsample):
        def find_conflicts(self, algorithm: pg.Algorithm) -> Iterator[str]:
            yield from ()

    with pytest.raises(pg.ConfigError, match="put it last in filters"):
        replace(pg.GRPO, filters=(Last(), pg.MaskTruncated()))


@dataclass(frozen=True)
class HalvedToken(pg.Ratio):
    per_token: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return (log_ratio / 2).exp()


@dataclass(frozen=True)
class KeepBest(Filter):
    chooses_by_reward: ClassVar[bool] = True

    def __call__(self, batch: pg.Batch) -> pg.Batch:
        return batch


def test_rules_ask_what_a_part_declares_and_not_which_class_it_is() -> None:
    gate = pg.SecondMomentFilter()
    assert replace(pg.GRPO, gate=gate, ratio=HalvedToken()).gate is gate
    with pytest.raises(pg.ConfigError, match="SecondMomentFilter needs per-token ratios, and ratio is Sequence"):
        replace(pg.GRPO, gate=gate, ratio=pg.Sequence())
    process = replace(pg.GRPO_PROCESS, advantage=(pg.ProcessReward(outcome=False),))
    with pytest.raises(pg.ConfigError, match="KeepBest filters by the outcome's reward"):
        replace(process, filters=(KeepBest(),))
