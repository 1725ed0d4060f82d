"""Baselines by role: by hand, against exact enumeration of a matrix game, and what is refused of samples of several roles."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from policygrad.core.batch_checks import find_mixed_roles

ROLES = ("first", "second")
GRPO_AMONG_PEERS = replace(pg.GRPO, advantage=(pg.GroupMean(within="peers"), pg.GroupStd(within="peers")))


def batch_of(rewards: list[float], roles: list[int], **fields: Tensor) -> pg.Batch:
    """One token per completion, all of one prompt."""
    return pg.Batch(
        mask=torch.ones(len(rewards), 1, dtype=torch.bool),
        group=torch.zeros(len(rewards), dtype=torch.int64),
        reward=torch.tensor(rewards, dtype=torch.float64),
        role=torch.tensor(roles),
        role_names=ROLES,
        **fields,
    )


def psi_of(batch: pg.Batch, *links: pg.Advantage) -> list[float]:
    values: list[float] = pg.Algorithm(advantage=links).compute_advantages(batch)[:, 0].tolist()
    return values


RAE = pg.RunningMean(0.5, by="role", per="sample")


def test_each_completion_is_compared_with_those_of_its_role_before_it() -> None:
    """Decay ½: the first role's means are 0, ½, ¼; the second's 0, −½."""
    batch = batch_of([1.0, -1.0, 0.0, 1.0, 1.0], [0, 1, 0, 0, 1])
    assert psi_of(batch, RAE) == [1.0, -1.0, -0.5, 0.75, 1.5]
    state = RAE.update_state(RAE.init_state(), batch, {})
    assert state == {"means": {"first": 0.625, "second": 0.25}, "counts": {"first": 1, "second": 1}}


def test_a_running_mean_by_role_changes_once_per_rollout() -> None:
    link = pg.RunningMean(0.5, by="role")
    batch = batch_of([1.0, -1.0, 0.0, 1.0], [0, 1, 0, 1])
    assert psi_of(batch, link) == [1.0, -1.0, 0.0, 1.0]
    state = link.update_state(link.init_state(), batch, {})
    assert state["means"] == {"first": 0.5, "second": 0.0}
    assert psi_of(batch, link.with_state(state)) == [0.5, -1.0, -0.5, 1.0]


def test_the_order_of_the_paper_is_a_smaller_step_in_the_same_direction() -> None:
    """Algorithm 1 updates b before it subtracts: R − (α b + (1 − α) R) = α (R − b)."""
    rewards, roles, decay = [1.0, -1.0, 0.0, 0.5, 1.0, -1.0], [0, 1, 0, 1, 0, 1], 0.95
    b, paper = {0: 0.0, 1: 0.0}, []
    for R, role in zip(rewards, roles, strict=True):
        b[role] = decay * b[role] + (1 - decay) * R
        paper.append(R - b[role])
    here = psi_of(batch_of(rewards, roles), pg.RunningMean(decay, by="role", per="sample"))
    assert paper == pytest.approx([decay * a for a in here], rel=1e-12)


@settings(max_examples=30)
@given(
    rows=st.lists(st.tuples(st.floats(-2, 2), st.integers(0, 1), st.booleans()), min_size=2, max_size=12),
    share=st.floats(0, 1),
)
def test_a_rollout_in_two_halves_has_the_same_advantages(rows: list[tuple[float, int, bool]], share: float) -> None:
    """The state, which JSON holds, is all that the second half needs of the first; what does not count changes nothing."""
    rewards, roles, counts = map(list, zip(*rows, strict=True))
    batch = replace(batch_of(rewards, roles), mask=torch.tensor(counts)[:, None])
    everything = psi_of(batch, RAE)
    cut = int(share * len(rows))
    first, second = batch.select(torch.arange(cut)), batch.select(torch.arange(cut, len(rows)))
    state = json.loads(json.dumps(RAE.update_state(RAE.init_state(), first, {})))
    halves = [*(psi_of(first, RAE) if cut else []), *(psi_of(second, RAE.with_state(state)) if cut < len(rows) else [])]
    assert halves == everything
    end = RAE.update_state(state, second, {})["means"]
    assert end == RAE.update_state(RAE.init_state(), batch, {})["means"]


# A matrix game: both players choose one of two actions at the same time; the second gets the opposite reward. The first is ahead.

PAYOFF = torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float64)
GAMES = 3


def gradients_of(link: pg.Advantage, logits: Tensor, state: dict[str, object] | None) -> tuple[Tensor, Tensor]:
    """Return the mean gradient over all rollouts of three games, weighted by their probabilities, and its total variance."""
    link = link if state is None else link.with_state(state)
    p = logits.softmax(1)  # [role, action]
    score = torch.eye(2, dtype=torch.float64) - p[:, None, :]  # ∂ log π(a)/∂ logits, [role, action, 2]
    mean, square = torch.zeros_like(p), torch.zeros((), dtype=torch.float64)
    for actions in product(range(2), repeat=2 * GAMES):  # first, second, first, …
        pairs = [(actions[2 * n], actions[2 * n + 1]) for n in range(GAMES)]
        rewards = [r for a, b in pairs for r in (float(PAYOFF[a, b]), -float(PAYOFF[a, b]))]
        psi = psi_of(batch_of(rewards, [0, 1] * GAMES), link)
        probability = torch.stack([p[0, a] * p[1, b] for a, b in pairs]).prod()
        g = torch.zeros_like(p)
        for i, a in enumerate(actions):
            g[i % 2] += psi[i] * score[i % 2, a] / GAMES
        mean, square = mean + probability * g, square + probability * g.square().sum()
    return mean, square - mean.square().sum()


def test_role_conditioned_advantages_are_unbiased_and_have_less_variance() -> None:
    logits = torch.tensor([[0.3, -0.2], [-0.4, 0.1]], dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    p = leaf.softmax(1)
    value = p[0] @ PAYOFF @ p[1].detach() - p[0].detach() @ PAYOFF @ p[1]  # each role's own reward
    (true,) = torch.autograd.grad(value, leaf)
    center = float(logits.softmax(1)[0] @ PAYOFF @ logits.softmax(1)[1])
    near = {"means": {"first": center, "second": -center}, "counts": {}}
    rae, alone = pg.RunningMean(0.95, by="role", per="sample"), pg.RunningMean(0.95)
    cases = {"none": (alone, None), "from 0": (rae, None), "by role": (rae, near)}
    mean, variance = {}, {}
    for name, (link, state) in cases.items():
        mean[name], variance[name] = gradients_of(link, logits, state)
        torch.testing.assert_close(mean[name], true, rtol=0, atol=1e-12)
    # one mean of both roles is 0, whatever the policies do: it is no baseline at all
    assert variance["by role"] < variance["from 0"] < variance["none"]
    assert variance["by role"] < 0.5 * variance["none"]


# Comparison among peers.


def test_solvers_are_compared_on_one_problem_and_proposers_with_each_other() -> None:
    """The example of prime-rl's documentation: three attempts [1, 1, 0] at one problem have ⅓, ⅓, −⅔, whatever the others got."""
    rewards = [0.2, 1.0, 1.0, 0.0, 0.6, 0.0, 0.0, 1.0]  # proposer and three solvers, twice
    peers = torch.tensor([0, 1, 1, 1, 0, 2, 2, 2])
    batch = batch_of(rewards, [0, 1, 1, 1] * 2, peers=peers)
    third = 1 / 3
    assert psi_of(batch, pg.GroupMean(within="peers")) == pytest.approx(
        [-0.2, third, third, -2 * third, 0.2, -third, -third, 2 * third], abs=1e-12
    )
    assert psi_of(batch, pg.LeaveOneOut(within="peers")) == pytest.approx(
        [-0.4, 0.5, 0.5, -1.0, 0.4, -0.5, -0.5, 1.0], abs=1e-12
    )


