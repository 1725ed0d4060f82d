"""Completions drawn by all the processes that learn together: each draws its share, with the whole policy that it has beside its
own part of it.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from policygrad.checkpoint.format import open_tensors
from policygrad.checkpoint.manifest import shard_name
from policygrad.checkpoint.shards import ShardFile, TensorShard, write_shard_file
from policygrad.errors import CheckpointError, PolicygradError
from policygrad.learners.base import Learner
from policygrad.learners.fsdp.controller import FsdpController, defer_signals
from policygrad.learners.fsdp.learner import FsdpLearner
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.models.moe_routing import Routing
from policygrad.rollout.serialization import LEFTOVER_PREFIX, QUEUED_PREFIX
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.training.setup import Resources
from policygrad.weight_sync.base import PublishedWeights


class ShardedLocalSampler:
    """A local sampler in every process, on the weights that the learner has published there. What is drawn for a request does not
    depend on which of them draws it, up to the rounding of a differently shaped matrix product."""

    def __init__(self, local: LocalSampler, learner: FsdpController) -> None:
        self._local, self._learner = local, learner
        self._how = (frozenset(local.end.tolist()), local.pad)

    async def update(self, weights: PublishedWeights) -> None:
        """The other processes have them: `FsdpController.publish` has put them there."""
        await self._local.update(weights)

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """A signal waits until they are drawn."""
        with defer_signals(), self._learner.collective("drawing completions") as ranks:
            ranks.broadcast_object((sample_shard, (requests, self._local.version, *self._how)))
            return await _drawn(self._local, requests, ranks)


def sample_shard(
    learner: FsdpLearner, requests: Sequence[Request], version: int, end: frozenset[int], pad: int
) -> None:
    """The share of a process that is not rank 0."""
    assert learner.full_model is not None  # the plan says that it draws
    if "sampler" not in learner.cache:
        routing = Routing.for_model(learner.full_model) if learner.config.routing_replay else None
        learner.cache["sampler"] = LocalSampler(learner.full_model, end, pad, routing)
    sampler: LocalSampler = learner.cache["sampler"]
    sampler.version = version
    asyncio.run(_drawn(sampler, requests, learner.workers))


async def _drawn(sampler: LocalSampler, requests: Sequence[Request], ranks: WorkerGroup) -> list[Generation]:
    """All of them, each process's share drawn there. What cannot be drawn in one of them is raised in all: they stay together."""
    mine, wrong = list[Generation](), None
    try:
        mine = await sampler.generate(_share(requests, ranks.rank, ranks.size))
    except PolicygradError as error:
        wrong = error
    shares = ranks.all_gather((mine, wrong))
    for _, failed in shares:
        if failed is not None:
            raise failed
    return [generation for share, _ in shares for generation in share]


def _share(requests: Sequence[Request], rank: int, size: int) -> Sequence[Request]:
    """Neighbours, since those of a group are read once together."""
    return requests[len(requests) * rank // size : len(requests) * (rank + 1) // size]


def distribute_sampling(resources: Resources, learner: Learner) -> Resources:
    """The resources with a sampler in every process, where it is this process's own and shares its model with the learner."""
    sampler = resources.rollouter.sampler
    if not (isinstance(learner, FsdpController) and learner.samples and type(sampler) is LocalSampler):
        return resources
    return replace(resources, rollouter=replace(resources.rollouter, sampler=ShardedLocalSampler(sampler, learner)))


# Checkpoints of processes that learn together: each writes its share of the state into the run's folder, and reads no more than it
# needs of one, whoever has written it. The folder is one that all of them see.

POLL_SECONDS = 0.02
"""Seconds between looks whether all have written theirs."""
LOCAL_PREFIXES = ("rng/", LEFTOVER_PREFIX, QUEUED_PREFIX)
"""What begins the names of the tensors that rank 0 alone has."""


class ShardedCheckpointIO:
    """The state of a learner that is spread over processes."""

    def __init__(self, learner: FsdpController) -> None:
        self._learner, self._saves = learner, 0

    @property
    def state_values(self) -> dict[str, Any]:
        """Its values, without its tensors."""
        return self._learner.state_values

    @staticmethod
    def is_sharded(name: str) -> bool:
        """Whether a tensor of a checkpoint is the learner's, by its name."""
        return not name.startswith(LOCAL_PREFIXES)

    def start_save(self, folder: Path) -> Callable[[], list[ShardFile]]:
        """Every process copies its share, and writes it into the folder while training goes on. What waits for them."""
        self._saves += 1
        key = f"share {self._saves}"
        self._learner.run_on_all(save_shard, folder.absolute(), key)
        return partial(self._written, key)

    def _written(self, key: str) -> list[ShardFile]:
        """What each has written, in their order. Raises OSError where one could not."""
        line = self._learner.store
        keys = [f"{key} of {rank}" for rank in range(self._learner.world_size)]
        while not line.contains(*keys):
            if gone := self._learner.failure_reason:
                raise OSError(f"{gone} before all had written their shares")
            time.sleep(POLL_SECONDS)
        said = [json.loads(line.pop(key)) for key in keys]
        for rank, what in enumerate(said):
            if "error" in what:
                words = f"rank {rank}: {what['error']}"
                raise OSError(what["errno"], words) if what["errno"] else OSError(words)
        return [ShardFile(**what) for what in said]

    def restore(self, path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The state of the checkpoint at this path, which is verified; `tensors` say the shapes.

        Raises:
            CheckpointError: one of the processes cannot read it. KeyError: it is of another model.
        """
        self._learner.run_on_all(
            restore_shard, path.absolute(), {name: tensor.to("meta") for name, tensor in tensors.items()}, values
        )


def make_sharded_io(learner: Learner) -> ShardedCheckpointIO | None:
    """None of a learner that saves as a whole."""
    return ShardedCheckpointIO(learner) if isinstance(learner, FsdpController) else None


def save_shard(learner: FsdpLearner, folder: Path, key: str) -> None:
    """In every process: the share is copied now, and written by a thread."""
    held = learner.sharded_state().items()
    pieces = {
        name: TensorShard(tuple(shape), offset, part.detach().to("cpu", copy=True).contiguous())
        for name, (shape, offset, part) in held
    }
    work = threading.Thread(target=_write, args=(learner.workers, folder, key, pieces), name="checkpoint", daemon=True)
    work.start()


def _write(ranks: WorkerGroup, folder: Path, key: str, pieces: Mapping[str, TensorShard]) -> None:
    """Writes them, and says so, or why not."""
    try:
        said = asdict(write_shard_file(folder / shard_name(ranks.rank), pieces))
    except OSError as error:
        said = {"error": error.strerror or str(error), "errno": error.errno or 0}
    except Exception as error:  # for rank 0 to say: nobody here waits for this thread
        said = {"error": repr(error), "errno": 0}
    ranks.store.set(f"{key} of {ranks.rank}", json.dumps(said))


def restore_shard(learner: FsdpLearner, path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """In every process: it reads its share, and where one cannot, none goes on."""
    found, wrong = dict[str, Tensor](), ""
    try:
        with open_tensors(path) as pieces:
            found = {name: learner.load_shard(name, like, partial(pieces.read, name)) for name, like in tensors.items()}
    except (CheckpointError, OSError, SafetensorError) as error:
        wrong = f"rank {learner.workers.rank} cannot read its share: {error}"
    if said := [words for words in learner.workers.all_gather(wrong) if words]:
        raise CheckpointError(said[0])
    learner.load_shards(found, values)
