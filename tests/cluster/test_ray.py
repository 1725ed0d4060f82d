"""A real Ray: a run of actors is the run of one process, to the letter, and stays it when actors are killed. `make test-ray`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.ray_cluster import Killer, RayCluster, ray_cluster
from doubles.ray_runs import check_alike, check_same, command, on

pytest.importorskip("ray")

from policygrad.cluster.launch import train_on_cluster
from policygrad.errors import EngineError, RunError

pytestmark = pytest.mark.ray

WORLD = """
import asyncio
import os
from random import Random

import policygrad as pg


class Guess:
    '''Three turns: a number is told, another one each time, and letters count.'''

    def __init__(self, example, seed):
        self.example, self.draw, self.turns = example, Random(seed), 0

    async def reset(self):
        return pg.Observation(f"{self.example.columns['answer']} then {self.draw.randrange(100)}: ")

    async def step(self, action):
        self.turns += 1
        if self.turns == 2 and os.path.exists(FOLDER + "/kill"):
            os.unlink(FOLDER + "/kill")
            os.kill(os.getpid(), 9)
        await asyncio.sleep(0)
        worth = float(sum(c.isdigit() for c in action.text)) + 0.25 * len(action.text) + self.draw.random()
        if self.turns == 3:
            return pg.Step(reward=worth, stop_reason="guessed")
        return pg.Step(pg.Observation(f" no, {self.draw.randrange(100)}: "), worth / 2)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray") / "log") as results:
        yield results


@pytest.fixture(scope="module")
def run(small: pg.Run) -> pg.Run:
    return replace(small, evaluation=pg.EvaluationConfig(problems=4, samples_per_prompt=2))


@pytest.fixture(scope="module")
def alone(run: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    return pg.train(replace(run, output=str(tmp_path_factory.mktemp("alone") / "run")), display=False).output


@pytest.fixture(scope="module")
def acted(run: pg.Run, cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of actors that nobody kills."""
    result = train_on_cluster(replace(run, output=str(tmp_path_factory.mktemp("acted") / "run")), on(cluster))
    assert (result.steps, result.interrupted) == (run.steps, False)
    assert result.after is not None
    return result.output


def test_a_run_of_actors_is_that_of_one_process(alone: Path, acted: Path) -> None:
    check_alike(alone, acted)


@pytest.mark.parametrize(
    "title", ["ray::SamplerActor.generate", "ray::RewardActor.run_rewards", "ray::TrainerActor.train"]
)
def test_an_actor_that_is_killed_costs_nothing(
    title: str, run: pg.Run, acted: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    folder = tmp_path / "run"
    with Killer(cluster, title, folder / "metrics.jsonl", after=2) as killer:
        train_on_cluster(replace(run, output=str(folder)), on(cluster))
    assert killer.killed is not None
    check_same(acted, folder)


def test_several_samplers_draw_what_one_does_and_one_that_is_killed_costs_nothing(
    run: pg.Run, alone: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    several = on(cluster, samplers=2, cpus=0.4)
    full, folder = tmp_path / "whole", tmp_path / "run"
    train_on_cluster(replace(run, output=str(full)), several)
    check_alike(alone, full)
    with Killer(cluster, "ray::SamplerActor.generate", folder / "metrics.jsonl", after=2) as killer:
        train_on_cluster(replace(run, output=str(folder)), several)
    assert killer.killed is not None
    check_same(full, folder)


def test_an_episode_whose_actor_is_killed_goes_on(run: pg.Run, tmp_path: Path, cluster: RayCluster) -> None:
    (tmp_path / "world.py").write_text(WORLD.replace("FOLDER", repr(str(tmp_path))))
    letters = tuple("abcdefghijklmnopqrstuvwxyz ")  # a turn ends at the first one, and leaves tokens for the next
    world = replace(
        run, environment=f"{tmp_path / 'world.py'}:Guess", reward=(), sampling=replace(run.sampling, stop=letters)
    )
    pg.train(replace(world, output=str(tmp_path / "alone")), display=False)
    (tmp_path / "kill").touch()  # from now on: the first actor to come to an episode's second turn ends
    train_on_cluster(replace(world, output=str(tmp_path / "run")), on(cluster))
    assert not (tmp_path / "kill").exists()
    check_alike(tmp_path / "alone", tmp_path / "run")


@pytest.mark.parametrize("title", ["", "ray::LearnerActor.serve", "ray::TrainerActor.train"])
def test_actors_learn_together_and_one_that_is_killed_costs_nothing(
    title: str, run: pg.Run, tmp_path: Path, cluster: RayCluster
) -> None:
    two, folder = replace(run, learner=replace(run.learner, world_size=2)), tmp_path / "run"
    pg.train(replace(two, output=str(tmp_path / "alone")), display=False)
    with Killer(cluster, title or "nobody", folder / "metrics.jsonl", after=2) as killer:
        train_on_cluster(replace(two, output=str(folder)), on(cluster))
    assert (killer.killed is not None) is bool(title)
    check_alike(tmp_path / "alone", folder)


def test_a_client_from_elsewhere_goes_on_with_a_stopped_run(
    run: pg.Run, acted: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    folder = tmp_path / "run"
    where = ["--cluster", cluster.client, "--cluster.timeout", "120"]
    begun = [*command(run, folder), "--stop-after", "2", *where]
    done = subprocess.run(begun, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stopped after" in done.stdout, done.stdout
    train_on_cluster(run, on(cluster), resume=str(folder))
    check_same(acted, folder)


def test_what_has_no_room_is_said_within_seconds(run: pg.Run, tmp_path: Path, cluster: RayCluster) -> None:
    report = list[str]()
    with pytest.raises(RunError, match=r"need 6 CPUs, of which the cluster has 2, 2 of them free.*--cluster\.cpus"):
        train_on_cluster(
            replace(run, output=str(tmp_path / "run")), on(cluster, cpus=2, timeout=1.0), note=report.append
        )
    assert not (tmp_path / "run").exists()


def test_a_sampler_that_always_dies_ends_the_run_resumably(
    run: pg.Run, acted: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    folder = tmp_path / "run"
    with (
        Killer(cluster, "ray::SamplerActor.generate", folder / "metrics.jsonl", after=2),
        pytest.raises(EngineError, match=r"no sampler actor has come back .*--cluster\.restarts"),
    ):
        train_on_cluster(replace(run, output=str(folder)), on(cluster, restarts=0, timeout=2.0))
    train_on_cluster(run, on(cluster), resume=str(folder))
    check_same(acted, folder)


def test_the_reason_of_an_actor_is_the_user_s(run: pg.Run, tmp_path: Path, cluster: RayCluster) -> None:
    (tmp_path / "odd.py").write_text("def odd(prompts, completions, nowhere, **columns):\n    return [0.0]\n")
    odd = replace(run, output=str(tmp_path / "run"), reward=(f"{tmp_path / 'odd.py'}:odd",))
    with pytest.raises(pg.RewardError, match=r"odd' needs the column 'nowhere'"):
        train_on_cluster(odd, on(cluster))
