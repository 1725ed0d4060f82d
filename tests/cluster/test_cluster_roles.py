"""What of a cluster needs no Ray: its options, the room that a run takes, what its actors do when they are called by hand."""

from __future__ import annotations

import asyncio
import re
import shlex
import socket
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import policygrad as pg
from policygrad.cluster.actors import EnvironmentActor, RayEnvironment, RewardActor
from policygrad.cluster.config import (
    CLUSTER_OPTIONS,
    ENVIRONMENTS,
    LEARNERS,
    REWARDS,
    SAMPLERS,
    ClusterConfig,
    describe_shortage,
    plan_actor_groups,
)
from policygrad.cluster.launch import check_reachable, check_versions, connect_ray, installed_versions
from policygrad.commands.train import parse_run
from policygrad.errors import ConfigError, EngineError, RunError
from policygrad.rewards.config import RewardConfig
from policygrad.rewards.resolve import resolve_reward
from policygrad.samplers.config import SamplerConfig
from policygrad.tasks.base import Example
from policygrad.training.placement import Placement
from policygrad.training.trainer import Trainer


@pytest.mark.parametrize("address", ["auto", "local", "ray://head:10001", "10.0.0.1:6379", "ray://[::1]:10001"])
def test_an_address(address: str) -> None:
    assert ClusterConfig(address).address == address


@pytest.mark.parametrize("address", ["", "head", "http://head:8265", "ray://head", "ray://"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an address: give ray://HOST:10001"):
        ClusterConfig(address)


@pytest.mark.parametrize("changes", [{"samplers": -1}, {"restarts": -1}, {"cpus": 0}, {"timeout": 0}, {"cpus": 1.5}])
def test_odd_numbers_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"--cluster\.{next(iter(changes))}"):
        ClusterConfig("auto", **changes)


@pytest.mark.parametrize(
    ("config", "argv"),
    [
        (ClusterConfig("local"), "--cluster local"),
        (ClusterConfig("ray://[::1]:10001", samplers=0), "--cluster 'ray://[::1]:10001' --cluster.samplers 0"),
        (ClusterConfig("auto", cpus=0.25, timeout=90.0), "--cluster auto --cluster.cpus 0.25 --cluster.timeout 90"),
    ],
)
def test_the_options_that_say_so_are_read_as_the_same(config: ClusterConfig, argv: str) -> None:
    assert config.cli_flags == argv
    assert parse_run(["grpo", *shlex.split(argv)])[1].build_cluster_config() == config
    assert set(CLUSTER_OPTIONS) == {field.name for field in fields(ClusterConfig)} - {"address"}


def test_a_run_whose_rewards_fail_is_gone_on_with_where_it_was(small: pg.Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def fails(prompts, completions, **columns):\n    raise ValueError('no')\n")
    failing = replace(small, output=str(tmp_path / "run"), reward=(f"{tmp_path / 'mine.py'}:fails",))
    with pytest.raises(pg.RewardError, match=r"policygrad train --resume \S+/run .*--cluster auto "):
        Trainer(failing, display=False, placement=Placement(cli_flags="--cluster auto")).train()


def counts(run: pg.Run, config: ClusterConfig, gpus: float = 0.0) -> dict[str, tuple[int, int]]:
    return {role.name: (role.count, role.gpus) for role in plan_actor_groups(run, config, gpus)}


def test_the_roles_of_a_run() -> None:
    auto = ClusterConfig("auto")
    assert counts(pg.Run(), auto) == {LEARNERS: (1, 0), SAMPLERS: (1, 0), REWARDS: (1, 0)}
    world = pg.Run(environment="calculator", learner=pg.LearnerConfig(world_size=2))
    many = ClusterConfig("auto", samplers=3, rewards=0, environments=2)
    assert counts(world, many) == {LEARNERS: (2, 0), SAMPLERS: (3, 0), ENVIRONMENTS: (2, 0)}


def test_learners_and_samplers_take_gpus_where_there_are_any_or_one_is_asked_for() -> None:
    auto = ClusterConfig("auto")
    assert counts(pg.Run(), auto, gpus=2.0) == {LEARNERS: (1, 1), SAMPLERS: (1, 1), REWARDS: (1, 0)}
    assert counts(pg.Run(learner=pg.LearnerConfig(device="cpu")), auto, gpus=2.0)[LEARNERS] == (1, 0)
    assert counts(pg.Run(learner=pg.LearnerConfig(device="cuda", dtype="fp32")), auto)[LEARNERS] == (1, 1)


def test_an_engine_draws_instead_of_actors() -> None:
    run = pg.Run(sampler=SamplerConfig(engine="llama_cpp"))
    assert SAMPLERS not in counts(run, ClusterConfig("auto"))
    with pytest.raises(ConfigError, match=r"--cluster\.samplers 1 .* sampler\.engine=llama_cpp"):
        plan_actor_groups(run, ClusterConfig("auto", samplers=1), 0.0)


def test_what_is_missing_is_said() -> None:
    crew = plan_actor_groups(pg.Run(), ClusterConfig("auto", cpus=1), 1.0)
    assert describe_shortage(crew, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 3.0, "GPU": 2.0}) == ""
    assert describe_shortage(crew, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 0.5, "GPU": 1.0}) == (
        "the run's actors (1 × learner, 1 × sampler, 1 × reward workers) need 3 CPUs, of which the cluster has 2, 0.5 of them "
        "free, and 2 GPUs, of which the cluster has 1, 1 of them free"
    )


