"""What of a run is done by whom on a cluster. Data only, for the command line; none of it is part of the run."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields

from policygrad.errors import ConfigError
from policygrad.samplers.config import LOCAL
from policygrad.training.config.run import Draft

AUTO, LOCAL_CLUSTER, CLIENT = "auto", "local", "ray://"
ADDRESSES = (AUTO, LOCAL_CLUSTER, CLIENT)
"""Those that need no name of a machine, and how the others begin."""
OPTIONS = ("samplers", "rewards", "environments", "cpus", "restarts", "patience")
"""Fields that `--cluster.FIELD` sets."""
_PLACE = re.compile(r"(ray://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d+)/?")


def place_of(address: str) -> tuple[str, int] | None:
    """(host, port) of an address of a cluster, HOST:PORT or ray://HOST:PORT; None of any other."""
    found = _PLACE.fullmatch(address)
    return None if found is None else (found[2].strip("[]"), int(found[3]))


@dataclass(frozen=True)
class ClusterConfig:
    """A Ray cluster, and how many actors of each role a run has there."""

    address: str
    """auto, local, HOST:PORT or ray://HOST:PORT."""
    samplers: int | None = None
    """Actors that draw completions; 0 = the learners do. None = 1, and 0 where an engine draws."""
    rewards: int = 1
    """Actors that judge, each with `rewards.workers` processes; 0 = rank 0's machine does."""
    environments: int = 1
    """Actors that episodes take place in, where the run has an environment; 0 = rank 0's process."""
    cpus: float = 0.5
    """CPUs that Ray sets aside for each actor."""
    restarts: int = 3
    """Times that Ray starts an actor again which has died, before the run ends."""
    patience: float = 30.0
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
        if not (0 < self.cpus < math.inf and 0 < self.patience < math.inf):
            raise ConfigError(
                f"--cluster.cpus and --cluster.patience must be above 0 and finite, not {self.cpus:g} and {self.patience:g}"
            )
        if self.cpus > 1 and self.cpus != int(self.cpus):
            raise ConfigError(
                f"--cluster.cpus above 1 must be whole, as Ray has it, not {self.cpus:g}: take {int(self.cpus)} or "
                f"{int(self.cpus) + 1}"
            )

    @property
    def words(self) -> str:
        """The options of a command that say so."""
        usual = {field.name: field.default for field in fields(self)}
        given = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) != usual[name]}
        said = [f"--cluster.{name} {value:g}" for name, value in given.items()]
        return " ".join([f"--cluster {shlex.quote(self.address)}", *said])

    @property
    def place(self) -> tuple[str, int] | None:
        """(host, port) of the address, where it has one."""
        return place_of(self.address)


# The actors of a run, and the room that they take: numbers alone, without Ray.

LEARNERS, SAMPLERS, REWARDS, ENVIRONMENTS = "learner", "sampler", "reward workers", "environments"
SLACK = 1e-6
"""Of fractions that are added up."""


@dataclass(frozen=True)
class Role:
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


def roles(run: Draft, config: ClusterConfig, gpus_there: float) -> tuple[Role, ...]:
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
    found = (
        Role(LEARNERS, run.learner.ranks, config.cpus, gpu, spread=False),
        Role(SAMPLERS, samplers, config.cpus, gpu, spread=True),
        Role(REWARDS, config.rewards, config.cpus, 0, spread=True),
        Role(ENVIRONMENTS, environments, config.cpus, 0, spread=True),
    )
    return tuple(role for role in found if role.count)


def short(roles: tuple[Role, ...], there: Mapping[str, float], free: Mapping[str, float]) -> str:
    """In words, what of CPUs and GPUs is missing for these actors; empty where there is enough of each. there, free: of the whole
    cluster, by Ray's names."""
    said = []
    for kind in ("CPU", "GPU"):
        wanted = sum(bundle.get(kind, 0.0) for role in roles for bundle in role.bundles)
        has, open_ = there.get(kind, 0.0), free.get(kind, 0.0)
        if wanted > open_ + SLACK:
            said.append(f"{wanted:g} {kind}s, and the cluster has {has:g}, of which {open_:g} are free")
    if not said:
        return ""
    actors = ", ".join(f"{role.count} × {role.name}" for role in roles)
    return f"the run's actors ({actors}) need {'; and '.join(said)}"


WAY_OUT = (
    "add machines, end what holds them, or ask for less: --cluster.cpus, --cluster.samplers, --cluster.rewards, "
    "--learner.ranks, --learner.device cpu"
)
