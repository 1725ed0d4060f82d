"""Rank 0's learner, which sends every call to the other ranks and executes it with them.

The training loop runs in rank 0 alone. Whatever depends on the clock, on signals, files, rewards or an engine is decided there, so
the ranks cannot diverge.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.media import TextMedia
from policygrad.core.metrics import Metrics
from policygrad.errors import ConfigError, HangError, OutOfMemoryError, PolicygradError, RunError
from policygrad.learners.base import LearnerSpec
from policygrad.learners.fsdp.context_parallel import check_context_parallel
from policygrad.learners.fsdp.learner import FsdpLearner, FsdpSpec
from policygrad.learners.fsdp.processes import WorkerGroup, WorkerLauncher, check_devices
from policygrad.learners.fsdp.sharding import ModelSkeleton, move_to_meta
from policygrad.learners.fsdp.tensor_parallel import check_tensor_parallel
from policygrad.learners.fsdp.torchrun import ONE_PROCESS_HINT
from policygrad.learners.fsdp.watchdog import SHORTAGE_KEY, ControlStore
from policygrad.learners.local.learner import check_vocabulary_sizes, is_live, is_scored_elsewhere
from policygrad.models.adapters import is_initial_adapter
from policygrad.models.loading import compute_head_in_float32
from policygrad.models.moe_routing import Routing, find_routing
from policygrad.models.replica import is_packed
from policygrad.models.traits import has_experts
from policygrad.utils.out_of_memory import describe_missing_memory, is_out_of_memory
from policygrad.utils.signals import defer_signals
from policygrad.weight_sync.base import LazyStateDict, PublishedWeights, StaleWeightsError

T = TypeVar("T")
SYMMETRIC_ERRORS = (PolicygradError, KeyError)
"""Errors that every rank raises alike, from data that all have; the ranks stay in sync."""


def check_shardable(model: nn.Module) -> None:
    """Raise ConfigError for weights that can neither be sharded nor, frozen in four bits under adapters, stay whole."""
    if getattr(model, "is_quantized", False) and not any(map(is_packed, model.parameters())):
        raise ConfigError(
            f"the model's weights are quantised and cannot be sharded: use unquantised weights, or {ONE_PROCESS_HINT}"
        )


def check_live_reference(algorithm: Algorithm) -> None:
    """Raise ConfigError if a pass of the policy would need another one of the policy within it."""
    if "kl_ref" in algorithm.forward_needs and is_live(algorithm):
        raise ConfigError(
            "Reference(live=True) with ExactKLToReference calls the policy within its own pass, which several processes cannot: "
            f"set ema=1.0, live=False (a copy that follows each rollout), or {ONE_PROCESS_HINT}"
        )


class FsdpController:
    """A learner in several processes, with the interface of `LocalLearner`."""

    def __init__(
        self,
        workers: WorkerGroup,
        model: nn.Module,
        spec: LearnerSpec,
        *,
        reference: nn.Module | None = None,
        replicate_policy: bool = False,
        stream_weights: bool = False,
        folder: Path | None = None,
        skeleton: ModelSkeleton | None = None,
    ) -> None:
        """Shard a model over the ranks; `publish` writes the weights back into it.

        Args:
            reference: The model that `Reference.model` names, loaded.
            replicate_policy: Keep the full policy in every rank, to sample with.
            stream_weights: Keep the full policy in no rank: `model` is moved to the meta device, and published weights are
                gathered one by one.
            folder: The run's folder, for the stacks of ranks that hang.
            skeleton: The model's skeleton, if it is no causal language model.

        Raises:
            ConfigError: For what several processes do not support.
        """
        algorithm, config = spec.algorithm, spec.config
        config.check_processes()
        check_shardable(model)
        check_tensor_parallel(model, config.tensor_parallel, algorithm)
        config.check_context(algorithm)
        if config.routing_replay:
            Routing.for_model(model)
        if has_experts(model):
            find_routing(model)  # before pickling: its hooks on the routers are part of the skeleton
        if config.resolve(algorithm.head).head == "fp32":
            for network in (model, reference):
                if network is not None:
                    compute_head_in_float32(network)
        skeleton = skeleton or ModelSkeleton.of(model, spec.temperature)
        skeleton = replace(skeleton, has_masters=spec.optimizer.masters != "none")
        check_context_parallel(model, config.context_parallel, skeleton.use_tree)
        check_live_reference(algorithm)
        is_elsewhere = is_live(algorithm) or is_scored_elsewhere(algorithm)
        reads_reference = "logp_ref" in algorithm.needs and not is_elsewhere
        # π_ref is the policy without its adapters if it stays that, and no part needs both at once or a second one
        settings = algorithm.reference
        refreshes = settings is not None and (settings.refreshes or settings.ema is not None)
        needs_both = algorithm.reward_model is not None or "kl_ref" in algorithm.forward_needs
        is_shared = is_initial_adapter(model) and not refreshes and not needs_both
        adapterless = reads_reference and reference is None and is_shared
        reference_skeleton = skeleton if reads_reference and not adapterless else None
        if reads_reference and reference is not None:
            check_vocabulary_sizes(algorithm, reference, model)
            reference_skeleton = ModelSkeleton.of(reference, spec.temperature)
        # OMP_NUM_THREADS is the threads of each rank (torchrun sets it); otherwise the ranks share this machine's
        threads = torch.get_num_threads() // (1 if "OMP_NUM_THREADS" in os.environ else workers.size)
        fsdp = FsdpSpec(
            learner=spec,
            policy=skeleton,
            reference=reference_skeleton,
            adapterless_reference=adapterless,
            device=next(model.parameters()).device.type,
            threads=max(1, threads),
            replicate_policy=replicate_policy,
            stream_weights=stream_weights,
        )
        self._workers, self._in_sync, self._lock = workers, True, threading.Lock()
        self.replicates_policy = replicate_policy
        self.on_shortage: Callable[[OutOfMemoryError], None] = lambda shortage: None
        """Called with what another rank ran out of memory in, where this process ends without an error."""
        workers.watchdog.before_exit = self._report_shortage
        workers.watchdog.start(config.hang_timeout, folder)
        with self.collective("making the learner"):
            workers.broadcast_object(fsdp)
            self._learner = FsdpLearner(workers, fsdp, model, model if reference is None else reference)
        self._tensor_specs: dict[str, Tensor] | None = None  # of weights that are gathered on demand
        if stream_weights:
            move_to_meta(model)
            self._tensor_specs = {name: p.detach() for name, p in model.named_parameters()}

    # The interface of `LocalLearner` and `DistributedLearner`, which describe these.

    @property
    def world_size(self) -> int:
        return self._workers.size

    @property
    def reference_parameters(self) -> int:
        return self._learner.reference_parameters

    @property
    def version(self) -> int:
        return self._learner.version

    @property
    def not_finite(self) -> str:
        return self._learner.not_finite

    @property
    def lr(self) -> float | None:
        return self._learner.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._call(FsdpLearner.set_lr, value)

    @property
    def state_values(self) -> dict[str, Any]:
        return self._learner.state_values()

    @property
    def store(self) -> ControlStore:
        return self._workers.store

    @property
    def failure_reason(self) -> str:
        diverged = "" if self._in_sync else "the processes that learn together are no longer in sync"
        return self._workers.exit_message or self._workers.watchdog.unresponsive or diverged

    def evaluate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        return self.run_on_all(FsdpLearner.evaluate, batch, needs)

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        return self._call(FsdpLearner.update, batch, psi, algorithm)

    def publish(self) -> PublishedWeights:
        """Return the weights: in the model's own tensors, or gathered one by one while this version lasts.

        A signal that interrupts their transfer to a sampler does so between two operations of all ranks.
        """
        if self._tensor_specs is None:
            return self.run_on_all(FsdpLearner.publish)
        version, specs = self.version, self._tensor_specs

        def gather(name: str) -> Tensor:
            with defer_signals():
                return self._call(FsdpLearner.gather_parameter, name, specs[name].dtype, version=version)

        def logits(ids: Tensor, media: Sequence[TextMedia] = ()) -> Tensor:
            with defer_signals():
                return self._call(FsdpLearner.compute_logits, ids, media, version=version)

        return PublishedWeights(version, LazyStateDict(specs, gather), logits)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self._call(FsdpLearner.state)

    def check_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self._learner.check_state(tensors, values)

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint written by any number of processes."""
        with self.collective("restore") as workers:
            workers.broadcast_object((FsdpLearner.restore, ({n: t.to("meta") for n, t in tensors.items()}, values)))
            self._learner.restore(tensors, values)

    def run_on_all(self, function: Callable[..., T], *args: Any) -> T:
        with defer_signals():  # where a signal would interrupt at once, as during a rollout
            return self._call(function, *args)

    def close(self) -> None:
        """End the other ranks."""
        self._workers.close(self._in_sync)
        self._in_sync = False

    def _call(self, method: Callable[..., T], *args: Any, version: int | None = None) -> T:
        """Call a method of every rank's learner. Raises StaleWeightsError unless the weights have `version` (None = any)."""
        with self.collective(method.__name__) as workers:
            if version not in (None, self.version):
                raise StaleWeightsError(
                    f"the weights of version {version} are gone: the learner has those of version {self.version}"
                )
            workers.broadcast_object((method, args))
            return method(self._learner, *args)

    @contextmanager
    def collective(self, operation: str) -> Iterator[WorkerGroup]:
        """Enclose an operation of all ranks: a message (function, its arguments) to the others, and the same call here.

        An error here that the others do not raise leaves them in the operation, so that nothing can follow it.
        """
        with self._lock:  # a rollout in another thread may call at the same time
            if not self._in_sync:
                raise RunError(
                    f"{operation}: the processes that learn together are no longer in sync, see the error before"
                )
            try:
                with self._workers.watchdog.watch_collective(operation):
                    yield self._workers
            except SYMMETRIC_ERRORS:
                raise
            except BaseException as error:
                self._in_sync = False
                if isinstance(error, Exception) and (shortage := self._find_shortage(error)):
                    raise shortage from error
                if isinstance(error, Exception) and (diagnosis := self._workers.watchdog.diagnosis):
                    raise HangError(diagnosis) from error
                if not (lost := describe_lost_connection(error)):
                    raise
                raise RunError(
                    f"{self._workers.wait_for_exit() or lost}, during {operation!r}: its output is above"
                ) from error

    def _find_shortage(self, error: Exception) -> OutOfMemoryError | None:
        """Return what this rank or another one ran out of memory in, if an error comes from that."""
        if is_out_of_memory(error):
            learner: FsdpLearner | None = getattr(self, "_learner", None)
            return describe_rank_shortage(0, learner, error)
        return self._read_shortage()

    def _read_shortage(self) -> OutOfMemoryError | None:
        text = self._workers.store.get(SHORTAGE_KEY)
        return None if text is None else OutOfMemoryError(**json.loads(text))

    def _report_shortage(self) -> None:
        if (shortage := self._read_shortage()) is not None:
            self.on_shortage(shortage)


