"""Options of a run on a Ray cluster, and the actors and resources that it needs. Data only, without Ray; no part of the run
itself."""

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
ADDRESSES = (AUTO, LOCAL_CLUSTER, CLIENT)  # addresses without a host, and the prefix of those with one
CLUSTER_OPTIONS = ("samplers", "rewards", "environments", "cpus", "restarts", "timeout")
"""Fields that `--cluster.FIELD` sets."""
LEARNERS, SAMPLERS, REWARDS, ENVIRONMENTS = "learner", "sampler", "reward workers", "environments"
SHORTAGE_HINT = (
    "add machines, free resources, or ask for less: --cluster.cpus, --cluster.samplers, --cluster.rewards, "
    "--learner.world-size, --learner.device cpu"
)
TOLERANCE = 1e-6  # rounding error of summed fractions
_HOST_PORT = re.compile(r"(ray://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d+)/?")


def parse_address(address: str) -> tuple[str, int] | None:
    """Return (host, port) of HOST:PORT or ray://HOST:PORT; None for any other address."""
    match = _HOST_PORT.fullmatch(address)
    return None if match is None else (match[2].strip("[]"), int(match[3]))


@dataclass(frozen=True)
class ClusterConfig:
    """A Ray cluster, and the number of actors of each role."""

    address: str
    """auto, local, HOST:PORT or ray://HOST:PORT."""
    samplers: int | None = None
    """Actors that sample completions; 0 = the learners do. None = 1, and 0 with an engine."""
    rewards: int = 1
    """Actors that score completions, each with `rewards.num_workers` processes; 0 = rank 0's machine does."""
    environments: int = 1
    """Actors that run episodes, if the run has an environment; 0 = rank 0's process."""
    cpus: float = 0.5
    """CPUs that Ray reserves for each actor."""
    restarts: int = 3
    """How often Ray restarts an actor that has died before the run ends."""
    timeout: float = 30.0
    """Seconds to wait for resources for all actors, for an actor to come back, and for a machine that does not answer."""

    def __post_init__(self) -> None:
        if self.address not in (AUTO, LOCAL_CLUSTER) and parse_address(self.address) is None:
            raise ConfigError(
                f"--cluster {self.address!r} is not an address: give ray://HOST:10001 or HOST:6379 of a cluster's head, auto for "
                "the cluster of this machine or of `ray job submit`, or local to start one here"
            )
        for name in ("samplers", "rewards", "environments", "restarts"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"--cluster.{name} must be at least 0, not {getattr(self, name)}")
        for name in ("cpus", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--cluster.{name} must be above 0 and finite, not {getattr(self, name):g}")
        if self.cpus > 1 and self.cpus != int(self.cpus):
            raise ConfigError(
                f"--cluster.cpus {self.cpus:g}: Ray takes whole numbers above 1; use {int(self.cpus)} or {int(self.cpus) + 1}"
            )

    @property
    def cli_flags(self) -> str:
        """The command-line options that give this configuration."""
        defaults = {field.name: field.default for field in fields(self)}
        changed = {name: getattr(self, name) for name in CLUSTER_OPTIONS if getattr(self, name) != defaults[name]}
        flags = [f"--cluster.{name} {value:g}" for name, value in changed.items()]
        return " ".join([f"--cluster {shlex.quote(self.address)}", *flags])


@dataclass(frozen=True)
class ActorGroup:
    """Actors of the same role, which share a placement group."""

    name: str
    count: int
    cpus: float
    gpus: int
    spread: bool  # spread over machines if possible; otherwise packed on as few as possible

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources that Ray reserves for each actor."""
        return [{"CPU": self.cpus, **({"GPU": float(self.gpus)} if self.gpus else {})} for _ in range(self.count)]


def plan_actor_groups(run: UncheckedRun, config: ClusterConfig, cluster_gpus: float) -> tuple[ActorGroup, ...]:
    """Return the groups that the run needs. With `cluster_gpus` in the full cluster, learner.device=auto is a GPU.
    Raises ConfigError for sampler actors beside an engine."""
    engine = run.sampler.engine
    if engine != LOCAL and config.samplers:
        raise ConfigError(
            f"--cluster.samplers {config.samplers} starts actors that sample, and sampler.engine={engine} samples too: use one of "
            "them"
        )
    device = run.learner.device
    gpu = int(device.startswith("cuda") or (device == "auto" and cluster_gpus > 0))
    samplers = (1 if engine == LOCAL else 0) if config.samplers is None else config.samplers
    environments = 0 if run.environment is None else config.environments
    groups = (
        ActorGroup(LEARNERS, run.learner.world_size, config.cpus, gpu, spread=False),
        ActorGroup(SAMPLERS, samplers, config.cpus, gpu, spread=True),
        ActorGroup(REWARDS, config.rewards, config.cpus, 0, spread=True),
        ActorGroup(ENVIRONMENTS, environments, config.cpus, 0, spread=True),
    )
    return tuple(group for group in groups if group.count)


def describe_shortage(groups: tuple[ActorGroup, ...], total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Return which CPUs and GPUs are missing for these actors, or ""; `total` and `free` are resources by Ray's names."""
    shortages = []
    for kind in ("CPU", "GPU"):
        needed = sum(bundle.get(kind, 0.0) for group in groups for bundle in group.bundles)
        if needed > free.get(kind, 0.0) + TOLERANCE:
            shortages.append(
                f"{needed:g} {kind}s, of which the cluster has {total.get(kind, 0.0):g}, {free.get(kind, 0.0):g} of them free"
            )
    if not shortages:
        return ""
    actors = ", ".join(f"{group.count} × {group.name}" for group in groups)
    return f"the run's actors ({actors}) need {', and '.join(shortages)}"
