"""The lab's conversations: probabilities, J by going through the game, the batch that a rollout would make, and brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import policygrad as pg
from policygrad.lab.episodes import ConversationSetting, ConversationWorld, EpisodeTree, Walk
from policygrad.lab.findings.advantages import exact_figures, with_advantage
from policygrad.lab.findings.critics import COMPARED, FAMILIES, UNBIASED
from policygrad.lab.policies import TabularPolicy
from policygrad.lab.sequences import EOS, derivative
from policygrad.lab.worlds import walk_setting
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec, Segment, Trajectory
from policygrad.rollout.turn_states import add_turn_states
from policygrad.tasks.base import Example

SETTING = walk_setting()
TREE = SETTING.world.tree


def test_the_episodes_by_hand() -> None:
    """From the start: wait, step, leap (half the time through the door). In the next room: wait, step, leap, both through it."""
    assert EpisodeTree(length=3).size == 4
    assert EpisodeTree(length=6).size == 4 + 3 + 1 + 4
    assert TREE.size == 30
    short = EpisodeTree(length=3)
    assert [e.actions for e in short.episodes] == [(EOS, -1), (1, EOS, -1), (1, 1, -1), (1, 1, -2)]
    assert [e.outcome for e in short.episodes] == [0, 0, 1, 0]
    assert short.total().tolist() == pytest.approx([-0.1, 0.5, 0.5 - 0.3 + 1, -0.3])
    assert short.mask.tolist() == [[True, False, False], *[[True, True, False]] * 3]
    with pytest.raises(pg.ConfigError, match="must be a multiple of that, not 7"):
        EpisodeTree(length=7)


def test_a_discount_per_turn_by_hand() -> None:
    """Wait, step, step: −0.1, half of 0.5, and two turns on a quarter of 0.5 + 1."""
    (patient,) = (e for e in TREE.episodes if e.actions == (EOS, -1, 1, EOS, -1, 1, EOS, -1))
    at = TREE.episodes.index(patient)
    assert float(TREE.total(0.5)[at]) == pytest.approx(-0.1 + 0.25 + 0.375)
    assert TREE.turn_state[at].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0]


def test_probabilities_add_up_and_j_is_the_games() -> None:
    """J by recursion over the game, the policy asked history by history; the enumeration is never looked at."""
    chance = SETTING.world.logp(SETTING.theta).exp()
    assert float(chance.sum()) == pytest.approx(1.0, abs=1e-14)
    assert float(chance.min()) > 0
    policy = SETTING.world.conditionals(SETTING.theta).exp()
    where = {prefix: i for i, prefix in enumerate(TREE.prefixes)}

    def value(history: tuple[int, ...], room: int, left: int) -> float:
        first, total = policy[where[history]], 0.0
        second = policy[where[(*history, 1)]]
        for word, p in (((), first[EOS]), ((1,), first[1] * second[EOS]), ((1, 1), first[1] * second[1])):
            tokens = (*word, EOS)[:2]
            for which, answer in enumerate(Walk().transitions(room, word)):
                later = (*history, *tokens, -1 - which)
                more = 0.0 if answer.state is None or left == 1 else value(later, answer.state, left - 1)
                total += float(p) * answer.probability * (answer.reward + answer.outcome + more)
        return total

    assert float(SETTING.world.objective(SETTING.theta)) == pytest.approx(value((), 0, 3), abs=1e-13)


def trajectories() -> list[Trajectory]:
    """Every episode as a rollout would have played it."""
    result = []
    for e in TREE.episodes:
        turns = [list(group) for _, group in itertools.groupby(range(len(e.actions)), key=lambda t: e.turn[t])]
        segments = []
        for columns in turns:
            tokens = torch.tensor([e.actions[t] for t in columns[:-1]])
            segments += [Segment(tokens, torch.zeros(len(tokens))), Segment(torch.tensor([0]))]
        rewards = tuple(e.reward[columns[-2]] for columns in turns)
        states = tuple(e.state[columns[0]] for columns in turns)
        result.append(
            Trajectory(
                tuple(segments[:-1]),
                "",
                False,
                turn_rewards=rewards,
                turn_states=states,
                reward=sum(rewards) + e.outcome,
            )
        )
    return result


def test_the_enumerated_batch_equals_a_rollout_s() -> None:
    """Mask, rewards, turn rewards, and which turns begin alike: by the production path from trajectories."""
    start = EpisodeSpec(Example("walk"), (0, TRAIN, 1, 0), 9)
    groups = [EpisodeGroup(start, torch.tensor([0]), tuple(trajectories()))]
    algorithm = with_advantage(pg.TurnReturn())
    book, plain = SETTING.enumerate_batch(algorithm), SETTING.enumerate_batch(with_advantage())
    made = batch_groups(groups)
    width = made.mask.shape[1]
    assert torch.equal(plain.mask[:, :width], made.mask)
    assert not plain.mask[:, width:].any()
    torch.testing.assert_close(plain.reward, made.reward.double(), rtol=0, atol=1e-6)  # a rollout's are float32
    made = add_turn_states(made, groups, scored=True)
    assert made.token_reward is not None
    assert made.turn_state is not None
    torch.testing.assert_close(book.token_reward[:, :width], made.token_reward.double(), rtol=0, atol=1e-6)  # type: ignore[index]
    torch.testing.assert_close(book.reward, made.reward.double(), rtol=0, atol=1e-6)
    pairs = torch.stack([book.turn_state[:, :width][made.mask], made.turn_state[made.mask]], 1)  # type: ignore[index]
    assert len(pairs.unique(dim=0)) == len(pairs[:, 0].unique()) == len(pairs[:, 1].unique()) == 2
    psi = algorithm.compute_advantages(book)[:, :width]
    torch.testing.assert_close(psi, algorithm.compute_advantages(made).double(), rtol=0, atol=1e-6)


def test_values_are_those_of_what_follows() -> None:
    """A critic without error is E[R_n | history]: after the first turn it forgets what that turn earned."""
    book = SETTING.enumerate_batch(with_advantage(pg.TurnGAE()))
    chance = SETTING.world.logp(SETTING.theta).exp().flatten()
    to_go = pg.TurnReturn()(torch.zeros_like(book.mask, dtype=torch.float64), book)
    assert book.values is not None
    for prefix, state in ((p, i) for i, p in enumerate(TREE.prefixes) if p in {(), (EOS, -1), (1, 1, -2)}):
        here = (SETTING.world.state == state) & book.mask
        row, column = here.nonzero(as_tuple=True)
        expected = float((chance[row] * to_go[row, column]).sum() / chance[row].sum())
        assert float(book.values[row[0], column[0]]) == pytest.approx(expected, abs=1e-13), prefix


def brute(algorithm: pg.Algorithm, size: int) -> torch.Tensor:
    """E g by the library's own calls, one ordered group at a time, in a walk of two turns."""
    setting = walk_setting(turns=2)
    algorithm = setting.prepare(algorithm)
    book, chance = setting.enumerate_batch(algorithm), setting.world.logp(setting.theta).exp().flatten()
    total = torch.zeros_like(setting.theta)
    for group in itertools.product(range(len(book.mask)), repeat=size):
        rows = torch.tensor(group)
        batch = replace(book.select(rows), group=torch.zeros(size, dtype=torch.int64))
        theta = setting.theta.clone().requires_grad_()
        out = pg.Forward(setting.world.token_logp(theta)[rows])
        loss = pg.surrogate(out, batch, algorithm.compute_advantages(batch), algorithm)
        total = total - float(chance[rows].prod()) * torch.autograd.grad(loss, theta)[0]
    return total


