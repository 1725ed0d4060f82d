"""A role's actors, asked as one: whoever has least to do is asked, and who dies is asked again once Ray has started it anew."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import subprocess
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from policygrad.cluster.config import ENVIRONMENTS, LEARNERS, REWARDS, SAMPLERS, ClusterConfig
from policygrad.core.metrics import Metrics, Sum
from policygrad.environments import Action, Environment, EnvironmentFactory, Observation, Step
from policygrad.environments.base import make_environment
from policygrad.errors import ConfigError, DataError, EngineError, PolicygradError
from policygrad.learners.fsdp.processes import WorkerLauncher
from policygrad.learners.fsdp.sharding import ModelSkeleton
from policygrad.models.moe_routing import Routing
from policygrad.models.tokenizer import Tokenizer, pad_token_id
from policygrad.rewards import Reward, RewardPool
from policygrad.rewards.config import RewardConfig
from policygrad.rewards.workers.messages import SampleResult
from policygrad.rewards.workers.pool import IncrementalScoring, RewardScorer
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.engines.base import gather_or_cancel
from policygrad.samplers.engines.http import ServerUnavailableError
from policygrad.samplers.engines.server_pool import EngineServer, ServerPool
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.tasks.base import Example
from policygrad.utils.async_runner import AsyncRunner
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.utils.user_code import FILE_MODULE
from policygrad.weight_sync.base import PublishedWeights

MAX_NAME_ATTEMPTS = 100
"""Names that are tried for an actor, where one that is not gone yet has its name."""


@dataclass(frozen=True, eq=False)
class ActorFactory:
    """Where a run's actors are made: its name, the placement groups by role, the options."""

    run: str
    groups: dict[str, Any]
    config: ClusterConfig
    gpus: dict[str, int]
    """Of each actor, by role."""

    def create(self, kind: type, role: str, number: int, **options: Any) -> Any:
        """An actor in its place; its name is what Ray's dashboard shows."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self.groups[role], placement_group_bundle_index=number)
        name = f"{self.run} {role} {number}"
        for attempt in range(MAX_NAME_ATTEMPTS):
            try:
                return (
                    ray.remote(kind)
                    .options(
                        name=f"{name} ({attempt + 1})" if attempt else name,
                        num_cpus=self.config.cpus,
                        num_gpus=self.gpus[role],
                        scheduling_strategy=place,
                        **options,
                    )
                    .remote(name)
                )
            except ValueError as error:  # a predecessor's, whose end Ray has not seen yet
                if "name" not in str(error) or attempt == MAX_NAME_ATTEMPTS - 1:
                    raise
        raise AssertionError


class ActorPool:
    """Actors of one role, by name. make_ready(actor): what one is told first, and again when it comes back."""

    def __init__(
        self,
        actors: dict[str, Any],
        make_ready: Callable[[Any], Awaitable[Any]],
        timeout: float,
        role: str,
        tell: ProgressCallback = ignore_progress,
    ) -> None:
        self._actors, self._make_ready, self._timeout, self._role = actors, make_ready, timeout, role
        self.servers = ServerPool(list(actors), self._prepare, 1, timeout, tell)

    def __len__(self) -> int:
        return len(self._actors)

    async def call(self, method: str, *args: Any) -> Any:
        """What an actor's method returns; each has one question at a time, the others wait here.

        Raises:
            EngineError: none of them comes back. Any other PolicygradError: the actor's own.
        """
        try:
            return await self.servers.call(lambda server: call_actor(self._actor(server), method, *args))
        except EngineError as error:
            if not all(server.given_up for server in self.servers.all):
                raise
            raise EngineError(unavailable_message(self._role, self._timeout, self.servers.all)) from error

    async def wait_ready(self) -> None:
        """Returns when each has been told what it is told first, or is being started again while others have.

        Raises:
            EngineError: none of them comes back.
        """
        try:
            await self.servers.ready()
        except EngineError as error:
            if not all(server.given_up for server in self.servers.all):
                raise
            raise EngineError(unavailable_message(self._role, self._timeout, self.servers.all)) from error

    def close(self) -> None:
        """Ends them."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)

    def _actor(self, server: EngineServer) -> Any:
        return self._actors[server.url]

    async def _prepare(self, server: EngineServer) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._make_ready(self._actor(server))
        except TimeoutError as error:
            raise ServerUnavailableError(f"not ready after {self._timeout:g} s") from error


