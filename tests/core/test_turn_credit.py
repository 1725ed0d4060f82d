"""Credit along turns: numbers by hand, what the estimators are in the limit, the critic's targets, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import policygrad as pg
from doubles.paper_variants import multi_turn_gae
from doubles.random_batches import Random, Shape, close, make, shapes
from policygrad.core.turns import Turns
from policygrad.papers.completions import read_batch


def conversation(turns: list[list[tuple[list[float], float]]], outcome: list[float]) -> pg.Batch:
    """Rows of turns (a value for each token, the turn's reward), a tool's token between any two; one group."""
    width = max(sum(len(values) + 1 for values, _ in row) for row in turns)
    mask = torch.zeros(len(turns), width, dtype=torch.bool)
    anchor, (worth, value) = torch.full(mask.shape, 77), torch.full((2, *mask.shape), math.nan, dtype=torch.float64)
    for i, row in enumerate(turns):
        at = 0
        for n, (values, reward) in enumerate(row):
            here = slice(at, at + len(values))
            mask[i, here], anchor[i, here], worth[i, here] = True, n, 0.0
            value[i, here] = torch.tensor(values, dtype=torch.float64)
            worth[i, at + len(values) - 1] = reward
            at += len(values) + 1
    group, reward = torch.zeros(len(turns), dtype=torch.int64), torch.tensor(outcome, dtype=torch.float64)
    return pg.Batch(mask=mask, group=group, reward=reward, turn_state=anchor, token_reward=worth, values=value)


TALK = conversation([[([0.5, 0.25], 1.0), ([2.0, 3.0], 2.0)]], [4.0])
"""Turn rewards 1 and 2, an outcome of 4; V = ½, ¼ and 2, 3; a tool's token in third place."""


def psi(batch: pg.Batch, *links: pg.Advantage) -> Tensor:
    result = torch.zeros_like(batch.mask, dtype=torch.float64)
    for link in links:
        result = link(result, batch)
    return result


def row(batch: pg.Batch, *links: pg.Advantage) -> list[float]:
    """Ψ at the sampled tokens of the first completion."""
    return [float(x) for x in psi(batch, *links)[0][batch.mask[0]]]


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ((pg.TurnReturn(),), [7, 7, 6, 6]),
        ((pg.TurnReturn(0.5),), [1 + 0.5 * 6, 1 + 0.5 * 6, 6, 6]),
        ((pg.TurnReturn(0.0),), [1, 1, 6, 6]),
        ((pg.TurnReturn(0.5), pg.TurnDiscount(0.5)), [4, 4, 3, 3]),
        # δ = 1 + γ·2 − ½ and 6 − 2
        ((pg.TurnGAE(1.0, 0.5),), [2.5 + 0.5 * 4] * 2 + [4, 4]),
        ((pg.TurnGAE(0.5, 0.5),), [1.5 + 0.25 * 4] * 2 + [4, 4]),
        # δ = ¼ − ½, 1 + γ·2 − ¼, 3 − 2, 6 − 3
        ((pg.MultiTurnGAE(1.0, 0.0),), [-0.25, 2.75, 1, 3]),
        ((pg.MultiTurnGAE(1.0, 0.0, 0.5),), [-0.25, 1.75, 1, 3]),
        ((pg.MultiTurnGAE(1.0, 0.5, 0.5),), [-0.25 + 0.5 * (1.75 + 0.25 * 2.5), 1.75 + 0.25 * 2.5, 2.5, 3]),
        # last tokens: δ = 1 + γ·3 − ¼ and 6 − 3
        ((pg.BiLevelGAE(1.0, 0.5, 1.0, 0.0),), [-0.25 + 0.5 * 3.75, 3.75, 1 + 0.5 * 3, 3]),
        ((pg.BiLevelGAE(1.0, 0.5, 0.5, 0.5),), [-0.25 + 0.5 * (2.25 + 0.25 * 3), 2.25 + 0.25 * 3, 2.5, 3]),
    ],
    ids=str,
)
def test_by_hand(links: tuple[pg.Advantage, ...], expected: list[float]) -> None:
    assert row(TALK, *links) == pytest.approx(expected)


def test_outcome_is_shared_by_all_turns() -> None:
    """What a rollout then says: one reward, of the whole episode."""
    uninterrupted = replace(TALK, reward=TALK.reward + 3.0, token_reward=None)
    assert (
        replace(pg.GRPO, advantage=(), terms=()).compute_advantages(uninterrupted)[0][TALK.mask[0]].tolist()
        == [7.0] * 4
    )


