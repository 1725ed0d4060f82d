"""Sampling and checkpoints of a learner in several processes.

Each process samples its part of the requests with its full copy of the policy, and writes and reads its shard of a checkpoint in
the run's folder, which all of them must see.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from policygrad.checkpoint.format import open_tensors
from policygrad.checkpoint.manifest import shard_name
from policygrad.checkpoint.shards import ShardFile, TensorShard, write_shard_file
from policygrad.core.metrics import Metrics
from policygrad.errors import CheckpointError, PolicygradError
from policygrad.learners.base import DistributedLearner, Learner
from policygrad.learners.fsdp.learner import FsdpLearner
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.models.moe_routing import Routing
from policygrad.rollout.serialization import LEFTOVER_PREFIX, QUEUED_PREFIX
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.training.setup import Resources
from policygrad.utils.signals import defer_signals
from policygrad.utils.span_recorder import SpanRecorder
from policygrad.utils.spans import current_recorder, span, start_recording
from policygrad.weight_sync.base import PublishedWeights

POLL_SECONDS = 0.02  # seconds between checks whether all processes have written their shards
LOCAL_PREFIXES = ("rng/", LEFTOVER_PREFIX, QUEUED_PREFIX)  # prefixes of the tensors that rank 0 alone has


class ShardedLocalSampler:
    """A local sampler in every process, on the weights that the learner has published there.

    A generation depends on its request alone, not on the process, up to the rounding of differently shaped matrix products.
    """

    def __init__(self, local: LocalSampler, learner: DistributedLearner) -> None:
        self._local, self._learner = local, learner

    async def update(self, weights: PublishedWeights) -> Metrics:
        """Update this process's sampler; `publish` has written the weights in the others. The metrics are this process's."""
        return await self._local.update(weights)

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Sample in all processes, with signals held until they have finished."""
        local = self._local
        with defer_signals(), self._learner.collective("sampling") as workers:
            end, limit = frozenset(local.end.tolist()), local.memory.limit
            arguments = (requests, local.version, end, local.pad, local.cuda_graphs, local.kernels, limit)
            workers.broadcast_object((sample_shard, arguments))
            return await _sample_together(local, requests, workers)


def distribute_sampling(resources: Resources, learner: Learner) -> Resources:
    """Return resources that sample in every process, if the sampler is local and every process has the full policy."""
    sampler = resources.rollouter.sampler
    if not (isinstance(learner, DistributedLearner) and learner.replicates_policy and type(sampler) is LocalSampler):
        return resources
    return replace(resources, rollouter=replace(resources.rollouter, sampler=ShardedLocalSampler(sampler, learner)))


def sample_shard(
    learner: FsdpLearner,
    requests: Sequence[Request],
    version: int,
    end: frozenset[int],
    pad: int,
    cuda_graphs: bool,
    kernels: str,
    limit: int | None,
) -> None:
    """In a rank above 0: sample its part of the requests, at most as many at a time as rank 0 has found to fit."""
    assert learner.full_model is not None  # it replicates the policy
    if "sampler" not in learner.cache:
        routing = Routing.for_model(learner.full_model) if learner.config.routing_replay else None
        learner.cache["sampler"] = LocalSampler(
            learner.full_model, end, pad, routing, cuda_graphs=cuda_graphs, kernels=kernels
        )
    sampler: LocalSampler = learner.cache["sampler"]
    sampler.version = version
    if limit is not None:
        sampler.memory.limit = sampler.memory.cap(limit)
    asyncio.run(_sample_together(sampler, requests, learner.workers))


