"""The learner of rank 0, which runs the training: every call is told to the other processes first, and done by all at once.

There is one loop, in one process. Whatever hangs on the clock, on signals, files, rewards or an engine is decided there, so that
the processes cannot come apart.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics
from policygrad.errors import ConfigError, HangError, PolicygradError, RunError
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.fsdp.learner import FsdpLearner, FsdpSpec
from policygrad.learners.fsdp.processes import WorkerGroup, WorkerLauncher, check_devices
from policygrad.learners.fsdp.sharding import ModelSkeleton, move_to_meta
from policygrad.learners.fsdp.tensor_parallel import check_tensor_parallel
from policygrad.learners.fsdp.torchrun import resolve_world_size
from policygrad.learners.fsdp.watchdog import ControlStore
from policygrad.learners.local.learner import check_vocabulary_sizes
from policygrad.models.adapters import is_initial_adapter
from policygrad.models.moe_routing import Routing
from policygrad.utils.signals import DUPLICATE_WINDOW_SECONDS, SIGNALS
from policygrad.weight_sync.base import LazyStateDict, PublishedWeights, StaleWeightsError

# What is published where no process has the policy: its parameters, gathered one by one, and its logits.


class VersionedCall(Protocol):
    """Does something in every process, with weights of one version alone."""

    def __call__(self, version: int, method: Any, *args: Any) -> Any:
        """What it comes to here. Raises StaleWeightsError where the weights are others."""
        ...


def publish_lazily(
    call_at_version: VersionedCall, version: int, tensor_specs: Mapping[str, Tensor]
) -> PublishedWeights:
    """likes: the parameters on the meta device, as they are to be published."""

    def gather(name: str) -> Tensor:
        parameter: Tensor = call_at_version(version, FsdpLearner.gather_parameter, name, tensor_specs[name].dtype)
        return parameter

    def logits(ids: Tensor) -> Tensor:
        output: Tensor = call_at_version(version, FsdpLearner.compute_logits, ids)
        return output

    return PublishedWeights(version, LazyStateDict(tensor_specs, gather), logits)


# What is not spread over several processes: refused at the beginning, with the way out.

_ONE = "let one process learn (learner.world_size 1)"


def check_fsdp_options(config: LearnerConfig, algorithm: Algorithm | None = None) -> None:
    """Raises ConfigError for the first option that several processes cannot share."""
    if (ranks := resolve_world_size(config.world_size)) % config.tensor_parallel:
        raise ConfigError(
            f"learner.tensor_parallel {config.tensor_parallel} of {ranks} processes (learner.world_size) share a layer: give a divisor of that, as "
            f"in --learner.world-size {config.tensor_parallel} --learner.tensor-parallel {config.tensor_parallel}"
        )
    if config.world_size == 1:
        return
    options = {
        "learner.lora with bits=4": config.adapters is not None and config.adapters.bits is not None,
        f"learner.device {config.device}, one GPU for all,": config.device.startswith("cuda:"),
    }
    for what in (what for what, holds in options.items() if holds):
        raise ConfigError(
            f"{what} is not for several processes, and learner.world_size is {config.world_size}: leave it away, or {_ONE}"
        )


def check_shardable(model: nn.Module) -> None:
    """Raises ConfigError for weights that cannot be cut into shares."""
    if getattr(model, "is_quantized", False):
        raise ConfigError(
            f"the model's weights are quantised, and are not spread over several processes: take them as they are, or {_ONE}"
        )


T = TypeVar("T")
SYMMETRIC_ERRORS = (PolicygradError, KeyError)
"""What is raised in all processes alike, from what all of them know: they go on listening."""


class FsdpController:
    """As `LocalLearner`, with as many processes as `ranks` has."""

    def __init__(
        self,
        ranks: WorkerGroup,
        plan: FsdpSpec,
        model: nn.Module,
        reference: nn.Module | None,
        folder: Path | None = None,
    ) -> None:
        self._workers, self._in_sync, self._lock, self.samples = ranks, True, threading.Lock(), plan.samples
        self._tensor_specs: dict[str, Tensor] | None = None  # of what is gathered one by one
        ranks.watchdog.start(plan.config.hang_timeout, folder)
        with self.collective("making the learner"):
            ranks.broadcast_object(plan)
            self._learner = FsdpLearner(ranks, plan, model, reference)

    @classmethod
    def of(
        cls,
        ranks: WorkerGroup,
        model: nn.Module,
        algorithm: Algorithm,
        *,
        lr: float | None,
        steps: int,
        temperature: float = 1.0,
        config: LearnerConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        reference: nn.Module | None = None,
        samples: bool = False,
        streams: bool = False,
        folder: Path | None = None,
        blueprint: ModelSkeleton | None = None,
    ) -> Self:
        """The arguments are those of `LocalLearner`. `model` stays whole in this process: `publish` writes the weights into it.
        samples: it is whole in all of them, for each to draw with. streams: in none of them: `model` is left without its numbers,
        on the meta device, and what `publish` gives is gathered one by one. folder: the run's, where the stacks of processes that
        hang go. blueprint: the model's, where it is no causal language model.

        Raises:
            ConfigError: what several processes cannot share yet.
        """
        config = config or LearnerConfig()
        check_fsdp_options(config, algorithm)
        check_shardable(model)
        check_tensor_parallel(model, config.tensor_parallel, algorithm)
        if config.routing_replay:
            Routing.for_model(model)  # what listens to the routers is a part of the blueprint
        skeleton = ModelSkeleton.of(model, temperature) if blueprint is None else blueprint
        reads_reference, adapterless = (
            "logp_ref" in algorithm.needs,
            reference is None and _is_reference_adapterless(model, algorithm),
        )
        reference_skeleton = None if not reads_reference or adapterless else skeleton
        if reads_reference and reference is not None:
            check_vocabulary_sizes(algorithm, reference, model)
            reference_skeleton = ModelSkeleton.of(reference, temperature)
        plan = FsdpSpec(
            policy=skeleton,
            reference=reference_skeleton,
            adapterless_reference=reads_reference and adapterless,
            algorithm=algorithm,
            lr=lr,
            steps=steps,
            temperature=temperature,
            config=config,
            optimizer=optimizer or OptimizerConfig(),
            device=next(model.parameters()).device.type,
            threads=_threads(ranks.size),
            samples=samples,
            streams=streams,
        )
        controller = cls(ranks, plan, model, model if reference is None else reference, folder)
        if streams:
            move_to_meta(model)
            controller._tensor_specs = {name: p.detach() for name, p in model.named_parameters()}
        return controller

    @property
    def world_size(self) -> int:
        """Processes that learn."""
        return self._workers.size

    @property
    def reference_parameters(self) -> int:
        """Of the reference, in all processes together; 0 without one."""
        return self._learner.reference_parameters

    @property
    def version(self) -> int:
        """How many updates made the weights."""
        return self._learner.version

    @property
    def not_finite(self) -> str:
        """As `LocalLearner.not_finite`."""
        return self._learner.not_finite

    @property
    def lr(self) -> float | None:
        """As `LocalLearner.lr`."""
        return self._learner.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._call(FsdpLearner.set_lr, value)

    def evaluate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """As `LocalLearner.evaluate`."""
        with defer_signals():  # in a rollout, which a signal ends at once
            return self._call(FsdpLearner.evaluate, batch, needs)

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """One rollout's updates; the metrics are those of the whole batch."""
        return self._call(FsdpLearner.update, batch, psi, algorithm)

    def publish(self) -> PublishedWeights:
        """The model's own tensors, with the weights as they are; or such as are gathered one by one, as long as they are."""
        if self._tensor_specs is None:
            return self._call(FsdpLearner.publish)
        return publish_lazily(self._call_at_version, self.version, self._tensor_specs)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gathered: that of one process."""
        return self._call(FsdpLearner.state)

    @property
    def state_values(self) -> dict[str, Any]:
        """The state's values alone, which this process has."""
        return self._learner.state_values()

    def run_on_all(self, function: Callable[..., T], *args: Any) -> T:
        """A function of the learner's share and of these arguments, in every process; what it returns in this one. A signal waits
        until all are through."""
        with defer_signals():
            return self._call(function, *args)

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The state of a checkpoint, of whatever number of processes."""
        with self.collective("restore") as ranks:
            ranks.broadcast_object((FsdpLearner.restore, ({n: t.to("meta") for n, t in tensors.items()}, values)))
            self._learner.restore(tensors, values)

    @property
    def store(self) -> ControlStore:
        """To the other processes."""
        return self._workers.store

    @property
    def failure_reason(self) -> str:
        """In words, that another process has ended or does not answer; empty where nobody knows of any."""
        diverged = "" if self._in_sync else "the processes that learn together have come apart"
        return self._workers.exit_message or self._workers.watchdog.unresponsive or diverged

    def close(self) -> None:
        """The other processes end."""
        self._workers.close(self._in_sync)
        self._in_sync = False

    def _call(self, method: Callable[..., T], *args: Any) -> T:
        return self._call_at_version(None, method, *args)

    def _call_at_version(self, version: int | None, method: Callable[..., T], *args: Any) -> T:
        """In every process, with weights of this version, None = any. Raises StaleWeightsError where they are others."""
        with self.collective(method.__name__) as ranks:
            if version not in (None, self.version):
                raise StaleWeightsError(
                    f"the weights of version {version} have passed: the learner has those of {self.version}"
                )
            ranks.broadcast_object((method, args))
            return method(self._learner, *args)

    @contextmanager
    def collective(self, operation: str) -> Iterator[WorkerGroup]:
        """Around what all processes do: within, they are told (a function of their learner and its arguments), and it is done here
        too. What breaks it off here leaves the others where they are, and there is no way on."""
        with self._lock:  # a rollout in another thread may ask something meanwhile
            if not self._in_sync:
                raise RunError(f"{operation}: the processes that learn together have come apart, see the error before")
            try:
                with self._workers.watchdog.watch_collective(operation):
                    yield self._workers
            except SYMMETRIC_ERRORS:
                raise
            except BaseException as error:
                self._in_sync = False
                if isinstance(error, Exception) and (diagnosis := self._workers.watchdog.diagnosis):
                    raise HangError(diagnosis) from error
                lost = describe_lost_connection(error)
                if not lost:
                    raise
                raise RunError(
                    f"{self._workers.wait_for_exit() or lost}, in the midst of {operation!r}: what it said stands above"
                ) from error


def _is_reference_adapterless(model: nn.Module, algorithm: Algorithm) -> bool:
    """Whether the policy without its adapters is π_ref for good, and nothing asks for both at once, or for a second one."""
    given = algorithm.reference
    renewed = given is not None and (given.refresh_every is not None or given.refresh_after_stall is not None)
    second = algorithm.reward_model is not None or "kl_ref" in algorithm.forward_needs
    return is_initial_adapter(model) and not renewed and not second


def start_fsdp_learner(
    model: nn.Module, algorithm: Algorithm, *, config: LearnerConfig, places: WorkerLauncher | None = None, **how: Any
) -> FsdpController:
    """A `FsdpController` with processes of its own, `config.ranks` of them, or with torchrun's; `close` ends them. places: where
    they are; None = on this machine."""
    check_fsdp_options(config, algorithm)
    if places is None:
        check_devices(next(model.parameters()).device.type, config.world_size)
    ranks = WorkerGroup.start(config.world_size, places)
    try:
        return FsdpController.of(ranks, model, algorithm, config=config, **how)
    except BaseException as error:
        ranks.close(isinstance(error, SYMMETRIC_ERRORS))
        raise


def _threads(size: int) -> int:
    """This machine's between the processes, unless OMP_NUM_THREADS says how many each has (as torchrun lets it)."""
    available = torch.get_num_threads()
    return available if "OMP_NUM_THREADS" in os.environ else max(1, available // size)


def describe_lost_connection(error: BaseException) -> str:
    """In words, that a connection to another process has gone; empty where the error is another."""
    is_lost = isinstance(error, RuntimeError) and any(
        word in str(error) for word in ("gloo", "Gloo", "NCCL", "Connection")
    )
    return f"another of the processes that learn together has ended ({str(error).splitlines()[0]})" if is_lost else ""


@contextmanager
def defer_signals() -> Iterator[None]:
    """A signal waits until what all processes do is done: whoever left it would leave the others waiting. A second one does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, float]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if came and time.monotonic() - came[0][1] > DUPLICATE_WINDOW_SECONDS:
            raise KeyboardInterrupt
        came.append((number, time.monotonic()))

    before = {n: handler for n in SIGNALS if callable(handler := signal.getsignal(n))}
    try:
        for number in before:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0][0])
