"""Episodes that take place in actors. One whose actor dies is played again up to where it was, by what the policy has said."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from policygrad.cluster.crew import Site, own, sent
from policygrad.cluster.needs import ENVIRONMENTS
from policygrad.environments import Action, Environment, EnvironmentFactory, Observation, Step
from policygrad.environments.base import made
from policygrad.errors import EngineError
from policygrad.tasks.types import Example

TOGETHER = 256
"""Calls that an actor has under way at a time; the others wait."""


@dataclass(eq=False)
class _Open:
    """An episode in its actor."""

    world: Environment
    said: list[Any] = field(default_factory=list)
    """What it has answered, call by call."""


class Environments:
    """The actor: worlds by the number of their episode."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._factory: EnvironmentFactory | None = None
        self._open: dict[int, _Open] = {}

    def __repr__(self) -> str:
        return self._name

    async def call(self, code: bytes, number: int, example: Example, seed: int, calls: list[Any]) -> list[Any]:
        """The answers to these calls, `reset` and then actions, the last of which is new; the first ones are made again where this
        actor does not know of them."""
        if self._factory is None:
            self._factory = pickle.loads(code)
        if number not in self._open:
            self._open[number] = _Open(made(self._factory, example, seed))
        here = self._open[number]
        for action in calls[len(here.said) :]:
            here.said.append(await _answer(here.world, action))
        return here.said

    async def cut(self, code: bytes, number: int, example: Example, seed: int, calls: list[Any]) -> float | None:
        """As `Cut.cut` after these calls, where the world has one."""
        await self.call(code, number, example, seed, calls)
        cut = getattr(self._open[number].world, "cut", None)
        return None if cut is None else await cut()

    async def close(self, number: int) -> None:
        """Lets go of an episode."""
        here = self._open.pop(number, None)
        close = getattr(here.world, "close", None) if here is not None else None
        if close is not None and inspect.isawaitable(closed := close()):
            await closed


async def _answer(world: Environment, action: Action | None) -> Any:
    method = "reset" if action is None else "step"
    found: Any = world.reset() if action is None else world.step(action)
    if not inspect.isawaitable(found):
        raise EngineError(f"{type(world).__name__}.{method} is not async: write `async def {method}`")
    return await found


class RayEnvironments:
    """Makes a run's environments in actors, by turns."""

    def __init__(self, site: Site, number: int, factory: EnvironmentFactory) -> None:
        self._code = sent(factory, "the environment")
        self._actors = [
            site.actor(
                Environments,
                ENVIRONMENTS,
                i,
                max_restarts=site.config.restarts,
                max_task_retries=site.config.restarts,  # a call says all that came before it
                max_concurrency=TOGETHER,
            )
            for i in range(number)
        ]
        self._count = count()

    def __call__(self, example: Example, seed: int) -> RayEnvironment:
        return RayEnvironment(self, next(self._count), example, seed)

    async def ask(self, number: int, method: str, *args: Any) -> Any:
        """Of the actor that an episode is in, or, where Ray has given that up, of another.

        Raises:
            EngineError: none is left.
        """
        from ray.exceptions import RayActorError, RayTaskError

        while self._actors:
            actor = self._actors[number % len(self._actors)]
            try:
                return await getattr(actor, method).remote(*args)
            except RayTaskError as error:
                raised = own(error)
                cause = getattr(raised, "cause", None)  # what the environment itself has raised
                raise cause if isinstance(cause, Exception) else raised from error
            except RayActorError:
                self._actors = [other for other in self._actors if other is not actor]
        raise EngineError(
            f"no {ENVIRONMENTS} actor is left: see `ray logs actor`, go on with --resume, and let Ray start them again more often, "
            "--cluster.restarts N"
        )

    @property
    def code(self) -> bytes:
        """What makes the worlds, for an actor."""
        return self._code


class RayEnvironment:
    """One episode, as `Environment`."""

    def __init__(self, home: RayEnvironments, number: int, example: Example, seed: int) -> None:
        self._home, self._number, self._example, self._seed = home, number, example, seed
        self._calls: list[Any] = []
        self._said: list[Any] = []

    async def reset(self) -> Observation:
        """What the policy reads first."""
        return await self._next(None)  # type: ignore[no-any-return]

    async def step(self, action: Action) -> Step:
        """What the world says to an action."""
        return await self._next(action)  # type: ignore[no-any-return]

    async def cut(self) -> float | None:
        """As `Cut.cut`; None where the world has none."""
        return await self._ask("cut")  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Lets go of it."""
        await self._home.ask(self._number, "close", self._number)

    async def _next(self, action: Action | None) -> Any:
        self._calls.append(action)
        found = await self._ask("call")
        if found[:-1] != self._said:
            raise EngineError(
                f"an actor of the {ENVIRONMENTS} died, and the episode of {self._example.source or 'an example'}, played again "
                "with the same actions, went another way: a world that is no function of its example, seed and actions has to stay "
                "with rank 0, --cluster.environments 0"
            )
        self._said = found
        return found[-1]

    async def _ask(self, method: str) -> Any:
        home = self._home
        return await home.ask(self._number, method, home.code, self._number, self._example, self._seed, self._calls)
