"""A real Ray: a run of actors that is asked to end, from a terminal, by a scheduler, as a job, ends resumably. `make test-ray`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.ray_cluster import TIMEOUT, RayCluster, ray_cluster
from doubles.ray_runs import begin, check_same, command, on

pytest.importorskip("ray")

from policygrad.cluster.launch import train_on_cluster
from policygrad.commands import STOPPED

pytestmark = pytest.mark.ray

ROOM = 0.6
"""CPUs of each of three actors, so that two runs at a time have no room here."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray") / "log", dashboard=True) as result:
        yield result


@pytest.fixture(scope="module")
def run(small: pg.Run) -> pg.Run:
    """Long enough for what comes from elsewhere to come before its end."""
    return replace(small, steps=30)


@pytest.fixture(scope="module")
def acted(run: pg.Run, cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of actors that nobody stops."""
    return train_on_cluster(
        replace(run, output=str(tmp_path_factory.mktemp("acted") / "run")), on(cluster, cpus=ROOM)
    ).output


def under_way(cluster: RayCluster, folder: Path) -> bool:
    """Waits until two steps are done."""
    return cluster.comes(lambda: (folder / "metrics.jsonl").is_file() and _steps(folder) >= 2)


def _steps(folder: Path) -> int:
    return (folder / "metrics.jsonl").read_bytes().count(b"\n")


def options(address: str) -> list[str]:
    return ["--cluster", address, "--cluster.cpus", f"{ROOM:g}", "--cluster.timeout", f"{TIMEOUT:g}"]


@pytest.mark.parametrize(("number", "client"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGHUP, False)])
def test_a_signal_ends_a_run_resumably_and_leaves_nobody(
    number: signal.Signals, client: bool, run: pg.Run, acted: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    where = cluster.client if client else cluster.address
    began = begin([*command(run, folder), *options(where)], log)
    assert under_way(cluster, folder), log.read_text()
    os.killpg(began.pid, number)  # as a terminal does: the whole group
    assert began.wait(TIMEOUT) == STOPPED, log.read_text()
    last = log.read_text().splitlines()[-1]
    assert last.startswith(f"stopped; resume with: policygrad train --resume {folder} ")
    assert last.endswith(f" --cluster {where} --cluster.cpus 0.6 --cluster.timeout {TIMEOUT}")
    assert 2 <= _steps(folder) < run.steps
    assert cluster.comes(cluster.empty)
    train_on_cluster(run, on(cluster, cpus=ROOM), resume=str(folder))  # for which there is room again
    check_same(acted, folder)


def test_a_command_that_is_killed_takes_its_actors_along(
    run: pg.Run, acted: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    folder = tmp_path / "run"
    began = begin([*command(run, folder), *options(cluster.address)], tmp_path / "log")
    assert under_way(cluster, folder)
    os.killpg(began.pid, signal.SIGKILL)
    assert began.wait(TIMEOUT) == -signal.SIGKILL
    assert cluster.comes(cluster.empty)
    train_on_cluster(run, on(cluster, cpus=ROOM), resume=str(folder))
    check_same(acted, folder)


def job(cluster: RayCluster, *argv: str) -> str:
    """What `ray job …` says."""
    ray = str(Path(sys.executable).with_name("ray"))
    environment = os.environ | {"RAY_API_SERVER_ADDRESS": cluster.dashboard}
    done = subprocess.run(
        [ray, "job", *argv], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout


def test_a_job_is_submitted_stopped_and_gone_on_with(
    run: pg.Run, acted: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    from ray.util.state import list_actors, list_placement_groups

    folder = tmp_path / "run"
    argv = [*command(run, folder), *options("auto")]
    patient = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "100"}})  # instead of 3
    begun = job(cluster, "submit", "--no-wait", "--submission-id", "one", "--runtime-env-json", patient, "--", *argv)
    assert "submitted successfully" in begun, begun
    assert under_way(cluster, folder), job(cluster, "logs", "one")
    alive = {actor.name for actor in list_actors(address=cluster.dashboard, filters=[("state", "=", "ALIVE")])}
    assert alive >= {"run learner 0", "run sampler 0", "run reward workers 0"}
    groups = {group.name for group in list_placement_groups(cluster.dashboard, filters=[("state", "=", "CREATED")])}
    assert groups >= {"run learner", "run sampler", "run reward workers"}
    assert "was stopped" in job(cluster, "stop", "one")
    assert f"stopped; resume with: policygrad train --resume {folder} " in job(cluster, "logs", "one")
    assert 2 <= _steps(folder) < run.steps
    assert cluster.comes(cluster.empty)
    on_with = [sys.executable, "-m", "policygrad", "train", "--resume", str(folder), *argv[6:]]
    message = job(cluster, "submit", "--", *on_with)
    assert "succeeded" in message, message
    check_same(acted, folder)
