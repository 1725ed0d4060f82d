"""Beside each group the page says how its advantages came about, where the algorithm's parts can say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import policygrad as pg
from policygrad import parts
from policygrad.core.advantages import reward_to_go
from policygrad.core.base import Advantage, format_term
from policygrad.report.advantages import explain_group, load_chain

REWARDS = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0)


def logged(chain: Sequence[Advantage], rewards: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of completions.jsonl, with the advantages that the parts compute."""
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    batch = pg.Batch(mask=mask, group=torch.zeros(len(rewards), dtype=torch.long), reward=torch.tensor(rewards))
    psi = reward_to_go(batch)
    for link in chain:
        psi = link(psi, batch)
    return [{"reward": r, "advantage": a} for r, a in zip(rewards, psi[:, 0].tolist(), strict=True)]


def test_a_z_score_is_explained_by_mean_and_deviation() -> None:
    chain = (parts.GroupMean(), parts.GroupStd())
    found = explain_group(chain, logged(chain, REWARDS))
    assert found is not None
    assert [(name, format_term(value)) for name, value in found.facts] == [("mean", "0.375"), ("deviation", "0.518")]
    assert found.expressions[:2] == ("(1 − 0.375)/0.518", "(0 − 0.375)/0.518")
    assert found.values[0] == pytest.approx(0.625 / math.sqrt(15 / 56), abs=1e-3)


@pytest.mark.parametrize(
    ("chain", "expression"),
    [
        ((parts.LeaveOneOut(),), "(1 − 0.286)"),
        ((parts.GroupMean(), parts.DivideByGroupMean()), "(1 − 0.375)/0.375"),
        ((parts.GroupMean(), parts.ConstantBaseline(-0.1)), "((1 − 0.375) + 0.1)"),
    ],
)
def test_other_links_say_their_arithmetic(chain: tuple[Advantage, ...], expression: str) -> None:
    found = explain_group(chain, logged(chain, REWARDS))
    assert found is not None
    assert found.expressions[0] == expression


def test_what_the_rewards_alone_do_not_tell_is_not_explained() -> None:
    chain = (parts.GroupMean(), parts.BatchStd())
    assert explain_group(chain, logged(chain, REWARDS)) is None  # a statistic of the batch
    chain = (parts.GroupMean(),)
    rows = logged(chain, REWARDS)
    assert explain_group(chain, [rows[0] | {"advantage": 0.1}, *rows[1:]]) is None  # a shaped reward
    assert explain_group(chain, [rows[0] | {"reward": None}, *rows[1:]]) is None  # a failed one
    assert explain_group(chain, rows[:3]) is None  # a part of the group


def test_code_of_the_users_is_not_imported_for_a_page() -> None:
    own = [{"part": "GroupMean", "within": "group"}]
    assert load_chain({"algorithm": {"advantage": own}}) == (parts.GroupMean(),)
    assert load_chain({"algorithm": {"advantage": [*own, {"part": "mine:Mine"}]}}) == ()
    assert load_chain({"algorithm": {"advantage": [{"part": "GroupMean", "within": "nothing"}]}}) == ()
