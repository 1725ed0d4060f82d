"""Ray actors that sample, score, run episodes and learn, and the run's side of them.

A pool gives each call to the actor with the fewest pending calls, and repeats the calls of an actor that dies once Ray has
restarted it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, pairwise
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from policygrad.cluster.config import ENVIRONMENTS, LEARNERS, REWARDS, SAMPLERS, ActorGroup, ClusterConfig
from policygrad.cluster.watch import Place, await_unless_silent
from policygrad.core.metrics import Metrics, Sum
from policygrad.errors import ConfigError, EngineError, PolicygradError
from policygrad.learners.fsdp.processes import WorkerLauncher
from policygrad.learners.fsdp.sharding import ModelSkeleton
from policygrad.models.moe_routing import Routing
from policygrad.models.tokenizer import Tokenizer, pad_token_id
from policygrad.rewards.base import Reward
from policygrad.rewards.config import RewardConfig
from policygrad.rewards.workers.messages import SampleResult, Samples, select_samples
from policygrad.rewards.workers.pool import IncrementalScoring, RewardPool, RewardScorer, check_lengths
from policygrad.rollout.environment import Action, Environment, EnvironmentFactory, Observation, Step, make_environment
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.http import ServerUnavailableError
from policygrad.samplers.engines.server_pool import EngineServer, ServerPool
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.tasks.base import Example
from policygrad.training.config.run import Run
from policygrad.training.placement import Placement
from policygrad.utils.async_runner import AsyncRunner, gather_or_cancel
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.utils.user_code import FILE_MODULE
from policygrad.weight_sync.base import PublishedWeights

MAX_NAME_ATTEMPTS = 100  # names to try for an actor while a dead one still has its name
CHUNKS_PER_ACTOR = 2  # with several samplers: a faster one takes more, and less is repeated when one dies
MAX_CONCURRENT_CALLS = 256  # calls that an actor of environments runs at a time; others wait
FAILURE_CODE = 1  # exit code of a learner that died


class NamedActor:
    """An actor whose name Ray's dashboard and logs show."""

    _place: Place | None = None

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def place(self) -> Place:
        """Return where this actor is. Ray's head is asked once, so that no later call needs it."""
        import ray

        if self._place is None:
            node_id = ray.get_runtime_context().get_node_id()
            (node,) = [node for node in ray.nodes() if node["NodeID"] == node_id]
            self._place = node["NodeManagerAddress"], node["NodeManagerPort"]
        return self._place


@dataclass(frozen=True, eq=False)
class ActorFactory:
    """Creates a run's actors."""

    run: str  # the run's name
    groups: dict[str, Any]  # placement groups by role
    config: ClusterConfig
    gpus: dict[str, int]  # GPUs of each actor, by role

    def create(self, kind: type, role: str, number: int, **options: Any) -> Any:
        """Create an actor in its placement group, named for Ray's dashboard."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self.groups[role], placement_group_bundle_index=number)
        name = f"{self.run} {role} {number}"
        options |= {"num_cpus": self.config.cpus, "num_gpus": self.gpus[role], "scheduling_strategy": place}
        for attempt in range(MAX_NAME_ATTEMPTS):
            try:
                options["name"] = f"{name} ({attempt + 1})" if attempt else name
                return ray.remote(kind).options(**options).remote(name)
            except ValueError as error:  # Ray has not noticed yet that a predecessor is dead
                if "name" not in str(error) or attempt == MAX_NAME_ATTEMPTS - 1:
                    raise
        raise AssertionError

    def create_pool(
        self, kind: type, role: str, size: int, on_progress: ProgressCallback = ignore_progress
    ) -> ActorPool:
        """Create actors of one role with a pool to call them."""
        restarts = self.config.restarts
        handles = {f"{role} {i}": self.create(kind, role, i, max_restarts=restarts) for i in range(size)}
        return ActorPool(handles, self.config.timeout, role, on_progress)


class ActorPool:
    """Actors of one role, by name, as servers of a `ServerPool`."""

    setup: tuple[Any, ...]  # the method that prepares an actor at the start and when it comes back, and its arguments

    def __init__(self, actors: dict[str, Any], timeout: float, role: str, on_progress: ProgressCallback) -> None:
        """`timeout`: seconds to wait for an actor to come back."""
        self._actors, self._timeout, self._role = actors, timeout, role
        self._places: dict[str, Place] = {}
        self.servers = ServerPool(
            list(actors),
            self._prepare,
            max_concurrency=1,
            recovery_timeout=timeout,
            on_progress=on_progress,
        )

    def __len__(self) -> int:
        return len(self._actors)

    async def call(self, method: str, *args: Any) -> Any:
        """Return the result of an actor's method. An actor has one call at a time, others wait.

        Raises:
            PolicygradError: The method has raised it.
            EngineError: No actor comes back.
        """
        with self._explaining():
            return await self.servers.call(lambda server: self._call(server, method, *args))

    async def wait_ready(self) -> None:
        """Wait until every actor is prepared, or is restarting while others are. Raises EngineError if no actor comes back."""
        with self._explaining():
            await self.servers.ready()

    def close(self) -> None:
        """Kill the actors."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)

    async def _prepare(self, server: EngineServer) -> None:
        actor = self._actors[server.url]
        await call_actor(actor, *self.setup, timeout=self._timeout)
        self._places[server.url] = await call_actor(actor, "place", timeout=self._timeout)

    async def _call(self, server: EngineServer, method: str, *args: Any) -> Any:
        return await call_actor(
            self._actors[server.url], method, *args, place=self._places[server.url], silence=self._timeout
        )

    def _describe(self, server: EngineServer) -> str:
        place = f" on {self._places[server.url][0]}" if server.url in self._places else ""
        return f"{server.url}{place}: {' '.join(server.last_error.split())[:200]}"

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            servers = self.servers.all
            if not all(server.given_up for server in servers):
                raise
            reasons = "; ".join(map(self._describe, servers))
            raise EngineError(
                f"no {self._role} actor has come back within {self._timeout:g} s ({reasons}): see `ray logs actor`, resume with "
                "--resume, and let Ray restart them more often, --cluster.restarts N, or wait longer, --cluster.timeout SECONDS"
            ) from error


