"""A role's actors, asked as one: whoever has least to do is asked, and who dies is asked again once Ray has started it anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from policygrad.cluster.config import ClusterConfig
from policygrad.errors import ConfigError, EngineError, PolicygradError
from policygrad.rewards.imports import FILE_MODULE
from policygrad.rewards.waits import Phase, nobody
from policygrad.samplers.http import AwayError
from policygrad.samplers.servers import Server, Servers

SPARE = 100
"""Names that are tried for an actor, where one that is not gone yet has its name."""


@dataclass(frozen=True, eq=False)
class Site:
    """Where a run's actors are made: its name, the placement groups by role, the options."""

    run: str
    groups: dict[str, Any]
    config: ClusterConfig
    gpus: dict[str, int]
    """Of each actor, by role."""

    def actor(self, kind: type, role: str, number: int, **options: Any) -> Any:
        """An actor in its place; its name is what Ray's dashboard shows."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self.groups[role], placement_group_bundle_index=number)
        name = f"{self.run} {role} {number}"
        for spare in range(SPARE):
            try:
                return (
                    ray.remote(kind)
                    .options(
                        name=f"{name} ({spare + 1})" if spare else name,
                        num_cpus=self.config.cpus,
                        num_gpus=self.gpus[role],
                        scheduling_strategy=place,
                        **options,
                    )
                    .remote(name)
                )
            except ValueError as error:  # a predecessor's, whose end Ray has not seen yet
                if "name" not in str(error) or spare == SPARE - 1:
                    raise
        raise AssertionError


class Crew:
    """Actors of one role, by name. make_ready(actor): what one is told first, and again when it comes back."""

    def __init__(
        self,
        actors: dict[str, Any],
        make_ready: Callable[[Any], Awaitable[Any]],
        patience: float,
        role: str,
        tell: Phase = nobody,
    ) -> None:
        self._actors, self._make_ready, self._patience, self._role = actors, make_ready, patience, role
        self.servers = Servers(list(actors), self._prepare, 1, patience, tell)

    def __len__(self) -> int:
        return len(self._actors)

    async def ask(self, method: str, *args: Any) -> Any:
        """What an actor's method returns; each has one question at a time, the others wait here.

        Raises:
            EngineError: none of them comes back. Any other PolicygradError: the actor's own.
        """
        try:
            return await self.servers.call(lambda server: answered(self._actor(server), method, *args))
        except EngineError as error:
            if not all(server.lost for server in self.servers.all):
                raise
            raise EngineError(gone(self._role, self._patience, self.servers.all)) from error

    async def ready(self) -> None:
        """Returns when each has been told what it is told first, or is being started again while others have.

        Raises:
            EngineError: none of them comes back.
        """
        try:
            await self.servers.ready()
        except EngineError as error:
            if not all(server.lost for server in self.servers.all):
                raise
            raise EngineError(gone(self._role, self._patience, self.servers.all)) from error

    def close(self) -> None:
        """Ends them."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)

    def _actor(self, server: Server) -> Any:
        return self._actors[server.url]

    async def _prepare(self, server: Server) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._make_ready(self._actor(server))
        except TimeoutError as error:
            raise AwayError(f"not ready after {self._patience:g} s") from error


def gone(role: str, patience: float, servers: Sequence[Server]) -> str:
    """That no actor of a role is left, with the way out."""
    told = "; ".join(f"{server.url}: {' '.join(server.away.split())[:200]}" for server in servers)
    return (
        f"no {role} actor has come back within {patience:g} s ({told}): see `ray logs actor`, go on with --resume, and let Ray "
        "start them again more often, --cluster.restarts N, or give it longer, --cluster.patience SECONDS"
    )


async def answered(actor: Any, method: str, *args: Any) -> Any:
    """What it returns, or raises where that is ours.

    Raises:
        AwayError: the actor has died, or is being started again.
    """
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return await getattr(actor, method).remote(*args)
    except RayActorError as error:
        raise AwayError(str(error)) from error
    except RayTaskError as error:
        raise own(error) from error


def own(error: Any) -> BaseException:
    """A PolicygradError that was raised in an actor, or else Ray's error with the actor's traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, PolicygradError) else error


def sent(thing: Any, what: str) -> bytes:
    """As bytes, for another machine; what comes from a file of the user's or the script travels by value.

    Raises:
        ConfigError: what no pickle holds.
    """
    import sys

    for name, module in list(sys.modules.items()):
        if name.startswith(FILE_MODULE):
            cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(thing))
    except Exception as error:  # whatever an object's own __reduce__ raises
        raise ConfigError(
            f"{what} cannot be sent to an actor ({type(error).__name__}: {error}): create what cannot be pickled inside the "
            "function, or let it stay with rank 0, --cluster.rewards 0, --cluster.environments 0"
        ) from error