def test_nobody_at_the_address_is_said_at_once() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(RunError, match=rf"nothing listens at {where} .*ray start --head.*GCS"):
            check_reachable(ClusterConfig(where))
        with pytest.raises(RunError, match="Ray Client server"):
            check_reachable(ClusterConfig(f"ray://{where}"))


class Ray:
    """A stand-in for the package: where its file says that a cluster is, and that it is never asked to connect."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.__version__ = "0"

    def get_ray_address_from_environment(self, address: str, folder: str | None) -> str:
        assert (address, folder) == ("auto", None)
        if self.address is None:
            raise ConnectionError("Could not find any running Ray instance.")
        return self.address

    def init(self, **options: Any) -> None:
        raise ConnectionError("asked to connect")


@pytest.mark.parametrize("by", ["RAY_ADDRESS", "RAY_ADDRESS of a client", "ray_current_cluster"])
def test_auto_with_an_address_at_which_nobody_listens_is_refused_before_ray_is_asked(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and nobody listens
        where = f"127.0.0.1:{held.getsockname()[1]}"
        ray = Ray(where)
        monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "ray._private", ray)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "ray._private.services", ray)  # type: ignore[arg-type]
        monkeypatch.setenv(
            "RAY_ADDRESS", {"RAY_ADDRESS": where, "RAY_ADDRESS of a client": f"ray://{where}"}.get(by, "")
        )
        refused = pytest.raises(
            RunError, match=rf"--cluster auto: .*{by.split()[0]}.* at {where}, where nothing listens"
        )
        with refused, connect_ray(ClusterConfig("auto")):
            pass
        held.listen()
        with pytest.raises(RunError, match=r"no Ray cluster answers \(asked to"), connect_ray(ClusterConfig("auto")):
            pass


def test_auto_without_any_address_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray._private", "ray._private.services"):
        monkeypatch.setitem(sys.modules, name, Ray(None))  # type: ignore[arg-type]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_reachable(ClusterConfig("auto"))
    monkeypatch.setitem(sys.modules, "ray._private.services", object())  # type: ignore[arg-type]
    check_reachable(ClusterConfig("auto"))


def test_other_versions_are_refused() -> None:
    check_versions(installed_versions())
    with pytest.raises(
        RunError, match=r"the cluster has torch 1\.0 and this machine torch .*the same version everywhere"
    ):
        check_versions(installed_versions() | {"torch": "1.0"})


def test_options_of_a_cluster_want_one(run_command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, message = run_command("train", "--cluster.samplers", "2", "--dry-run")
    assert code == 2
    assert "--cluster.samplers needs a Ray cluster" in message


@pytest.mark.parametrize(
    ("argv", "way_out"),
    [
        (("eval", "tiny", "--cluster", "auto"), "policygrad eval` runs on this machine, or .*--sampler.urls"),
        (("sft", "--cluster=auto"), "policygrad sft` trains in several processes with --learner.world-size"),
        (("reward-model", "--cluster.samplers", "2"), "policygrad reward-model` trains in several .*torchrun"),
        (("compare", "grpo", "dapo", "--", "--cluster", "auto"), "policygrad compare` runs .*--jobs"),
    ],
)
def test_other_commands_refuse_a_cluster_by_name(
    argv: tuple[str, ...], way_out: str, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, message = run_command(*argv)
    assert code == 2
    assert re.search(rf"^error: --cluster\S* is an option of `policygrad train` only.*{way_out}", message)


def test_the_cluster_is_no_part_of_the_run(run_command: Callable[..., tuple[int, str, str]]) -> None:
    there, here = (run_command("train", *argv, "--dry-run")[1] for argv in (("--cluster", "auto"), ()))
    assert tomllib.loads(there) == tomllib.loads(here)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_is_named(run_command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, message = run_command("train", "--cluster", "local")
    assert code == 2
    assert "pip install '.[ray]' in a clone" in message


class Counter:
    """Adds up the lengths of what is said; one that `forgets` does so from a number of its own."""

    made = 0

    def __init__(self, example: Example, forgets: bool = False) -> None:
        Counter.made += 1
        self.total = Counter.made if forgets else 0

    async def reset(self) -> pg.Observation:
        return pg.Observation(f"{self.total}")

    async def step(self, action: pg.Action) -> pg.Step:
        self.total += len(action.text)
        return pg.Step(pg.Observation(f"{self.total}"))

    async def on_truncated(self) -> float:
        return float(self.total)


CODE = cloudpickle.dumps(Counter)


def test_an_actor_that_does_not_know_an_episode_plays_it_again() -> None:
    example, message = Example("?"), [None, pg.Action("abc"), pg.Action("de")]

    async def played() -> None:
        first, second = EnvironmentActor("first"), EnvironmentActor("second")
        assert len(await first.call(CODE, 7, example, 0, message[:1])) == 1
        full = await first.call(CODE, 7, example, 0, message)
        assert [o.content if isinstance(o, pg.Observation) else o.observation.content for o in full] == ["0", "3", "5"]
        assert await first.call(CODE, 7, example, 0, message) == full  # asked twice, played once
        assert await second.call(CODE, 7, example, 0, message) == full
        assert await EnvironmentActor("third").on_truncated(CODE, 7, example, 0, message) == 5.0
        await first.close(7)
        await first.close(7)

    asyncio.run(played())


class Home:
    """An actor that is new at every call."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        self.factory_bytes = cloudpickle.dumps(factory)
        self.reward_columns = ()

    async def call(self, number: int, method: str, *args: Any) -> Any:
        return await getattr(EnvironmentActor("new"), method)(*args)


def test_a_world_that_goes_another_way_when_it_is_played_again_is_refused() -> None:
    async def played(factory: Callable[..., Any]) -> str:
        home: Any = Home(factory)
        episode = RayEnvironment(home, 0, Example("?"), 0)
        await episode.reset()
        step = await episode.step(pg.Action("abc"))
        assert step.observation is not None
        return str(step.observation.content)

    assert asyncio.run(played(Counter)) == "3"
    with pytest.raises(EngineError, match=r"gave other responses: .*--cluster\.environments 0"):
        asyncio.run(played(lambda example: Counter(example, forgets=True)))


def test_reward_workers_judge_as_a_pool_does() -> None:
    workers = RewardActor("reward workers 0")
    workers.start(cloudpickle.dumps((resolve_reward("exact_match"),)), replace(RewardConfig(), num_workers=1))
    pool = workers._pool
    workers.start(b"", RewardConfig())  # told again what it knows
    assert workers._pool is pool
    assert pool is not None
    with pool:
        ((right, wrong),) = workers.run_rewards((["1 + 1 =", "1 + 2 ="], ["2", "4"], {"answer": ["2", "3"]}), False)
    assert (right.value, wrong.value) == (1.0, 0.0)
