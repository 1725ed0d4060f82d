"""Gymnasium's environments: actions in their own terms, the state before a reset, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

import policygrad as pg
from doubles.control import DISCRETE, SCRIPT, Scripted
from policygrad.lab.control.environments import GymEnvironments, Spaces
from policygrad.lab.control.train import ControlLearner, Settings, find_preset, train_control, with_gamma


class Odd(gymnasium.Env):
    """Discrete observations from 3 on, Discrete actions from 5 on or a Box; it keeps what it was given."""

    given: list[object] = []  # noqa: RUF012

    def __init__(self, box: bool = False, space: object = None) -> None:
        self.observation_space = gymnasium.spaces.Discrete(4, start=3) if space is None else space
        self.action_space = (
            gymnasium.spaces.Box(-1, 1, (2, 1)) if box else gymnasium.spaces.Discrete(2, start=5)  # type: ignore[assignment]
        )

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[int, dict[str, object]]:
        super().reset(seed=seed)
        return 3, {}

    def step(self, action: object) -> tuple[int, float, bool, bool, dict[str, object]]:
        self.given.append(action)
        return 4, 1.0, False, False, {}


@pytest.fixture
def odd() -> object:
    tuple_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2)])
    gymnasium.register("Odd-v0", Odd, max_episode_steps=2)
    gymnasium.register("OddBox-v0", Odd, max_episode_steps=2, kwargs={"box": True})
    gymnasium.register("OddEndless-v0", Odd)
    gymnasium.register("OddTuple-v0", Odd, max_episode_steps=2, kwargs={"space": tuple_space})
    Odd.given.clear()
    yield
    for name in ("Odd-v0", "OddBox-v0", "OddEndless-v0", "OddTuple-v0"):
        del gymnasium.registry[name]


def test_actions_are_converted_to_the_environment_s_space(odd: object) -> None:
    environments = GymEnvironments("Odd-v0", 2)
    assert environments.spaces == Spaces(4, 2, True)
    assert environments.reset([0, 1]).tolist() == [[1, 0, 0, 0]] * 2
    first = environments.step(torch.tensor([0, 1]))
    assert [int(a) for a in Odd.given] == [5, 6]  # type: ignore[call-overload]
    assert not first.truncated.any()
    second = environments.step(torch.tensor([0, 0]))  # the time limit: the final state is not the next episode's first
    assert second.truncated.all()
    assert not second.terminated.any()
    assert second.observation.tolist() == [[1, 0, 0, 0]] * 2
    assert second.final.tolist() == [[0, 1, 0, 0]] * 2
    box = GymEnvironments("OddBox-v0", 1)
    assert box.spaces == Spaces(4, 2, False)
    box.reset([0])
    box.step(torch.tensor([[-3.0, 0.5]]))
    assert np.asarray(Odd.given[-1]).tolist() == [[-1.0], [0.5]]
    assert GymEnvironments("OddEndless-v0", 1, max_episode_steps=7).number == 1


def test_the_final_state_is_that_before_the_reset() -> None:
    environments = GymEnvironments("CartPole-v1", 3, max_episode_steps=9)
    environments.reset([0, 1, 2])
    for _ in range(8):
        last = environments.step(torch.tensor([1, 1, 0]))
    assert last.final.equal(last.observation) or bool(last.terminated.any())
    last = environments.step(torch.tensor([1, 1, 0]))
    ended = last.truncated | last.terminated
    assert ended.any()
    assert (last.observation[ended].abs() <= 0.05).all()  # CartPole starts there
    assert (last.final[ended].abs() > 0.3).any(1).all()


def test_refusals(odd: object) -> None:
    for name, words in {
        "CartPol-v1": "did you mean CartPole-v1",
        "OddEndless-v0": "has no time limit.*--max-episode-steps",
        "OddTuple-v0": "has observations in Tuple.*FlattenObservation",
    }.items():
        with pytest.raises(ValueError, match=words):
            GymEnvironments(name, 1)
    with pytest.raises(ValueError, match="no algorithm 'grpo'"):
        find_preset("grpo")
    ppo = find_preset("ppo").algorithm
    assert ppo.critic is not None
    for algorithm, words in (
        (pg.get_algorithm("grpo"), "set samples_per_prompt"),
        (replace(ppo, shaping=(pg.KLInReward(),)), "logp_ref"),
        (replace(ppo, advantage=(pg.PrefixValue(4),), critic=None), "Batch.step_end"),
        (replace(ppo, ratio=pg.Sequence()), "minibatches hold single steps"),
        (replace(ppo, critic=replace(ppo.critic, pretrain=3)), "leave pretrain"),
        (replace(ppo, filters=(pg.MaskTruncated(),)), "filters look at"),
    ):
        with pytest.raises(ValueError, match=words):
            ControlLearner(DISCRETE, algorithm, Settings(), seed=0)
    with pytest.raises(ValueError, match="needs a learning rate"):
        ControlLearner(DISCRETE, ppo, Settings(lr=None), seed=0)
    with pytest.raises(ValueError, match="less than one in each of 2"):
        train_control(Scripted(SCRIPT), ppo, Settings(), steps=1)
    with pytest.raises(ValueError, match="does not discount"):
        with_gamma(find_preset("reinforce").algorithm, 0.9)
