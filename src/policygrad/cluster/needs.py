"""The actors of a run, and the room that they take: numbers alone, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policygrad.cluster.config import ClusterConfig
from policygrad.errors import ConfigError
from policygrad.samplers.config import LOCAL
from policygrad.training.config.run import Draft

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
