"""Links of an advantage chain that mean nothing one after the other are refused; every chain of a row is not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from torch import Tensor

import policygrad as pg
from policygrad.core.base import Advantage
from policygrad.core.chains import ANY, STAGES, find_chain_conflicts


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ((pg.GroupMean(), pg.LeaveOneOut()), "LeaveOneOut takes the reward to go, and after GroupMean Ψ is the reward less a"),
        ((pg.RewardZScores(), pg.GroupMean()), "after RewardZScores Ψ is a number for each completion that is not in the"),
        ((pg.PassAtK(), pg.GroupMean()), "after PassAtK Ψ is a number for each completion that is not in the reward's unit"),
        ((pg.ClassLabels(), pg.GroupMean()), "after ClassLabels Ψ is"),
        ((pg.TeacherLogRatio(), pg.GroupMean()), "after TeacherLogRatio Ψ is a number of its own for each token: keep one"),
        ((pg.GAE(), pg.GroupMean()), "GroupMean takes the reward to go, and after GAE Ψ is a number of its own for each token"),
        ((pg.GAE(), pg.BatchStd()), "BatchStd takes one number for each completion, and after GAE .* or scale by Whiten"),
        ((pg.GroupStd(), pg.GroupMean()), "put GroupMean before GroupStd"),
        ((pg.OptimalBaseline("logits"), pg.BatchStd()), "after OptimalBaseline Ψ is a number of its own for each token"),
        ((pg.GroupMean(), pg.GroupStd(), pg.GroupStd()), "GroupStd takes a reward, with or without a baseline, and after"),
        ((pg.TurnReturn(), pg.GroupStd(), pg.GroupMean()), "after GroupStd Ψ is a number of its own for each token: put GroupMean"),
        ((pg.TurnReturn(), pg.BatchStd()), "after TurnReturn Ψ is the reward to go from each turn: keep one of the two"),
        ((pg.GroupMean(), pg.GAE()), "GAE starts from the rewards and would ignore the links before it"),
        ((pg.LeaveOneOut(), pg.TurnLeaveOneOut()), "TurnLeaveOneOut takes the reward to go or a number of its own for each token"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(type(link).__name__ for link in value),
)  # fmt: skip
def test_a_chain_that_means_nothing_is_refused(chain: tuple[Advantage, ...], message: str) -> None:
    with pytest.raises(pg.ConfigError, match=message):
        replace(pg.GRPO, advantage=chain, critic=pg.Critic() if any("values" in link.needs for link in chain) else None)


@pytest.mark.parametrize(
    "chain",
    [
        (pg.GroupMean(), pg.GroupStd(), pg.BatchStd()),
        (pg.RewardZScores(), pg.BatchStd()),
        (pg.ConstantBaseline(), pg.GroupMean()),
        (pg.OptimalBaseline(), pg.Whiten()),
        (pg.GroupMean(), pg.ConstantBaseline(-0.1), pg.GroupStd()),
        (pg.TurnReturn(), pg.TurnLeaveOneOut(), pg.TurnDiscount()),
        (pg.TurnReturn(), pg.LeaveOneOut()),
        (pg.TurnReturn(), pg.GroupMean(), pg.GroupStd()),
        (pg.LeaveOneOut(), pg.ImplicitProcess(), pg.Whiten()),
        (pg.BatchStd(of="rewards"),),
        (),
    ],
)
def test_other_chains_are_not(chain: tuple[Advantage, ...]) -> None:
    assert [*find_chain_conflicts(chain)] == []


def test_every_row_passes() -> None:
    assert [*{name for name, row in pg.ALGORITHMS.items() if any(find_chain_conflicts(row.advantage))}] == []


@dataclass(frozen=True)
class Halved(Advantage):
    """A link of somebody else's that declares nothing."""

    def __call__(self, psi: Tensor, batch: pg.Batch) -> Tensor:
        return psi / 2


@pytest.mark.parametrize(
    "chain", [(Halved(), pg.GroupMean()), (pg.GAE(), Halved()), (pg.GroupMean(), Halved(), pg.GroupStd())]
)
def test_a_link_that_declares_nothing_leaves_what_it_takes(chain: tuple[Advantage, ...]) -> None:
    assert [*find_chain_conflicts(chain)] == []


def test_what_links_declare_are_stages() -> None:
    for name in pg.parts.__all__:
        kind = getattr(pg.parts, name)
        if isinstance(kind, type) and issubclass(kind, Advantage):
            link = kind()
            assert link.takes <= ANY, name
            assert link.gives is None or link.gives in STAGES, name


def test_the_sampler_is_corrected_once() -> None:
    with pytest.raises(
        pg.ConfigError, match="TruncatedIS and MaskedIS each multiply by ρ = π_old/μ, which would then count twice"
    ):
        replace(pg.GRPO, corrections=(pg.TruncatedIS(), pg.MaskedIS()))
    assert replace(pg.GRPO, corrections=(pg.TruncatedIS(), pg.OffPolicySequenceMask(), pg.HighEntropy())).corrections