async def call_actor(
    actor: Any, method: str, *args: Any, timeout: float | None = None, place: Place | None = None, silence: float = 0.0
) -> Any:
    """Return the result of an actor's method.

    Args:
        timeout: Seconds that it may take.
        place: Where the actor is; None = its machine is not watched.
        silence: Seconds for which its machine may be silent.

    Raises:
        PolicygradError: The method has raised it.
        ServerUnavailableError: The actor has died, is restarting, or needs more than `timeout` seconds; or its machine is silent.
    """
    from ray.exceptions import RayActorError, RayTaskError

    try:
        async with asyncio.timeout(timeout):
            reply = getattr(actor, method).remote(*args)
            return await (reply if place is None else await_unless_silent(reply, place, silence))
    except RayActorError as error:
        raise ServerUnavailableError(str(error)) from error
    except RayTaskError as error:
        raise unwrap_error(error) from error
    except TimeoutError as error:
        raise ServerUnavailableError(f"not ready after {timeout:g} s") from error


def unwrap_error(error: Any) -> BaseException:
    """Return the PolicygradError that an actor has raised, or else Ray's error with the actor's traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, PolicygradError) else error


def serialise(value: Any, what: str) -> bytes:
    """Pickle a value for another machine; classes from the user's files are sent by value.

    Raises:
        ConfigError: It cannot be pickled.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(FILE_MODULE):
            cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise ConfigError(
            f"{what} cannot be sent to an actor ({type(error).__name__}: {error}): create what cannot be pickled inside the "
            "function, or keep it with rank 0, --cluster.rewards 0, --cluster.environments 0"
        ) from error


# Sampling: each actor has the full policy; weights are sent by Ray's object store.


class SamplerActor(NamedActor):
    """Samples completions. Its state can be rebuilt from the arguments of `load`."""

    _local: LocalSampler | None = None

    def load(self, setup: Sequence[Any], weights: Sequence[Any], version: int) -> None:
        """Load weights, and build the model first from (skeleton, constant weights, end tokens, padding, whether
        to record experts, whether to use CUDA graphs, and kernels). Both are references, in lists so that they are fetched only
        where they are needed."""
        import ray

        if self._local is None:
            skeleton, constant, end, pad, routed, cuda_graphs, kernels = ray.get(setup[0])
            device = torch.device("cuda" if torch.cuda.is_available() and ray.get_gpu_ids() else "cpu")
            model = skeleton.build_empty(device).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in constant:
                        parameter.copy_(constant[name])
            routing = Routing.for_model(model) if routed else None
            self._local = LocalSampler(model, end, pad, routing, cuda_graphs=cuda_graphs, kernels=kernels)
            self._local.caches_texts = False  # a conversation's next turn may come to another actor
        parameters = dict(self._local.model.named_parameters())
        with torch.no_grad():
            for name, tensor in ray.get(weights[0]).items():
                parameters[name].copy_(tensor)
        self._local.version = version

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        assert self._local is not None  # `load` comes first
        return asyncio.run(self._local.generate(requests))