async def _sample_together(
    sampler: LocalSampler, requests: Sequence[Request], workers: WorkerGroup
) -> list[Generation]:
    """Sample this rank's part and return all ranks' generations; an error in one rank is raised in all, so they stay in sync."""
    local, error = list[Generation](), None
    sampler.caches_texts = False  # a conversation's next turn may come to another rank
    begin, end = (len(requests) * rank // workers.size for rank in (workers.rank, workers.rank + 1))
    try:
        local = await sampler.generate(requests[begin:end])  # neighbours, since a group's prompt is computed once
    except PolicygradError as raised:
        error = raised
    results = workers.all_gather((local, error))
    for _, raised_there in results:
        if raised_there is not None:
            raise raised_there
    return [generation for generations, _ in results for generation in generations]


class ShardedCheckpointIO:
    """Saves and restores the state of a distributed learner without gathering it."""

    def __init__(self, learner: DistributedLearner) -> None:
        self._learner, self._saves = learner, 0

    @staticmethod
    def is_sharded(name: str) -> bool:
        """Return whether a checkpoint's tensor belongs to the learner, by its name."""
        return not name.startswith(LOCAL_PREFIXES)

    def start_save(self, folder: Path) -> Callable[[], list[ShardFile]]:
        """Make every process copy its shard and write it in the background; the result waits for them."""
        self._saves += 1
        key = f"save {self._saves}"
        self._learner.run_on_all(save_shard, folder.absolute(), key)
        return partial(self._wait_for_shards, key)

    def _wait_for_shards(self, key: str) -> list[ShardFile]:
        """Return the files of all ranks, in their order. Raises OSError if one could not be written."""
        store = self._learner.store
        keys = [f"{key} of {rank}" for rank in range(self._learner.world_size)]
        while not store.contains(*keys):
            if reason := self._learner.failure_reason:
                raise OSError(f"{reason} before all had written their shards")
            time.sleep(POLL_SECONDS)
        reports = [json.loads(store.pop(key)) for key in keys]
        for rank, report in enumerate(reports):
            if "error" in report:
                message = f"rank {rank}: {report['error']}"
                raise OSError(report["errno"], message) if report["errno"] else OSError(message)
        return [ShardFile(**report) for report in reports]

    def restore(self, path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the verified checkpoint at `path`; `tensors` give the shapes.

        Raises:
            CheckpointError: A process cannot read it.
            KeyError: It is of another model.
        """
        specs = {name: tensor.to("meta") for name, tensor in tensors.items()}
        self._learner.run_on_all(restore_shard, path.absolute(), specs, values)


def save_shard(learner: FsdpLearner, folder: Path, key: str) -> None:
    """In every rank: copy the shard, and write the copy in a thread that reports to the store."""
    workers = learner.workers
    shards = {
        name: TensorShard(tuple(shape), offset, part.detach().to("cpu", copy=True).contiguous())
        for name, (shape, offset, part) in learner.sharded_state().items()
    }

    def write() -> None:
        try:
            with span("write checkpoint"):
                report = asdict(write_shard_file(folder / shard_name(workers.rank), shards))
        except OSError as error:
            report = {"error": error.strerror or str(error), "errno": error.errno or 0}
        except Exception as error:  # nothing waits for this thread: rank 0 raises it
            report = {"error": repr(error), "errno": 0}
        workers.store.set(f"{key} of {workers.rank}", json.dumps(report))

    threading.Thread(target=write, name="checkpoint", daemon=True).start()


def restore_shard(learner: FsdpLearner, path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """In every rank: read the shard and restore it, unless a rank cannot read its own."""
    shards, problem = dict[str, Tensor](), ""
    try:
        with open_tensors(path) as stored:
            shards = {
                name: learner.load_shard(name, like, partial(stored.read, name)) for name, like in tensors.items()
            }
    except (CheckpointError, OSError, SafetensorError) as error:
        problem = f"rank {learner.workers.rank} cannot read its shard: {error}"
    if problems := [text for text in learner.workers.all_gather(problem) if text]:
        raise CheckpointError(problems[0])
    learner.load_shards(shards, values)


# Spans of the ranks above 0: they are collected there, and gathered by rank 0 after each step.


def start_rank_recording(learner: FsdpLearner) -> None:
    """In every rank: record spans, which rank 0 does already."""
    if rank := learner.workers.rank:
        start_recording(SpanRecorder(f"rank {rank}"))


def gather_spans(learner: FsdpLearner) -> None:
    """In every rank: move the finished spans of the others to rank 0's recorder."""
    recorder = current_recorder()
    assert recorder is not None
    is_first = learner.workers.rank == 0
    gathered = learner.workers.all_gather([] if is_first else recorder.take())
    if is_first:
        recorder.add(chain.from_iterable(gathered))