def unavailable_message(role: str, timeout: float, servers: Sequence[EngineServer]) -> str:
    """That no actor of a role is left, with the way out."""
    reasons = "; ".join(f"{server.url}: {' '.join(server.last_error.split())[:200]}" for server in servers)
    return (
        f"no {role} actor has come back within {timeout:g} s ({reasons}): see `ray logs actor`, go on with --resume, and let Ray "
        "start them again more often, --cluster.restarts N, or give it longer, --cluster.timeout SECONDS"
    )


async def call_actor(actor: Any, method: str, *args: Any) -> Any:
    """What it returns, or raises where that is ours.

    Raises:
        ServerUnavailableError: the actor has died, or is being started again.
    """
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return await getattr(actor, method).remote(*args)
    except RayActorError as error:
        raise ServerUnavailableError(str(error)) from error
    except RayTaskError as error:
        raise unwrap_error(error) from error


def unwrap_error(error: Any) -> BaseException:
    """A PolicygradError that was raised in an actor, or else Ray's error with the actor's traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, PolicygradError) else error


def serialise(value: Any, what: str) -> bytes:
    """As bytes, for another machine; what comes from a file of the user's or the script travels by value.

    Raises:
        ConfigError: what no pickle holds.
    """
    import sys

    for name, module in list(sys.modules.items()):
        if name.startswith(FILE_MODULE):
            cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # whatever an object's own __reduce__ raises
        raise ConfigError(
            f"{what} cannot be sent to an actor ({type(error).__name__}: {error}): create what cannot be pickled inside the "
            "function, or let it stay with rank 0, --cluster.rewards 0, --cluster.environments 0"
        ) from error


# Completions drawn by actors, each with a whole policy of its own; weights go by Ray's object store.

CHUNKS_PER_ACTOR = 2
"""Per actor, where there are several: whoever is faster takes more, and less is drawn again where one dies."""


class SamplerActor:
    """The actor. It has nothing of its own that another could not be given."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._local: LocalSampler | None = None

    def __repr__(self) -> str:
        return self._name

    def load(self, frame: Sequence[Any], weights: Sequence[Any], version: int) -> None:
        """frame: a reference to (blueprint, weights that stay, end tokens, padding, whether routes are kept). weights: one to those
        that are published. Inside lists, so that only who needs them fetches them."""
        import ray

        if self._local is None:
            blueprint, still, end, pad, routed = ray.get(frame[0])
            device = torch.device("cuda" if torch.cuda.is_available() and ray.get_gpu_ids() else "cpu")
            model = blueprint.empty(device).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in still:
                        parameter.copy_(still[name])
            self._local = LocalSampler(model, end, pad, Routing.for_model(model) if routed else None)
        parameters = dict(self._local.model.named_parameters())
        with torch.no_grad():
            for name, tensor in ray.get(weights[0]).items():
                parameters[name].copy_(tensor)
        self._local.version = version

    def draw(self, requests: Sequence[Request]) -> list[Generation]:
        """As `LocalSampler.generate`."""
        assert self._local is not None  # it is asked once it is ready
        return asyncio.run(self._local.generate(requests))