class RaySampler:
    """Divides batches between sampler actors.

    A generation depends on its request and the weights alone, so it is the same whichever actor samples it and however often, up to
    the rounding of differently shaped matrix products.
    """

    def __init__(
        self,
        actors: ActorFactory,
        size: int,
        routed: bool,
        decoding: SamplerConfig,
        model: nn.Module,
        tokenizer: Tokenizer,
    ) -> None:
        self._pool = actors.create_pool(SamplerActor, SAMPLERS, size)
        options = (tokenizer.end_ids, pad_token_id(tokenizer), routed, decoding.cuda_graphs, decoding.kernels)
        self._model, self._options = model, options
        self._setup: Any = None
        self._retries = 0

    async def update(self, weights: PublishedWeights) -> Metrics:
        """Wait until every actor has the weights, or is restarting while others have them."""
        import ray

        if self._setup is None:
            constant = {name: p for name, p in self._model.named_parameters() if name not in weights.tensors}
            self._setup = ray.put((ModelSkeleton.of(self._model, 1.0), _to_cpu(constant), *self._options))
        self._pool.setup = ("load", [self._setup], [ray.put(_to_cpu(weights.tensors))], weights.version)
        await self._pool.wait_ready()
        before, self._retries = self._retries, self._pool.servers.num_retries
        return {"sampler/moved": Sum(float(self._retries - before))}

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Return one generation per request, in order. Raises EngineError if no actor comes back."""
        parts = len(self._pool) * (CHUNKS_PER_ACTOR if len(self._pool) > 1 else 1)
        bounds = [len(requests) * i // parts for i in range(parts + 1)]  # neighbours share a prompt
        chunks = [list(requests[a:b]) for a, b in pairwise(bounds) if b > a]
        sampled: list[Any] = await gather_or_cancel([self._pool.call("generate", chunk) for chunk in chunks])
        return list(chain.from_iterable(sampled))

    async def close(self) -> None:
        await self._pool.servers.close()
        self._pool.close()


def _to_cpu(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}


# Scoring: each actor has a `RewardPool`, whose workers can be killed, with their timeouts and sandboxes.


class RewardActor(NamedActor):
    """Scores completions in a reward pool of its own."""

    _pool: RewardPool | None = None

    def start(self, rewards: bytes, config: RewardConfig) -> None:
        if self._pool is None:
            self._pool = RewardPool.from_config(pickle.loads(rewards), config)

    def run_rewards(self, samples: Samples, process_rewards: bool) -> list[list[SampleResult]]:
        """Return the results by reward, then by completion."""
        assert self._pool is not None  # `start` comes first
        return self._pool.run_rewards(samples, process_rewards=process_rewards)[1]


class RayRewardPool(RewardScorer):
    """Divides batches between reward actors. The call of an actor that dies is repeated: none of its results have been used."""

    def __init__(
        self,
        actors: ActorFactory,
        size: int,
        rewards: Sequence[Reward],
        config: RewardConfig,
        on_progress: ProgressCallback,
    ) -> None:
        self.rewards = tuple(rewards)
        code = serialise(self.rewards, "a reward")
        self._pool = actors.create_pool(RewardActor, REWARDS, size, on_progress)
        self._pool.setup = ("start", code, config)
        self._run = AsyncRunner()

    def close(self) -> None:
        self._run(self._pool.servers.close())
        self._run.close()
        self._pool.close()

    def run_rewards(
        self, samples: Samples, *, process_rewards: bool, incremental: IncrementalScoring | None = None
    ) -> tuple[list[Reward], list[list[SampleResult]]]:
        check_lengths(samples)
        chosen = [reward for reward in self.rewards if reward.process_reward is process_rewards]
        size = len(samples[1])
        batched = any(reward.batched for reward in chosen)  # such a reward needs the full batch
        parts = 1 if batched else min(len(self._pool), max(size, 1))
        places = [range(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
        calls = [self._pool.call("run_rewards", select_samples(samples, part), process_rewards) for part in places]
        tables: list[Any] = self._run(gather_or_cancel(calls))
        return chosen, [[result for table in tables for result in table[row]] for row in range(len(chosen))]


# Environments: an episode whose actor dies is replayed in another from the policy's actions.


class EnvironmentActor(NamedActor):
    """Runs environments, by the number of their episode."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._factory: EnvironmentFactory | None = None
        self._episodes: dict[int, tuple[Environment, list[Any]]] = {}  # with the responses by call

    async def call(self, factory: bytes, number: int, example: Example, seed: int, calls: list[Any]) -> list[Any]:
        """Return the responses to `reset` (None) and actions; the last is new, and calls unknown to this actor are replayed."""
        if self._factory is None:
            self._factory = pickle.loads(factory)
        if number not in self._episodes:
            self._episodes[number] = make_environment(self._factory, example, seed), []
        environment, responses = self._episodes[number]
        for action in calls[len(responses) :]:
            pending: Any = environment.reset() if action is None else environment.step(action)
            if not inspect.isawaitable(pending):
                method = "reset" if action is None else "step"
                raise EngineError(f"{type(environment).__name__}.{method} is not async: write `async def {method}`")
            responses.append(await pending)
        return responses

    async def on_truncated(
        self, factory: bytes, number: int, example: Example, seed: int, calls: list[Any]
    ) -> float | None:
        """Call `on_truncated` after these calls, if the environment has it."""
        await self.call(factory, number, example, seed, calls)
        on_truncated = getattr(self._episodes[number][0], "on_truncated", None)
        return None if on_truncated is None else await on_truncated()

    async def read_reward_columns(
        self, factory: bytes, number: int, example: Example, seed: int, calls: list[Any]
    ) -> dict[str, Any]:
        """Return the attributes that the environment's `reward_columns` names, after these calls."""
        await self.call(factory, number, example, seed, calls)
        environment: Any = self._episodes[number][0]
        return {name: getattr(environment, name) for name in environment.reward_columns}

    async def close(self, number: int) -> None:
        """Close an episode."""
        environment, _ = self._episodes.pop(number, (None, []))
        close = getattr(environment, "close", None)
        if close is not None and inspect.isawaitable(closed := close()):
            await closed


