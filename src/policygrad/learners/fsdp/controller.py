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
from policygrad.learners.fsdp.learner import FsdpLearner, Plan
from policygrad.learners.fsdp.processes import Places, Ranks, check_devices
from policygrad.learners.fsdp.sharding import Blueprint, without_numbers
from policygrad.learners.fsdp.tensor_parallel import check_tensor
from policygrad.learners.fsdp.torchrun import ranks_of
from policygrad.learners.fsdp.watchdog import Line
from policygrad.learners.local.learner import check_widths
from policygrad.models.adapters import untouched
from policygrad.models.moe_routing import Routing
from policygrad.utils.signals import AGAIN, SIGNALS
from policygrad.weight_sync.base import Gathered, PassedError, Published

# What is published where no process has the policy: its parameters, gathered one by one, and its logits.


class At(Protocol):
    """Does something in every process, with weights of one version alone."""

    def __call__(self, version: int, method: Any, *args: Any) -> Any:
        """What it comes to here. Raises PassedError where the weights are others."""
        ...


def one_by_one(at: At, version: int, likes: Mapping[str, Tensor]) -> Published:
    """likes: the parameters on the meta device, as they are to be published."""

    def gather(name: str) -> Tensor:
        found: Tensor = at(version, FsdpLearner.gathered, name, likes[name].dtype)
        return found

    def logits(ids: Tensor) -> Tensor:
        found: Tensor = at(version, FsdpLearner.logits, ids)
        return found

    return Published(version, Gathered(likes, gather), logits)


# What is not spread over several processes: refused at the beginning, with the way out.

_ONE = "let one process learn (learner.ranks 1)"


def check_ranks(config: LearnerConfig, algorithm: Algorithm | None = None) -> None:
    """Raises ConfigError for the first option that several processes cannot share."""
    if (ranks := ranks_of(config.ranks)) % config.tensor:
        raise ConfigError(
            f"learner.tensor {config.tensor} of {ranks} processes (learner.ranks) share a layer: give a divisor of that, as "
            f"in --learner.ranks {config.tensor} --learner.tensor {config.tensor}"
        )
    if config.ranks == 1:
        return
    options = {
        "learner.lora with bits=4": config.adapters is not None and config.adapters.bits is not None,
        f"learner.device {config.device}, one GPU for all,": config.device.startswith("cuda:"),
    }
    for what in (what for what, holds in options.items() if holds):
        raise ConfigError(
            f"{what} is not for several processes, and learner.ranks is {config.ranks}: leave it away, or {_ONE}"
        )


def check_model(model: nn.Module) -> None:
    """Raises ConfigError for weights that cannot be cut into shares."""
    if getattr(model, "is_quantized", False):
        raise ConfigError(
            f"the model's weights are quantised, and are not spread over several processes: take them as they are, or {_ONE}"
        )


T = TypeVar("T")
AGREED = (PolicygradError, KeyError)
"""What is raised in all processes alike, from what all of them know: they go on listening."""