class RaySampler:
    """Shares of a batch, each drawn by an actor. A generation depends on its request and the weights alone, so whoever draws it,
    and however often it had to be asked for, it is the same up to the rounding of a differently shaped matrix product."""

    def __init__(self, actors: ActorFactory, count: int, model: nn.Module, tokenizer: Tokenizer, routed: bool) -> None:
        handles = {
            f"{SAMPLERS} {i}": actors.create(SamplerActor, SAMPLERS, i, max_restarts=actors.config.restarts)
            for i in range(count)
        }
        self._pool = ActorPool(handles, self._ready, actors.config.timeout, SAMPLERS)
        self._model, self._routed = model, routed
        self._how = (tokenizer.end_ids, pad_token_id(tokenizer))
        self._setup: Any = None
        self._weights: Any = None
        self._version, self._moved = -1, 0

    async def update(self, weights: PublishedWeights) -> Metrics:
        """Returns when every actor has the weights, or is being started again while others have them."""
        import ray

        if self._setup is None:
            still = {name: p for name, p in self._model.named_parameters() if name not in weights.tensors}
            self._setup = ray.put((ModelSkeleton.of(self._model, 1.0), _on_cpu(still), *self._how, self._routed))
        self._weights, self._version = ray.put(_on_cpu(weights.tensors)), weights.version
        await self._pool.wait_ready()
        moved, self._moved = self._pool.servers.num_retries - self._moved, self._pool.servers.num_retries
        return {"sampler/moved": Sum(float(moved))}

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation per request, in their order.

        Raises:
            EngineError: no actor comes back.
        """
        parts = len(self._pool) * (CHUNKS_PER_ACTOR if len(self._pool) > 1 else 1)
        bounds = [len(requests) * i // parts for i in range(parts + 1)]  # neighbours share what they have read
        shares = [list(requests[a:b]) for a, b in pairwise(bounds) if b > a]
        drawn: list[Any] = await gather_or_cancel([self._pool.call("draw", share) for share in shares])
        return [generation for share in drawn for generation in share]

    async def close(self) -> None:
        """Ends the actors."""
        await self._pool.servers.close()
        self._pool.close()

    async def _ready(self, actor: Any) -> None:
        await call_actor(actor, "load", [self._setup], [self._weights], self._version)


def _on_cpu(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}


# Completions judged by actors, each of which holds a `RewardPool`: its workers can be killed, its budgets and walls hold there.


class RewardActor:
    """The actor."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: RewardPool | None = None

    def __repr__(self) -> str:
        return self._name

    def begin(self, rewards: bytes, how: RewardConfig) -> None:
        """Starts the workers, once."""
        if self._pool is None:
            self._pool = RewardPool.from_config(pickle.loads(rewards), how)

    def run_rewards(
        self, prompts: list[Any], completions: list[str], columns: dict[str, list[Any]], process_rewards: bool
    ) -> list[list[SampleResult]]:
        """Return the results by reward, then by completion."""
        assert self._pool is not None  # it is called once it is ready
        return self._pool.run_rewards(prompts, completions, columns, process_rewards=process_rewards)[1]