def test_siblings_are_compared_turn_by_turn() -> None:
    """Returns (7, 6), (3, 1), (2): first turns less the mean of the others' first ones, second ones less each other's."""
    talks = [[([0.0], 1.0), ([0.0], 2.0)], [([0.0], 2.0), ([0.0, 0.0], 1.0)], [([0.0], 2.0)]]
    batch = conversation(talks, [4.0, 0.0, 0.0])
    result = psi(batch, pg.TurnReturn(), pg.TurnLeaveOneOut())
    assert [float(x) for x in result[batch.mask]] == [7 - 2.5, 6 - 1, 3 - 4.5, 1 - 6, 1 - 6, 2 - 5]
    lonely = psi(replace(batch, group=torch.tensor([0, 1, 1])), pg.TurnReturn(), pg.TurnLeaveOneOut())
    assert [float(x) for x in lonely[batch.mask]] == [7, 6, 3 - 2, 1, 1, 2 - 3]  # with nobody to compare with: 0


def test_equal_returns_give_exactly_zero() -> None:
    third = conversation([[([0.0], 0.1)]] * 4, [0.2] * 4)
    assert not psi(third, pg.TurnReturn(), pg.TurnLeaveOneOut()).any()


def silent(shape: Shape, values: float | None = None) -> pg.Batch:
    """A random batch of turns, with V the same everywhere where it is given."""
    batch, _ = make(shape, extra="turns")
    known = torch.where(batch.mask.any(1), batch.reward, 0.0)
    batch = replace(batch, reward=known)
    return batch if values is None else replace(batch, values=torch.full(batch.mask.shape, values, dtype=torch.float64))


@settings(max_examples=25, derandomize=True)
@given(shape=shapes(max_width=8))
def test_without_a_critic_it_is_the_reward_to_go(shape: Shape) -> None:
    """V = 0, λ = γ = 1: each of the three is the sum of what comes, which within a turn is the turn's."""
    batch = silent(shape, 0.0)
    to_go = psi(batch, pg.TurnReturn())
    for link in (pg.TurnGAE(lam=1.0), pg.MultiTurnGAE(lam=1.0), pg.BiLevelGAE(lam=1.0, turn_lam=1.0)):
        close(psi(batch, link), to_go, tolerance=1e-12)
    close(psi(batch, pg.TurnGAE(0.8, 1.0)), psi(batch, pg.TurnReturn(0.8)), tolerance=1e-12)


@settings(max_examples=25, derandomize=True)
@given(shape=shapes(max_width=8))
def test_one_turn_is_the_sequence(shape: Shape) -> None:
    """No two turns: the return is the completion's reward, and GAE at both levels is GAE over tokens."""
    batch = silent(shape)
    mask = torch.arange(shape.width) < batch.lengths[:, None]
    values = torch.where(mask, Random(shape.seed).normal(*mask.shape), math.nan)
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    batch = replace(batch, mask=mask, values=values, turn_state=nothing.long(), token_reward=nothing)
    assert torch.equal(psi(batch, pg.TurnReturn(0.3)), torch.where(mask, batch.reward[:, None], 0.0))
    assert torch.equal(psi(batch, pg.TurnReturn(), pg.TurnDiscount(0.1)), psi(batch, pg.TurnReturn()))
    close(psi(batch, pg.BiLevelGAE(0.9, 0.8, 0.3, 0.2)), psi(batch, pg.GAE(0.9, 0.8)), tolerance=1e-12)
    less = torch.where(mask, batch.reward[:, None] - values[:, :1], 0.0)
    close(psi(batch, pg.TurnGAE(0.3, 0.2)), less, tolerance=1e-12)


@settings(max_examples=25, derandomize=True)
@given(shape=shapes(max_width=8))
def test_turn_and_token_levels_agree_where_they_should(shape: Shape) -> None:
    """Without a discount per turn tokens' GAE is GAE; at λ = 1 both levels are it; at a turn's first token, λ = 1 over tokens is
    λ = 1 over turns."""
    batch = silent(shape)
    assert torch.equal(psi(batch, pg.MultiTurnGAE(0.9, 0.8)), psi(batch, pg.GAE(0.9, 0.8)))
    close(psi(batch, pg.BiLevelGAE(lam=1.0, turn_lam=1.0)), psi(batch, pg.GAE(lam=1.0)), tolerance=1e-12)
    first = Turns.of(batch, None).first
    close(psi(batch, pg.MultiTurnGAE(1.0, 1.0, 0.7))[first], psi(batch, pg.TurnGAE(0.7, 1.0))[first], tolerance=1e-12)


@settings(max_examples=25, derandomize=True)
@given(shape=shapes(max_width=8))
def test_the_critic_is_fitted_to_what_the_advantage_discounts(shape: Shape) -> None:
    """R = A + V literally; with λ = 1 the return that is discounted per turn, at every token of the turn."""
    batch = silent(shape)
    result = pg.Critic(gamma=0.95, lam=0.6, turn_gamma=0.7).targets(batch)
    for i in batch.mask.any(1).nonzero().flatten().tolist():
        ((o,),) = read_batch(batch.select(torch.tensor([i])), torch.zeros(1, shape.width).double())
        A = torch.tensor(multi_turn_gae(o, 0.95, 0.6, 0.7), dtype=torch.float64)
        torch.testing.assert_close(
            result[i][batch.mask[i]], A + torch.tensor(o.value, dtype=torch.float64), rtol=0, atol=1e-12
        )
    returns = pg.Critic(lam=1.0, turn_gamma=0.7).targets(batch)
    torch.testing.assert_close(returns, psi(batch, pg.TurnReturn(0.7)), rtol=0, atol=1e-12)