class RankedLearner:
    """As `LocalLearner`, with as many processes as `ranks` has."""

    def __init__(
        self, ranks: Ranks, plan: Plan, model: nn.Module, reference: nn.Module | None, folder: Path | None = None
    ) -> None:
        self._ranks, self._whole, self._lock, self.samples = ranks, True, threading.Lock(), plan.samples
        self._likes: dict[str, Tensor] | None = None  # of what is gathered one by one
        ranks.watchdog.start(plan.config.patience, folder)
        with self.together("making the learner"):
            ranks.tell(plan)
            self._learner = FsdpLearner(ranks, plan, model, reference)

    @classmethod
    def of(
        cls,
        ranks: Ranks,
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
        blueprint: Blueprint | None = None,
    ) -> Self:
        """The arguments are those of `LocalLearner`. `model` stays whole in this process: `publish` writes the weights into it.
        samples: it is whole in all of them, for each to draw with. streams: in none of them: `model` is left without its numbers,
        on the meta device, and what `publish` gives is gathered one by one. folder: the run's, where the stacks of processes that
        hang go. blueprint: the model's, where it is no causal language model.

        Raises:
            ConfigError: what several processes cannot share yet.
        """
        config = config or LearnerConfig()
        check_ranks(config, algorithm)
        check_model(model)
        check_tensor(model, config.tensor, algorithm)
        if config.routing_replay:
            Routing.of(model)  # what listens to the routers is a part of the blueprint
        own = Blueprint.of(model, temperature) if blueprint is None else blueprint
        read, bare = "logp_ref" in algorithm.needs, reference is None and _bare(model, algorithm)
        theirs = None if not read or bare else own
        if read and reference is not None:
            check_widths(algorithm, reference, model)
            theirs = Blueprint.of(reference, temperature)
        plan = Plan(
            policy=own,
            reference=theirs,
            bare=read and bare,
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
        found = cls(ranks, plan, model, model if reference is None else reference, folder)
        if streams:
            without_numbers(model)
            found._likes = {name: p.detach() for name, p in model.named_parameters()}
        return found

    @property
    def ranks(self) -> int:
        """Processes that learn."""
        return self._ranks.size

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
        self._do(FsdpLearner.set_lr, value)

    def evaluate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """As `LocalLearner.evaluate`."""
        with not_in_its_midst():  # in a rollout, which a signal ends at once
            return self._do(FsdpLearner.evaluate, batch, needs)

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """One rollout's updates; the metrics are those of the whole batch."""
        return self._do(FsdpLearner.update, batch, psi, algorithm)

    def publish(self) -> Published:
        """The model's own tensors, with the weights as they are; or such as are gathered one by one, as long as they are."""
        if self._likes is None:
            return self._do(FsdpLearner.publish)
        return one_by_one(self._at, self.version, self._likes)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gathered: that of one process."""
        return self._do(FsdpLearner.state)

    @property
    def values(self) -> dict[str, Any]:
        """The state's values alone, which this process has."""
        return self._learner.values()

    def do(self, function: Callable[..., T], *args: Any) -> T:
        """A function of the learner's share and of these arguments, in every process; what it returns in this one. A signal waits
        until all are through."""
        with not_in_its_midst():
            return self._do(function, *args)

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The state of a checkpoint, of whatever number of processes."""
        with self.together("restore") as ranks:
            ranks.tell((FsdpLearner.restore, ({n: t.to("meta") for n, t in tensors.items()}, values)))
            self._learner.restore(tensors, values)

    @property
    def line(self) -> Line:
        """To the other processes."""
        return self._ranks.line

    @property
    def gone(self) -> str:
        """In words, that another process has ended or does not answer; empty where nobody knows of any."""
        apart = "" if self._whole else "the processes that learn together have come apart"
        return self._ranks.ended or self._ranks.watchdog.mute or apart

    def close(self) -> None:
        """The other processes end."""
        self._ranks.close(self._whole)
        self._whole = False

    def _do(self, method: Callable[..., T], *args: Any) -> T:
        return self._at(None, method, *args)

    def _at(self, version: int | None, method: Callable[..., T], *args: Any) -> T:
        """In every process, with weights of this version, None = any. Raises PassedError where they are others."""
        with self.together(method.__name__) as ranks:
            if version not in (None, self.version):
                raise PassedError(
                    f"the weights of version {version} have passed: the learner has those of {self.version}"
                )
            ranks.tell((method, args))
            return method(self._learner, *args)

    @contextmanager
    def together(self, what: str) -> Iterator[Ranks]:
        """Around what all processes do: within, they are told (a function of their learner and its arguments), and it is done here
        too. What breaks it off here leaves the others where they are, and there is no way on."""
        with self._lock:  # a rollout in another thread may ask something meanwhile
            if not self._whole:
                raise RunError(f"{what}: the processes that learn together have come apart, see the error before")
            try:
                with self._ranks.watchdog.over(what):
                    yield self._ranks
            except AGREED:
                raise
            except BaseException as error:
                self._whole = False
                if isinstance(error, Exception) and (found := self._ranks.watchdog.found):
                    raise HangError(found) from error
                gone = lost_connection(error)
                if not gone:
                    raise
                raise RunError(
                    f"{self._ranks.lost() or gone}, in the midst of {what!r}: what it said stands above"
                ) from error


def _bare(model: nn.Module, algorithm: Algorithm) -> bool:
    """Whether the policy without its adapters is π_ref for good, and nothing asks for both at once, or for a second one."""
    given = algorithm.reference
    renewed = given is not None and (given.every is not None or given.stall is not None)
    second = algorithm.reward_model is not None or "kl_ref" in algorithm.forward_needs
    return untouched(model) and not renewed and not second


def ranked_learner(
    model: nn.Module, algorithm: Algorithm, *, config: LearnerConfig, places: Places | None = None, **how: Any
) -> RankedLearner:
    """A `RankedLearner` with processes of its own, `config.ranks` of them, or with torchrun's; `close` ends them. places: where
    they are; None = on this machine."""
    check_ranks(config, algorithm)
    if places is None:
        check_devices(next(model.parameters()).device.type, config.ranks)
    ranks = Ranks.start(config.ranks, places)
    try:
        return RankedLearner.of(ranks, model, algorithm, config=config, **how)
    except BaseException as error:
        ranks.close(isinstance(error, AGREED))
        raise


def _threads(size: int) -> int:
    """This machine's between the processes, unless OMP_NUM_THREADS says how many each has (as torchrun lets it)."""
    here = torch.get_num_threads()
    return here if "OMP_NUM_THREADS" in os.environ else max(1, here // size)


def lost_connection(error: BaseException) -> str:
    """In words, that a connection to another process has gone; empty where the error is another."""
    gone = isinstance(error, RuntimeError) and any(
        word in str(error) for word in ("gloo", "Gloo", "NCCL", "Connection")
    )
    return f"another of the processes that learn together has ended ({str(error).splitlines()[0]})" if gone else ""


@contextmanager
def not_in_its_midst() -> Iterator[None]:
    """A signal waits until what all processes do is done: whoever left it would leave the others waiting. A second one does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, float]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if came and time.monotonic() - came[0][1] > AGAIN:
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
