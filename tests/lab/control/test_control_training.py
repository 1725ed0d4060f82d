"""Classic control, trained: it learns, it stays in its region, and its numbers are written down."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import measure_control
import policygrad as pg
from policygrad import cli
from policygrad.lab.control.environments import GymEnvironments, environment_seeds
from policygrad.lab.control.train import (
    PRESETS,
    ControlResult,
    evaluate_control,
    find_preset,
    train_control,
    with_gamma,
)


def run(name: str, steps: int, env: str = "CartPole-v1", seed: int = 0, **settings: object) -> ControlResult:
    result = find_preset(name)
    chosen = replace(result.settings, **settings)  # type: ignore[arg-type]
    return train_control(GymEnvironments(env, chosen.environments), result.algorithm, chosen, steps=steps, seed=seed)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("ppo", 4000),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("trpo", 9000), ("a2c", 14000), ("reinforce", 25000))
        ),
    ],
)
def test_control_learns(name: str, steps: int) -> None:
    trained = run(name, steps)
    result = evaluate_control(trained.learner, GymEnvironments("CartPole-v1", 10), 30, seed=1)
    assert len(result.returns) == 30
    assert result.mean > 45  # a random policy's episodes last 22 steps
    assert trained.curve[0].steps < trained.curve[-1].steps
    assert trained.curve[-1].steps == steps or trained.learner.critic is None


@pytest.mark.parametrize("env", ["CartPole-v1", pytest.param("Pendulum-v1", marks=pytest.mark.full)])
def test_an_accepted_step_stays_in_the_region(env: str) -> None:
    curve = run("trpo", 2048, env, environments=4, rollout=64).curve
    assert len(curve) == 8
    taken = [u for u in curve if u.accepted]
    assert len(taken) > 4
    for u in curve:
        assert u.kl <= 0.01 * (1 + 1e-5)
        assert (u.kl > 0) == bool(u.accepted)


@pytest.mark.parametrize(
    "name",
    ["ppo", *(pytest.param(name, marks=pytest.mark.full) for name in ("ppo_penalty", "natural", "a2c", "reinforce"))],
)
def test_continuous_actions_run(name: str) -> None:
    trained = run(name, 1600, "Pendulum-v1", environments=4, rollout=200, normalise=True)
    assert all(math.isfinite(u.kl) and u.kl > 0 for u in trained.curve)  # π_old is a copy: it did not move along
    assert trained.curve[-1].mean_return is not None
    assert trained.curve[-1].mean_return < -100
    assert trained.learner.normaliser is not None
    assert trained.learner.normaliser.count > 1000


def test_the_same_seed_is_the_same_run() -> None:
    first = run("ppo", 400, environments=2, rollout=100).curve
    torch.rand(7)
    np.random.rand(7)
    second = run("ppo", 400, environments=2, rollout=100).curve
    other = run("ppo", 200, environments=2, rollout=100, seed=1).curve
    assert (len(first), len(other)) == (2, 1)
    assert [replace(u, seconds=0) for u in first] == [replace(u, seconds=0) for u in second]
    assert replace(first[0], seconds=0) != replace(other[0], seconds=0)
    assert not set(environment_seeds(0, 8)) & set(environment_seeds(1, 8))


def test_presets_are_the_named_algorithms() -> None:
    for name in ("reinforce", "a2c", "trpo", "ppo"):
        mine, named = PRESETS[name].algorithm, pg.ALGORITHMS[name]
        assert mine.name == name
        assert (mine.gate, mine.ratio, mine.aggregation) == (named.gate, named.ratio, named.aggregation)
        assert [type(link) for link in mine.advantage] == [type(link) for link in named.advantage]
        assert type(mine.update_rule) is type(named.update_rule)
    other = with_gamma(find_preset("ppo").algorithm, 0.9)
    assert other.critic is not None
    assert (other.advantage[0].gamma, other.critic.gamma) == (0.9, 0.9)  # type: ignore[attr-defined]


@pytest.mark.full
def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    argv = ["lab", "control", "--steps", "512", "--num-envs", "2", "--rollout", "128", "--episodes", "3"]
    assert cli.main([*argv, "--output", str(file)]) == 0
    message = capsys.readouterr().out
    assert "mean return of 3 fresh episodes" in message
    assert "sampled actions" in message
    assert message.count("steps/s") == 2
    assert cli.main([*argv, "--json"]) == 0
    printed, written = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    assert [u["steps"] for u in printed["curve"]] == [256, 512]
    assert printed["evaluation"] == written["evaluation"]  # the same seed
    assert printed["settings"]["environments"] == 2
    assert cli.main(["lab", "control", "--algorithm", "trpo", "--lr", "1e-3"]) == 2
    assert "--lr: trpo sets its step length by a KL" in capsys.readouterr().err
    assert cli.main(["lab", "control", "--env", "CartPol", "--steps", "99"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_the_measured_table() -> None:
    run = {
        "algorithm": "ppo",
        "seed": 1,
        "env": "CartPole-v1",
        "evaluation": {"returns": [500.0, 450.0], "mean": 475.0, "standard_error": 25.0},
        "curve": [
            {"steps": 10, "episodes": 99, "mean_return": 480.0},
            {"steps": 20, "episodes": 120, "mean_return": 480.0},
            {"steps": 1500, "episodes": 130, "mean_return": 460.0},
        ],
    }
    row = measure_control.summarize(run) | {"cpu_seconds": 12.4}
    assert row["reached"] == 20  # not of fewer than 100 episodes
    text = measure_control.make_table([row | {"seed": 2, "mean": 100.0, "reached": None}, row])
    assert "| `ppo` | 475.0 ± 25.0, 100.0 ± 25.0 | 450 | 20, never | 1,500 | 12 |" in text
