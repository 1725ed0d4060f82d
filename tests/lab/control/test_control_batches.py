"""Classic control: what is collected from vector environments, and the advantages over its boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg
from doubles.control import DISCRETE, RUNNING, SCRIPT, TERMINATED, TRUNCATED, Scripted, zeros
from policygrad.lab.control.environments import Collector, Experience
from policygrad.lab.control.train import ControlLearner, Settings, evaluate_control, find_preset


def test_a_rollout_as_rows() -> None:
    collect = Collector(Scripted(SCRIPT), seed=0)
    result = collect(zeros, 6)
    batch = result.batch
    assert batch.lengths.tolist() == [2, 3, 1, 4, 2]
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [False, True, True, False, True]
    assert batch.group.tolist() == [0, 1, 2, 3, 4]
    states = [row[mask].squeeze(1).tolist() for row, mask in zip(result.observation, batch.mask, strict=True)]
    assert states == [[0, 1], [2, 3, 4], [5], [100, 101, 102, 103], [104, 105]]
    assert result.after.squeeze(1).tolist() == [2.5, 5.5, 6, 104.5, 106]
    assert batch.token_reward is not None
    assert torch.allclose(batch.token_reward, result.observation.squeeze(2) / 10)
    assert batch.reward.tolist() == [0] * 5
    assert result.steps == 12
    assert result.finished == pytest.approx((0.1, 40.6, 0.9))  # in the order in which they ended
    second = collect(zeros, 2)  # the episodes go on, and their returns count from their first step
    assert second.observation[0, 0] == 6
    assert second.finished == pytest.approx((0.5 + 0.6 + 0.7,))


def test_full_episodes_start_new_and_are_finished() -> None:
    environments = Scripted(SCRIPT)
    result = Collector(environments, seed=0)(zeros, 3, full_episodes=True)
    assert result.batch.lengths.tolist() == [2, 3, 4]
    assert result.batch.truncated is not None
    assert result.batch.truncated.tolist() == [False, True, False]
    assert result.steps == 10  # environment 1 waited a step for the other, which counts
    assert result.finished == pytest.approx((0.1, 40.6, 0.9))
    collect = Collector(environments, seed=0)
    before = environments.resets
    collect(zeros, 3, full_episodes=True)
    collect(zeros, 3, full_episodes=True)
    assert environments.resets == before + 1


class Quadratic(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return (states.squeeze(1) / 50) ** 2 + 1


def literal_gae(script: Sequence[Sequence[int]], steps: int, gamma: float, lam: float) -> list[list[float]]:
    """[N][S] straight from the environments' steps: value of the final state at a time limit and at the rollout's end, 0 where
    an episode terminates; no advantage flows over an end."""

    def v(state: float) -> float:
        return (state / 50) ** 2 + 1

    rows = []
    for i in range(len(script[0])):
        advantages, last = [0.0] * steps, 0.0
        for t in reversed(range(steps)):
            state, end = 100 * i + t, script[t][i]
            following = {RUNNING: v(state + 1), TERMINATED: 0.0, TRUNCATED: v(state + 1.5)}[end]
            delta = state / 10 + gamma * following - v(state)
            last = delta + (gamma * lam * last if end == RUNNING else 0)
            advantages[t] = last
        rows.append(advantages)
    return rows


def test_gae_over_boundary_time_limit_and_cut_is_a_literal_loop() -> None:
    critic = pg.Critic(lr=1e-3, lam=0.8, gamma=0.9, clip=0.0)
    algorithm = replace(find_preset("trpo").algorithm, critic=critic, advantage=(pg.GAE(0.9, 0.8),))
    learner = ControlLearner(DISCRETE, algorithm, Settings(lr=None), seed=0)
    learner.critic = replace(learner.critic, network=Quadratic())  # type: ignore[type-var]
    result = Collector(Scripted(SCRIPT), seed=0)(zeros, 6)
    batch = learner.evaluate(result, algorithm.needs)
    psi, batch = algorithm.compute_advantages(batch), algorithm.add_critic_targets(batch)
    literal = literal_gae(SCRIPT, 6, 0.9, 0.8)
    expected = torch.tensor(literal[0] + literal[1])
    assert torch.allclose(psi[batch.mask], expected, rtol=1e-5)
    assert batch.returns is not None
    assert batch.values is not None
    assert torch.allclose((batch.returns - batch.values)[batch.mask], expected, rtol=1e-5)
    assert expected.abs().min() > 0.01


def test_evaluation_takes_as_many_episodes_of_each_environment() -> None:
    environments = Scripted([[1, 0], [1, 0], [1, 1]])  # one ends at every step, the other at every third
    learner = ControlLearner(DISCRETE, find_preset("reinforce").algorithm, Settings(), seed=0)
    result = evaluate_control(learner, environments, 5, greedy=True)
    assert sorted(result.returns) == pytest.approx([0.0, 0.1, 0.2, 30.3, 31.2])
    assert result.mean == pytest.approx(sum(result.returns) / 5)


def test_reinforce_weighs_with_the_return_to_go() -> None:
    algorithm = find_preset("reinforce").algorithm
    result: Experience = Collector(Scripted(SCRIPT), seed=0)(zeros, 6)
    psi = algorithm.compute_advantages(result.batch)
    assert psi[1].tolist() == pytest.approx([0.9, 0.7, 0.4, 0.0])
    after = algorithm.with_state(algorithm.update_state(algorithm.init_state(), result.batch))
    assert after.compute_advantages(result.batch)[2, 0] == pytest.approx(
        0.5 - sum((0.1, 0.9, 0.5, 40.6, 20.9)) / 5, rel=1e-5
    )
