"""What of a run is done by whom on a cluster. Data only, for the command line; none of it is part of the run."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields

from policygrad.errors import ConfigError
from policygrad.samplers.config import LOCAL
from policygrad.training.config.run import UncheckedRun

AUTO, LOCAL_CLUSTER, CLIENT = "auto", "local", "ray://"
ADDRESSES = (AUTO, LOCAL_CLUSTER, CLIENT)
"""Those that need no name of a machine, and how the others begin."""
CLUSTER_OPTIONS = ("samplers", "rewards", "environments", "cpus", "restarts", "timeout")
"""Fields that `--cluster.FIELD` sets."""
_PLACE = re.compile(r"(ray://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d+)/?")


def parse_address(address: str) -> tuple[str, int] | None:
    """(host, port) of an address of a cluster, HOST:PORT or ray://HOST:PORT; None of any other."""
    match = _PLACE.fullmatch(address)
    return None if match is None else (match[2].strip("[]"), int(match[3]))


@dataclass(frozen=True)
class ClusterConfig:
    """A Ray cluster, and how many actors of each role a run has there."""

    address: str
    """auto, local, HOST:PORT or ray://HOST:PORT."""
    samplers: int | None = None
    """Actors that draw completions; 0 = the learners do. None = 1, and 0 where an engine draws."""
    rewards: int = 1
    """Actors that judge, each with `rewards.num_workers` processes; 0 = rank 0's machine does."""
    environments: int = 1
    """Actors that episodes take place in, where the run has an environment; 0 = rank 0's process."""
    cpus: float = 0.5
    """CPUs that Ray sets aside for each actor."""
    restarts: int = 3
    """Times that Ray starts an actor again which has died, before the run ends."""
    timeout: float = 30.0
    """Seconds that the cluster may take to have room for all actors, or an actor to come back."""

    def __post_init__(self) -> None:
        if self.address not in (AUTO, LOCAL_CLUSTER) and _PLACE.fullmatch(self.address) is None:
            raise ConfigError(
                f"--cluster {self.address!r} is no address: ray://HOST:10001 or HOST:6379 of a cluster's head, auto for the "
                "cluster of this machine or of `ray job submit`, local for one that is started here"
            )
        for name in ("samplers", "rewards", "environments", "restarts"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"--cluster.{name} must be at least 0, not {getattr(self, name)}")
        if not (0 < self.cpus < math.inf and 0 < self.timeout < math.inf):
            raise ConfigError(
                f"--cluster.cpus and --cluster.timeout must be above 0 and finite, not {self.cpus:g} and {self.timeout:g}"
            )
        if self.cpus > 1 and self.cpus != int(self.cpus):
            raise ConfigError(
                f"--cluster.cpus above 1 must be whole, as Ray has it, not {self.cpus:g}: take {int(self.cpus)} or "
                f"{int(self.cpus) + 1}"
            )

    @property
    def cli_flags(self) -> str:
        """The options of a command that say so."""
        usual = {field.name: field.default for field in fields(self)}
        given = {name: getattr(self, name) for name in CLUSTER_OPTIONS if getattr(self, name) != usual[name]}
        flags = [f"--cluster.{name} {value:g}" for name, value in given.items()]
        return " ".join([f"--cluster {shlex.quote(self.address)}", *flags])

    @property
    def endpoint(self) -> tuple[str, int] | None:
        """(host, port) of the address, where it has one."""
        return parse_address(self.address)


# The actors of a run, and the room that they take: numbers alone, without Ray.

LEARNERS, SAMPLERS, REWARDS, ENVIRONMENTS = "learner", "sampler", "reward workers", "environments"
TOLERANCE = 1e-6
"""Of fractions that are added up."""


@dataclass(frozen=True)
class ActorGroup:
    """Actors that do the same. They are placed together: as one placement group."""

    name: str
    count: int
    cpus: float
    gpus: int
    spread: bool
    """Over machines, where that can be; else packed on as few as possible."""

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What Ray sets aside, for each actor."""
        return [{"CPU": self.cpus, **({"GPU": float(self.gpus)} if self.gpus else {})} for _ in range(self.count)]


def plan_actor_groups(run: UncheckedRun, config: ClusterConfig, gpus_there: float) -> tuple[ActorGroup, ...]:
    """Those that the run has. gpus_there: of the whole cluster: with some of them, `learner.device` auto is a GPU.

    Raises:
        ConfigError: actors that draw, beside an engine.
    """
    engine = run.sampler.engine
    if engine != LOCAL and config.samplers:
        raise ConfigError(
            f"--cluster.samplers {config.samplers} are actors that draw, and sampler.engine is {engine}: leave one of them away"
        )
    device = run.learner.device
    gpu = int(device.startswith("cuda") or (device == "auto" and gpus_there > 0))
    samplers = (1 if engine == LOCAL else 0) if config.samplers is None else config.samplers
    environments = 0 if run.environment is None else config.environments
    groups = (
        ActorGroup(LEARNERS, run.learner.world_size, config.cpus, gpu, spread=False),
        ActorGroup(SAMPLERS, samplers, config.cpus, gpu, spread=True),
        ActorGroup(REWARDS, config.rewards, config.cpus, 0, spread=True),
        ActorGroup(ENVIRONMENTS, environments, config.cpus, 0, spread=True),
    )
    return tuple(role for role in groups if role.count)


def describe_shortage(groups: tuple[ActorGroup, ...], total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """In words, what of CPUs and GPUs is missing for these actors; empty where there is enough of each. there, free: of the whole
    cluster, by Ray's names."""
    shortages = []
    for kind in ("CPU", "GPU"):
        needed = sum(bundle.get(kind, 0.0) for role in groups for bundle in role.bundles)
        has, open_ = total.get(kind, 0.0), free.get(kind, 0.0)
        if needed > open_ + TOLERANCE:
            shortages.append(f"{needed:g} {kind}s, and the cluster has {has:g}, of which {open_:g} are free")
    if not shortages:
        return ""
    actors = ", ".join(f"{role.count} × {role.name}" for role in groups)
    return f"the run's actors ({actors}) need {'; and '.join(shortages)}"


SHORTAGE_HINT = (
    "add machines, end what holds them, or ask for less: --cluster.cpus, --cluster.samplers, --cluster.rewards, "
    "--learner.world-size, --learner.device cpu"
)