@pytest.mark.parametrize("name", ["TurnReturn, TurnLeaveOneOut", pytest.param("LeaveOneOut", marks=pytest.mark.full)])
def test_siblings_are_unbiased_by_brute_force(name: str) -> None:
    world, theta = walk_setting(turns=2).world, walk_setting(turns=2).theta
    truth = derivative(lambda x: (world.logp(x).exp() * world.tree.total()).sum(), theta)
    torch.testing.assert_close(brute(with_advantage(*UNBIASED[name]), 2), truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_theorems_about_unbiased_estimators(seed: int) -> None:
    """No bias where none is claimed: whatever the critic at λ = 1, at any λ where it is exact; and one where we say so."""
    setting = walk_setting(seed=seed)
    for psi in UNBIASED.values():
        assert exact_figures(with_advantage(*psi), setting, 2).bias < 1e-12
    assert exact_figures(with_advantage(*COMPARED["GroupInGroup(std=False)"]), setting, 2).bias > 1e-2
    erring = replace(setting, critic_error=0.5, seed=seed)
    for level, made in FAMILIES.items():
        assert exact_figures(with_advantage(made(1.0)), erring, 1).bias < 1e-12
        assert exact_figures(with_advantage(made(0.0)), erring, 1).bias > 1e-2
        exact = exact_figures(with_advantage(made(0.3)), setting, 1).bias
        assert exact > 1e-2 if level == "both" else exact < 1e-12


def test_both_levels_are_unbiased_where_turns_are_equally_long() -> None:
    """One token a turn: nobody chooses which is the last."""
    tree = EpisodeTree(vocabulary=3, length=6, turn_tokens=1)
    setting = ConversationSetting(
        ConversationWorld(tree, tree.total()[None], TabularPolicy(tree)), TabularPolicy(tree).initial(0)
    )
    for link in (pg.BiLevelGAE(lam=0.3, turn_lam=0.6), pg.TurnGAE(lam=0.6), pg.MultiTurnGAE(lam=0.6)):
        assert exact_figures(with_advantage(link), setting, 1).bias < 1e-12