class RayRewardPool(RewardScorer):
    """Scores completions by actors. A call that was lost with its actor is repeated: none of its results had arrived."""

    def __init__(
        self, actors: ActorFactory, count: int, rewards: Sequence[Reward], how: RewardConfig, tell: ProgressCallback
    ) -> None:
        self.rewards, self._how = tuple(rewards), how
        self._code = serialise(self.rewards, "a reward")
        handles = {
            f"{REWARDS} {i}": actors.create(RewardActor, REWARDS, i, max_restarts=actors.config.restarts)
            for i in range(count)
        }
        self._pool = ActorPool(handles, self._ready, actors.config.timeout, REWARDS, tell)
        self._wait = AsyncRunner()

    def close(self) -> None:
        self._wait(self._pool.servers.close())
        self._wait.close()
        self._pool.close()

    def run_rewards(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        process_rewards: bool,
        incremental: IncrementalScoring | None = None,
    ) -> tuple[list[Reward], list[list[SampleResult]]]:
        chosen = [reward for reward in self.rewards if reward.process_reward is process_rewards]
        count = len(completions)
        for name, values in (("prompts", prompts), *columns.items()):
            if len(values) != count:
                raise DataError(f"{name!r} has {len(values)} values for {count} completions; give one for each")
        batched = any(reward.batched for reward in chosen)  # which is to see the whole batch
        parts = 1 if batched else min(len(self._pool), max(count, 1))
        bounds = [count * i // parts for i in range(parts + 1)]
        calls = [
            self._pool.call(
                "run_rewards",
                list(prompts[a:b]),
                list(completions[a:b]),
                {name: list(values[a:b]) for name, values in columns.items()},
                process_rewards,
            )
            for a, b in pairwise(bounds)
        ]
        tables: list[Any] = self._wait(gather_or_cancel(calls))
        return chosen, [[result for table in tables for result in table[row]] for row in range(len(chosen))]

    async def _ready(self, actor: Any) -> None:
        await call_actor(actor, "begin", self._code, self._how)


# Episodes that take place in actors. One whose actor dies is played again up to where it was, by what the policy has said.

MAX_CONCURRENT_CALLS = 256
"""Calls that an actor has under way at a time; the others wait."""


@dataclass(eq=False)
class _Episode:
    """An episode in its actor."""

    world: Environment
    responses: list[Any] = field(default_factory=list)
    """What it has answered, call by call."""


class EnvironmentActor:
    """The actor: worlds by the number of their episode."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._factory: EnvironmentFactory | None = None
        self._episodes: dict[int, _Episode] = {}

    def __repr__(self) -> str:
        return self._name

    async def call(self, code: bytes, number: int, example: Example, seed: int, calls: list[Any]) -> list[Any]:
        """The answers to these calls, `reset` and then actions, the last of which is new; the first ones are made again where this
        actor does not know of them."""
        if self._factory is None:
            self._factory = pickle.loads(code)
        if number not in self._episodes:
            self._episodes[number] = _Episode(make_environment(self._factory, example, seed))
        episode = self._episodes[number]
        for action in calls[len(episode.responses) :]:
            episode.responses.append(await _call_environment(episode.world, action))
        return episode.responses

    async def on_truncated(
        self, code: bytes, number: int, example: Example, seed: int, calls: list[Any]
    ) -> float | None:
        """As `SupportsTruncation.on_truncated` after these calls, where the world has one."""
        await self.call(code, number, example, seed, calls)
        on_truncated = getattr(self._episodes[number].world, "on_truncated", None)
        return None if on_truncated is None else await on_truncated()

    async def close(self, number: int) -> None:
        """Lets go of an episode."""
        episode = self._episodes.pop(number, None)
        close = getattr(episode.world, "close", None) if episode is not None else None
        if close is not None and inspect.isawaitable(closed := close()):
            await closed


async def _call_environment(world: Environment, action: Action | None) -> Any:
    method = "reset" if action is None else "step"
    response: Any = world.reset() if action is None else world.step(action)
    if not inspect.isawaitable(response):
        raise EngineError(f"{type(world).__name__}.{method} is not async: write `async def {method}`")
    return await response


class RayEnvironmentFactory:
    """Makes a run's environments in actors, by turns."""

    def __init__(self, actors: ActorFactory, number: int, factory: EnvironmentFactory) -> None:
        self._code = serialise(factory, "the environment")
        self._actors = [
            actors.create(
                EnvironmentActor,
                ENVIRONMENTS,
                i,
                max_restarts=actors.config.restarts,
                max_task_retries=actors.config.restarts,  # a call says all that came before it
                max_concurrency=MAX_CONCURRENT_CALLS,
            )
            for i in range(number)
        ]
        self._count = count()

    def __call__(self, example: Example, seed: int) -> RayEnvironment:
        return RayEnvironment(self, next(self._count), example, seed)

    async def call(self, number: int, method: str, *args: Any) -> Any:
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
                raised = unwrap_error(error)
                cause = getattr(raised, "cause", None)  # what the environment itself has raised
                raise cause if isinstance(cause, Exception) else raised from error
            except RayActorError:
                self._actors = [other for other in self._actors if other is not actor]
        raise EngineError(
            f"no {ENVIRONMENTS} actor is left: see `ray logs actor`, go on with --resume, and let Ray start them again more often, "
            "--cluster.restarts N"
        )

    @property
    def factory_bytes(self) -> bytes:
        """What makes the worlds, for an actor."""
        return self._code


class RayEnvironment:
    """One episode, as `Environment`."""

    def __init__(self, home: RayEnvironmentFactory, number: int, example: Example, seed: int) -> None:
        self._factory, self._number, self._example, self._seed = home, number, example, seed
        self._calls: list[Any] = []
        self._responses: list[Any] = []

    async def reset(self) -> Observation:
        """What the policy reads first."""
        return await self._advance(None)  # type: ignore[no-any-return]

    async def step(self, action: Action) -> Step:
        """What the world says to an action."""
        return await self._advance(action)  # type: ignore[no-any-return]

    async def on_truncated(self) -> float | None:
        """As `SupportsTruncation.on_truncated`; None where the world has none."""
        return await self._call("on_truncated")  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Lets go of it."""
        await self._factory.call(self._number, "close", self._number)

    async def _advance(self, action: Action | None) -> Any:
        self._calls.append(action)
        responses = await self._call("call")
        if responses[:-1] != self._responses:
            raise EngineError(
                f"an actor of the {ENVIRONMENTS} died, and the episode of {self._example.source or 'an example'}, played again "
                "with the same actions, went another way: a world that is no function of its example, seed and actions has to stay "
                "with rank 0, --cluster.environments 0"
            )
        self._responses = responses
        return responses[-1]

    async def _call(self, method: str) -> Any:
        home = self._factory
        return await home.call(
            self._number, method, home.factory_bytes, self._number, self._example, self._seed, self._calls
        )


# Processes of rank 1 and above as actors: Ray places and starts them, torch.distributed is between them as ever.

FAILURE_CODE = 1
"""The exit code of one that has ended before its time."""


class LearnerActor:
    """The actor. It has a share of the weights, and is worth nothing without the others: Ray starts rank 0 again, which starts the
    others."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def follow(self, host: str, port: int, rank: int, size: int) -> int:
        """Does what rank 0 says, until that is over; the exit code."""
        from policygrad.learners.fsdp.processes import WorkerGroup
        from policygrad.learners.fsdp.worker import serve_controller

        try:
            return serve_controller(WorkerGroup.join(port, rank, size, host, device=0))
        except BaseException:  # at once, so that nobody waits for what this one holds
            traceback.print_exc()
            os._exit(FAILURE_CODE)


class _ActorProcess:
    """An actor that follows, as a process."""

    def __init__(self, actor: Any, done: Any) -> None:
        self._actor, self._done = actor, done
        self._code: int | None = None
        self.lost = False
        """Whether it has ended without being asked to."""

    def poll(self) -> int | None:
        return self._poll(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("follow", timeout or 0.0)
        return code

    def kill(self) -> None:
        import ray

        if self._code is None:
            self._poll(0.0)
        ray.kill(self._actor)
        self._code = FAILURE_CODE if self._code is None else self._code

    def _poll(self, timeout: float | None) -> int | None:
        import ray
        from ray.exceptions import RayError

        if self._code is None and ray.wait([self._done], timeout=timeout)[0]:
            try:
                self._code = int(ray.get(self._done))
            except RayError:
                self._code = FAILURE_CODE
            self.lost = self._code != 0
        return self._code


class LearnerActors:
    """Those that rank 0 has started."""

    def __init__(self, site: ActorFactory) -> None:
        self._actors = site
        self._all: list[_ActorProcess] = []

    @property
    def launcher(self) -> WorkerLauncher:
        """Where `WorkerGroup` starts them."""
        from ray.util import get_node_ip_address

        return WorkerLauncher(self._start, get_node_ip_address())

    @property
    def lost(self) -> bool:
        """Whether one has died."""
        return any(one.lost for one in self._all)

    def _start(self, host: str, port: int, rank: int, size: int) -> _ActorProcess:
        actor = self._actors.create(LearnerActor, LEARNERS, rank)
        self._all.append(_ActorProcess(actor, actor.follow.remote(host, port, rank, size)))
        return self._all[-1]