def test_truncated_episode_bootstraps_from_the_critic() -> None:
    """V(end) = 8: the last turn is worth 6 + γ·8 less its value."""
    cut = replace(TALK, bootstrap=torch.tensor([8.0], dtype=torch.float64))
    assert row(cut, pg.TurnGAE(0.5, 0.0, bootstrap=True))[2:] == [6 + 4 - 2] * 2
    assert row(cut, pg.MultiTurnGAE(lam=0.0, turn_gamma=0.5, bootstrap=True))[3] == 6 + 4 - 3
    assert row(cut, pg.BiLevelGAE(turn_gamma=0.5, turn_lam=0.0, bootstrap=True))[3] == 6 + 4 - 3
    for link in (pg.TurnGAE(bootstrap=True), pg.MultiTurnGAE(bootstrap=True), pg.BiLevelGAE(bootstrap=True)):
        assert link.needs == {"values", "turn_state", "token_reward", "bootstrap"}
        with pytest.raises(pg.ConfigError, match=rf"{type(link).__name__} needs Batch\.bootstrap"):
            psi(TALK, link)


@pytest.mark.parametrize("link", [pg.TurnReturn(), pg.TurnGAE(), pg.MultiTurnGAE(), pg.BiLevelGAE()], ids=str)
def test_a_batch_without_a_token_has_no_credit(link: pg.Advantage) -> None:
    nobody = replace(TALK, mask=torch.zeros_like(TALK.mask))
    assert not psi(nobody, link).any()
    assert psi(nobody.select(torch.zeros(0, dtype=torch.int64)), link).shape == (0, TALK.mask.shape[1])


@pytest.mark.parametrize(
    ("make_it", "says"),
    [
        (lambda: pg.TurnReturn(1.1), "TurnReturn.gamma must be in"),
        (lambda: pg.TurnDiscount(-0.1), "TurnDiscount.gamma must be in"),
        (lambda: pg.TurnGAE(lam=2.0), "TurnGAE.lam must be in"),
        (lambda: pg.MultiTurnGAE(turn_gamma=2.0), "MultiTurnGAE.turn_gamma must be in"),
        (lambda: pg.BiLevelGAE(turn_lam=-1.0), "BiLevelGAE.turn_lam must be in"),
        (lambda: pg.Critic(turn_gamma=1.5), "Critic.turn_gamma must be in"),
        (lambda: replace(pg.GRPO, advantage=(pg.TurnGAE(),)), "an advantage needs values, and critic is None"),
        (
            lambda: replace(pg.PPO, advantage=(pg.TurnGAE(0.9),)),
            r"TurnGAE discounts by 0.9 per turn .* by 1, .* turn_gamma=0.9",
        ),
        (
            lambda: replace(pg.PPO, critic=pg.Critic(turn_gamma=0.9)),
            "GAE discounts by 1 per turn and the critic's targets by 0.9",
        ),
        (lambda: replace(pg.GRPO, advantage=(pg.GroupMean(), pg.TurnReturn())), "TurnReturn starts from the rewards"),
        (
            lambda: replace(
                pg.GRPO, advantage=(pg.TurnReturn(), pg.TurnLeaveOneOut()), filters=(pg.MaskTruncated(True),)
            ),
            "the advantage compares turns, and a masked completion has none",
        ),
        (lambda: psi(replace(TALK, turn_state=None), pg.TurnReturn()), r"TurnReturn needs Batch\.turn_state"),
        (lambda: psi(replace(TALK, token_reward=None), pg.TurnGAE()), r"TurnGAE needs Batch\.token_reward"),
        (lambda: psi(replace(TALK, values=None), pg.BiLevelGAE()), r"BiLevelGAE needs Batch\.values"),
    ],
)
def test_what_is_refused(make_it: Callable[[], object], says: str) -> None:
    with pytest.raises(pg.ConfigError, match=says):
        make_it()


def test_mask_truncated_with_turn_returns() -> None:
    """Only what compares turns needs them of everybody."""
    replace(pg.GRPO, advantage=(pg.TurnReturn(),), filters=(pg.MaskTruncated(True),))
    assert replace(pg.PPO, advantage=(pg.TurnGAE(0.9),), critic=pg.Critic(turn_gamma=0.9)).all_needs >= {
        "turn_state",
        "token_reward",
    }
    assert pg.Critic().needs == frozenset()