class RayEnvironmentFactory:
    """Makes environments in actors, in turn."""

    def __init__(self, actors: ActorFactory, size: int, factory: EnvironmentFactory) -> None:
        self.factory_bytes = serialise(factory, "the environment")
        self.reward_columns = tuple(getattr(factory, "reward_columns", ()))
        restarts = actors.config.restarts  # a retry is safe: a call contains all calls before it
        options = {"max_restarts": restarts, "max_task_retries": restarts, "max_concurrency": MAX_CONCURRENT_CALLS}
        self._actors = [actors.create(EnvironmentActor, ENVIRONMENTS, i, **options) for i in range(size)]
        self._places: dict[Any, Place] = {}
        self._timeout, self._lost = actors.config.timeout, ""
        self._count = count()

    def __call__(self, example: Example, seed: int) -> RayEnvironment:
        return RayEnvironment(self, next(self._count), example, seed)

    async def call(self, number: int, method: str, *args: Any) -> Any:
        """Call an episode's actor, or another if Ray has given that one up or its machine is silent. Raises EngineError if no
        actor is left."""
        from ray.exceptions import RayActorError, RayTaskError

        while self._actors:
            actor = self._actors[number % len(self._actors)]
            place = self._places.get(actor)
            try:
                if place is None:
                    async with asyncio.timeout(self._timeout):
                        place = self._places[actor] = await actor.place.remote()
                return await await_unless_silent(getattr(actor, method).remote(*args), place, self._timeout)
            except RayTaskError as error:
                raised = unwrap_error(error)
                cause = getattr(raised, "cause", None)  # raised by the environment itself
                raise cause if isinstance(cause, Exception) else raised from error
            except (RayActorError, ServerUnavailableError, TimeoutError) as error:
                if isinstance(error, ServerUnavailableError) and self._places.pop(actor, None) is not None:
                    self._lost = str(error)  # Ray may have restarted it elsewhere, and then it says where
                    continue
                self._actors = [other for other in self._actors if other is not actor]
                self._lost = " ".join(str(error).split())[:200] or self._lost
        raise EngineError(
            f"no {ENVIRONMENTS} actor is left ({self._lost}): see `ray logs actor`, resume with --resume, and let Ray restart them "
            "more often, --cluster.restarts N"
        )