def describe_rank_shortage(rank: int, learner: FsdpLearner | None, error: BaseException) -> OutOfMemoryError:
    """Return what a rank ran out of memory in, and with which option the run should be resumed."""
    end = None if learner is None else learner.memory.end
    end = end or OutOfMemoryError(f"out of memory ({describe_missing_memory(error)})")
    return OutOfMemoryError(f"rank {rank}: {end}", flag=end.flag, size=end.size, limit=end.limit)


def report_shortage(workers: WorkerGroup, learner: FsdpLearner | None, error: BaseException) -> None:
    """In a rank above 0 that has run out of memory and is about to exit: tell rank 0, which waits for it in a collective."""
    end = describe_rank_shortage(workers.rank, learner, error)
    report = {"message": str(end), "flag": end.flag, "size": end.size, "limit": end.limit}
    workers.store.set(SHORTAGE_KEY, json.dumps(report))


def start_fsdp_learner(
    model: nn.Module, spec: LearnerSpec, *, launcher: WorkerLauncher | None = None, **options: Any
) -> FsdpController:
    """Start `spec.config.world_size` ranks, or join torchrun's, and make their learner; `close` ends them.

    `launcher` starts the ranks (None = on this machine); `options` are those of `FsdpController`.
    """
    spec.config.check_processes()
    if launcher is None:
        check_devices(next(model.parameters()).device.type, spec.config.world_size)
    workers = WorkerGroup.start(spec.config.world_size, launcher)
    try:
        return FsdpController(workers, model, spec, **options)
    except BaseException as error:
        workers.close(isinstance(error, SYMMETRIC_ERRORS))
        raise


def describe_lost_connection(error: BaseException) -> str:
    """Return that the connection to another rank was lost, as text; empty for any other error."""
    if isinstance(error, RuntimeError) and re.search("[gG]loo|NCCL|Connection", str(error)):
        return f"one of the processes that learn together has exited ({str(error).splitlines()[0]})"
    return ""
