"""A real Ray cluster of several hosts: a run whose actors are on all of them is that of one process. `make test-hosts`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import measure_hosts
import pytest
import torch
from measure_hosts import (
    RAY,
    RAY_HOST,
    RAY_TOKEN,
    SAMPLER_KEY,
    Engine,
    Program,
    always,
    count_steps,
    prepare,
    start,
    start_ray,
)
from test_torchrun import succeeded

from doubles.files import rows, weights
from doubles.ray_runs import LOOSE, check_alike
from hosts import Host, Laboratory

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(not (RAY / "ray").exists(), reason="no Ray: make .environments/ray/.installed"),
]
ACTORS = ("TrainerActor", "LearnerActor", "SamplerActor", "RewardActor", "EnvironmentActor")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not below /tmp, of which each host has its own here: Ray's sockets and logs lie there."""
    made = Path(tempfile.mkdtemp(prefix="policygrad-ray-", dir="/var/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def start_cluster(lab: Laboratory, folder: Path, hosts: Sequence[Host] = ()) -> list[Program]:
    """Start Ray on these hosts, or on every one, the head on the first, and wait until all are there."""
    return [start_ray(lab, host.index, folder) for host in hosts or lab.hosts]


def train(lab: Laboratory, folder: Path, words: Sequence[str], run: Path, *more: str) -> Program:
    """Begin a run on the cluster, from the first host."""
    argv = [str(RAY / "python"), "-m", "policygrad", *words, *always(folder), "--output", str(run), *more]
    cluster = ["--cluster", f"{lab.hosts[0].address}:6379", "--cluster.timeout", "240", "--cluster.cpus", "0.4"]
    return start(lab.hosts[0], [*argv, *cluster], folder, RAY_HOST | RAY_TOKEN)


def actors(lab: Laboratory) -> dict[str, set[str]]:
    """Return the hosts of each kind of actor."""
    found: dict[str, set[str]] = {}
    for host in lab.hosts:
        if host.pid:
            for line in host.run(["ps", "-eo", "args"]).stdout.splitlines():
                for kind in ACTORS:
                    if line.startswith(f"ray::{kind}"):
                        found.setdefault(kind, set()).add(host.name)
    return found


def alone(folder: Path, words: Sequence[str], *more: str) -> Path:
    """Return the run in one process, with Ray's Python."""
    run = folder / "alone"
    with Laboratory(1) as lab:
        argv = [str(RAY / "python"), "-m", "policygrad", *words, *always(folder), "--output", str(run), *more]
        if more:  # an engine, at the same name
            lab.name_hosts({"host1": "127.0.0.1"})
            Engine(folder, words).serve(lab, str(folder / "run-weights"), {}, 0)
        succeeded([start(lab.hosts[0], argv, folder, SAMPLER_KEY)])
    return run


def check_trained_alike(expected: Path, run: Path) -> None:
    """The same completions, and weights that differ by rounding; another sampler has other metrics."""
    assert rows(run / "completions.jsonl") == [
        row | {"advantage": pytest.approx(row["advantage"], abs=LOOSE)} for row in rows(expected / "completions.jsonl")
    ]
    trained, results = weights(expected), weights(run)
    assert all(torch.allclose(trained[name], results[name], atol=LOOSE) for name in trained)


@pytest.mark.parametrize("hosts", [2, 3])
def test_actors_on_several_hosts_make_the_run_of_one_process(hosts: int, folder: Path) -> None:
    words = prepare(folder)
    expected, run = alone(folder, words), folder / "run"
    with Laboratory(hosts, disk="1g") as lab:
        start_cluster(lab, folder)
        program = train(lab, folder, words, run, "--learner.world-size", "2", "--cluster.samplers", "2")
        program.wait_for(lambda: count_steps(run) >= 2, "second step")
        where = actors(lab)
        succeeded([program])
    assert len(set().union(*where.values())) == hosts, where
    assert {"TrainerActor", "LearnerActor", "SamplerActor", "RewardActor"} <= where.keys()
    check_alike(expected, run)


WORLD = """
from random import Random

import policygrad as pg


class Guess:
    def __init__(self, example, seed):
        self.answer, self.draw, self.turns = example.columns["answer"], Random(seed), 0

    async def reset(self):
        return pg.Observation(f"{self.answer} then {self.draw.randrange(100)}: ")

    async def step(self, action):
        self.turns += 1
        worth = sum(map(ord, action.text)) % 7 / 7 + self.draw.random()
        if self.turns == 2:
            return pg.Step(reward=worth, stop_reason="guessed")
        return pg.Step(pg.Observation(f" no, {self.draw.randrange(100)}: "), worth / 2)
"""


def test_environments_on_hosts_of_their_own_play_what_one_process_plays(folder: Path) -> None:
    (folder / "world.py").write_text(WORLD)
    words, run, world = prepare(folder), folder / "run", str(folder / "world.py")
    at = words.index("--reward")
    words = [*words[:at], *words[at + 2 :], "--environment", f"{world}:Guess", "--allow-code", world]
    words += ["--stop", *"abcdefghijklmnopqrstuvwxyz "]  # a turn ends at the first one, and leaves tokens for the next
    expected = alone(folder, words)
    with Laboratory(3, disk="1g") as lab:
        start_cluster(lab, folder)
        program = train(lab, folder, words, run, "--cluster.environments", "3")
        program.wait_for(lambda: count_steps(run) >= 2, "second step")
        where = actors(lab)
        succeeded([program])
    assert where["EnvironmentActor"] == {"host0", "host1", "host2"}, where
    check_alike(expected, run)
    assert any(len(row["turns"]) > 2 for row in rows(run / "completions.jsonl"))


def test_a_host_with_a_sampler_that_loses_its_power_costs_nothing(folder: Path) -> None:
    words = prepare(folder)
    expected, run = alone(folder, words), folder / "run"
    with Laboratory(3, disk="1g") as lab:
        start_cluster(lab, folder)
        program = train(lab, folder, words, run, "--cluster.samplers", "3")
        program.wait_for(lambda: count_steps(run) >= 2, "second step")
        where = actors(lab)
        (lost, *_) = [
            host
            for host in lab.hosts[1:]
            if host.name not in where["TrainerActor"] and host.name in where["SamplerActor"]
        ]
        lab.power_off(lost.index)
        succeeded([program])
    check_alike(expected, run)


@pytest.mark.parametrize("name", ["head cut", "sampler cut"])
def test_a_fault_between_hosts_of_ray_loses_nothing(name: str, folder: Path) -> None:
    (outcome,) = measure_hosts.measure_faults("ray", [name], folder)
    assert (outcome.went_on, outcome.broken) == (False, [])


def test_an_engine_on_a_host_of_its_own_samples_for_a_cluster(folder: Path) -> None:
    """A server of llama.cpp on a host that is not Ray's: weights by the folder that all see, completions by HTTP, with a key."""
    words, run = prepare(folder), folder / "run"
    with Laboratory(3, disk="1g") as lab:
        kind = Engine(folder, words)
        server, options = kind.serve(lab, kind.weights(run), {}), kind.options(run)
        start_cluster(lab, folder, lab.hosts[::2])
        program = train(
            lab,
            folder,
            words,
            run,
            *options,
            "--cluster.rewards",
            "2",
        )
        program.wait_for(lambda: count_steps(run) >= 2, "second step")
        where = actors(lab)
        succeeded([program])
        assert server.process.poll() is None
    assert where["RewardActor"] == {"host0", "host2"}, where
    assert "SamplerActor" not in where
    check_trained_alike(alone(folder, words, *options), run)