class RayEnvironment:
    """One episode, with the interface of `Environment`."""

    def __init__(self, factory: RayEnvironmentFactory, number: int, example: Example, seed: int) -> None:
        self._factory, self._number, self._example, self._seed = factory, number, example, seed
        self.reward_columns = factory.reward_columns
        self._calls: list[Any] = []
        self._responses: list[Any] = []

    async def reset(self) -> Observation:
        return await self._advance(None)  # type: ignore[no-any-return]

    async def step(self, action: Action) -> Step:
        return await self._advance(action)  # type: ignore[no-any-return]

    async def on_truncated(self) -> float | None:
        return await self._call("on_truncated")  # type: ignore[no-any-return]

    async def read_reward_columns(self) -> dict[str, Any]:
        return await self._call("read_reward_columns")  # type: ignore[no-any-return]

    async def close(self) -> None:
        await self._factory.call(self._number, "close", self._number)

    async def _advance(self, action: Action | None) -> Any:
        self._calls.append(action)
        responses = await self._call("call")
        if responses[:-1] != self._responses:
            raise EngineError(
                f"an actor of the {ENVIRONMENTS} died, and replaying the episode of "
                f"{self._example.source or 'an example'} with the same actions gave other responses: an environment "
                "that depends on more than its example, seed and actions must stay with rank 0, --cluster.environments 0"
            )
        self._responses = responses
        return responses[-1]

    async def _call(self, method: str) -> Any:
        arguments = (self._factory.factory_bytes, self._number, self._example, self._seed, self._calls)
        return await self._factory.call(self._number, method, *arguments)


# Learning: ranks above 0 as actors, which Ray places and starts; they communicate by torch.distributed as usual.


class LearnerActor(NamedActor):
    """A rank above 0. Its shard is useless without the others', so Ray restarts rank 0, which starts the others again."""

    def serve(self, host: str, port: int, rank: int, size: int, key: bytes) -> int:
        """Execute what rank 0 sends; return the exit code."""
        from policygrad.learners.fsdp.processes import WorkerGroup
        from policygrad.learners.fsdp.worker import serve_controller

        try:
            return serve_controller(WorkerGroup.join(port, rank, size, key, host, device=0))
        except BaseException:  # exit at once: other ranks may be waiting for this one
            traceback.print_exc()
            os._exit(FAILURE_CODE)


class _ActorProcess:
    """A learner actor with the interface of a process."""

    def __init__(self, actor: Any, done: Any) -> None:
        self._actor, self._done = actor, done
        self._code: int | None = None
        self.lost = False
        """It has ended before it was told to."""

    def wait(self, timeout: float | None = None) -> int:
        if (code := self.poll(timeout)) is None:
            raise subprocess.TimeoutExpired("serve", timeout or 0.0)
        return code

    def kill(self) -> None:
        import ray

        self.poll()
        ray.kill(self._actor)
        self._code = FAILURE_CODE if self._code is None else self._code

    def poll(self, timeout: float | None = 0.0) -> int | None:
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
    """Starts the ranks above 0 as actors."""

    def __init__(self, actors: ActorFactory) -> None:
        self._actors = actors
        self._processes: list[_ActorProcess] = []

    @property
    def launcher(self) -> WorkerLauncher:
        from ray.util import get_node_ip_address

        def start(host: str, port: int, rank: int, size: int, key: bytes) -> _ActorProcess:
            actor = self._actors.create(LearnerActor, LEARNERS, rank)
            self._processes.append(_ActorProcess(actor, actor.serve.remote(host, port, rank, size, key)))
            return self._processes[-1]

        return WorkerLauncher(start, get_node_ip_address())

    @property
    def lost(self) -> bool:
        """One of them has died."""
        return any(process.lost for process in self._processes)


def make_placement(
    actors: ActorFactory, groups: tuple[ActorGroup, ...], run: Run, learners: LearnerActors
) -> Placement:
    """Return where the parts of the run are computed."""
    counts = {group.name: group.count for group in groups}
    samplers, rewards, environments = (counts.get(name, 0) for name in (SAMPLERS, REWARDS, ENVIRONMENTS))
    return Placement(
        sampler=partial(RaySampler, actors, samplers, run.learner.routing_replay, run.sampler) if samplers else None,
        reward_pool=partial(RayRewardPool, actors, rewards) if rewards else None,
        environment=partial(RayEnvironmentFactory, actors, environments) if environments else None,
        learner_processes=learners.launcher if run.learner.world_size > 1 else None,
        cli_flags=actors.config.cli_flags,
    )