def test_without_peers_there_is_nothing_to_compare() -> None:
    batch = batch_of([1.0, 0.0, 1.0], [0, 1, 1], peers=torch.tensor([0, 1, 2]))
    for link in (pg.GroupMean(within="peers"), pg.LeaveOneOut(within="peers")):
        assert psi_of(batch, link) == [0.0, 0.0, 0.0]


def test_peers_of_two_prompts_are_not_compared() -> None:
    batch = batch_of([1.0, 0.0, 3.0, 7.0], [0, 0, 0, 0], peers=torch.zeros(4, dtype=torch.int64))
    batch = replace(batch, group=torch.tensor([0, 0, 1, 1]))
    assert psi_of(batch, pg.GroupMean(within="peers")) == [0.5, -0.5, -2.0, 2.0]
    assert psi_of(batch, pg.GroupStd(0.0, within="peers")) == pytest.approx([2**0.5, 0.0, 3 / 8**0.5, 7 / 8**0.5])


@pytest.mark.parametrize("name", ["grpo", "rloo", "dapo", "gigpo", "remax", "opo", "passk"])
def test_players_of_one_game_are_not_compared(name: str) -> None:
    """The message names the part, the reason, and two remedies."""
    batch = batch_of([1.0, -1.0, -1.0, 1.0], [0, 1, 0, 1])
    with pytest.raises(pg.ConfigError, match=r"zero-sum game.*use algorithm spiral.*group-mean.within peers"):
        pg.ALGORITHMS[name].compute_advantages(replace(batch, peers=batch.role))


@pytest.mark.parametrize(
    "algorithm", [pg.SPIRAL, pg.REINFORCE, pg.PPO, GRPO_AMONG_PEERS], ids=lambda algorithm: algorithm.name
)
def test_other_baselines_fit_several_roles(algorithm: pg.Algorithm) -> None:
    assert find_mixed_roles(algorithm) == ""


def test_samples_of_one_role_are_compared_as_ever() -> None:
    batch = batch_of([1.0, 0.0], [1, 1], logp_ref=torch.zeros(2, 1))
    assert pg.GRPO.compute_advantages(batch)[:, 0].tolist() == pytest.approx([0.7071, -0.7071], abs=2e-4)


def test_a_role_needs_a_name() -> None:
    with pytest.raises(pg.ConfigError, match=r"Batch.role has the number 2, and Batch.role_names has 2 names"):
        batch_of([1.0], [2])


@pytest.mark.parametrize("field", ["by", "per"])
def test_settings_of_the_running_mean_are_checked(field: str) -> None:
    with pytest.raises(pg.ConfigError, match=rf"RunningMean.{field} must be"):
        pg.RunningMean(**{field: "game"})


def test_what_it_is_compared_within_is_checked() -> None:
    with pytest.raises(pg.ConfigError, match=r"GroupMean.within must be 'group'.*or 'peers'"):
        pg.GroupMean(within="role")  # type: ignore[arg-type]
