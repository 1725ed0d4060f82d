"""THE OTHER LOOP: rows with their answers → loss → update; what fine-tuning and reward models share."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from policygrad.checkpoint.format import Checkpoint
from policygrad.checkpoint.shards import SavedState, ShardedState
from policygrad.core.algorithm import Algorithm
from policygrad.errors import CheckpointError, ConfigError, RunError
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.fsdp.torchrun import check_not_torchrun
from policygrad.learners.local.forward import Evaluator, Network, build_evaluator, recompute_activations
from policygrad.learners.local.optimizer import Optimizer, check_moments, set_trainable
from policygrad.learners.local.packing import WorkDivision
from policygrad.models.adapters import describe_adapters
from policygrad.models.tokenizer import Tokenizer
from policygrad.tasks.sources import digest_data
from policygrad.trackers import RunInfo
from policygrad.training.base_trainer import BaseTrainer, TrackingOptions, TrainingResult
from policygrad.training.config.paths import resolve_paths
from policygrad.training.config.serialization import load_config
from policygrad.training.config.supervised import SupervisedConfig
from policygrad.training.config.trust import config_code_references
from policygrad.training.divergence_guard import DivergenceGuard
from policygrad.training.provenance import fingerprint_run
from policygrad.training.run_folder import check_resumable
from policygrad.training.trainer import describe_model, limit_torch_threads
from policygrad.weight_sync.base import copy_weights_

if TYPE_CHECKING:
    from policygrad.learners.fsdp.controller import FsdpController
    from policygrad.training.distributed import ShardedCheckpointIO


# What learns from rows with their answers: a model and its optimiser, in this process or spread over several.
#
# What is computed of the rows is a function of a `LearnerShard` and of data: one process calls it, and several call it at once, each with
# its share of the model and of the micro-batches.

T = TypeVar("T")
NULL_ALGORITHM = Algorithm(name="rows")
"""A learner in several processes is made for an algorithm: one update a step, and nothing else that learns."""


class LearnerShard(Protocol):
    """What one process computes with: the whole, or its part."""

    model: nn.Module
    evaluator: Evaluator
    config: LearnerConfig
    optimizer: Optimizer
    division: WorkDivision


class SupervisedLearner(Protocol):
    """What learns, of which an objective knows no more."""

    def run_on_all(self, function: Callable[..., T], *args: Any) -> T:
        """A function of each process's share and of these arguments, in all of them; what it returns in this one."""
        ...


class LocalSupervisedLearner:
    """This process, with the whole model. `do` is as `FsdpController.do`."""

    division = WorkDivision()

    def __init__(self, model: nn.Module, config: SupervisedConfig, steps: int, causal: bool = True) -> None:
        """steps: updates of the run, for the schedule. causal: it is a language model, whose log-probabilities are asked for."""
        if config.learner.gradient_checkpointing:
            recompute_activations(model)
        self.model, self.config = model, config.learner
        self.evaluator = build_evaluator(model, 1.0) if causal else Evaluator(Network(model), 1.0)
        assert config.lr is not None  # `Supervised.resolve` has filled it in
        self.optimizer = Optimizer(model, config.optimizer, config.lr, steps)

    def run_on_all(self, function: Callable[..., T], *args: Any) -> T:
        """A function of this share and of these arguments."""
        return function(self, *args)

    @property
    def version(self) -> int:
        """How many updates made the weights."""
        return self.optimizer.num_updates

    @property
    def lr(self) -> float:
        """The peak learning rate."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    def state(self) -> SavedState:
        """What a checkpoint holds."""
        tensors, values = self.optimizer.state()
        return tensors, {"optimizer": values}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The state of a checkpoint."""
        self.optimizer.restore(tensors, values["optimizer"])


def build_supervised_learner(
    model: nn.Module, config: SupervisedConfig, steps: int, causal: bool
) -> LocalSupervisedLearner | FsdpController:
    """What learns: here, or in `learner.world_size` processes, which `close` ends.

    Raises:
        ConfigError: what several processes cannot share; a process of torchrun's that would learn for itself.
    """
    check_not_torchrun(config.learner.world_size)
    if config.learner.world_size == 1:
        return LocalSupervisedLearner(model, config, steps, causal)
    from policygrad.learners.fsdp.controller import start_fsdp_learner
    from policygrad.learners.fsdp.sharding import ModelSkeleton

    return start_fsdp_learner(
        model,
        LearnerSpec(NULL_ALGORITHM, config.lr, steps, config=config.learner, optimizer=config.optimizer),
        skeleton=None if causal else ModelSkeleton.without_shortcuts(model),
        folder=Path(config.output) if config.output else None,
    )


def step_optimizer(share: LearnerShard) -> tuple[float | None, float]:
    """(gradient norm before clipping, learning rate): the update, once its gradient is there.

    Raises:
        NumericsError: a gradient that is not finite; the weights are as they were.
    """
    return share.optimizer.step()


def get_device(share: LearnerShard) -> torch.device:
    """Where it computes."""
    return next(share.model.parameters()).device


AnyConfig = TypeVar("AnyConfig", bound=SupervisedConfig)
Numbers = Mapping[str, float]
MAX_COUNTED_UNITS = 10**7
"""Units that are shuffled to count the steps of all epochs, at most: some ten seconds."""


class Objective(Protocol):
    """What is learned: a model, its rows, and a loss."""

    model: nn.Module
    causal: bool
    """Whether it is a language model, whose log-probabilities the loss is made of."""
    tokenizer: Tokenizer
    units: list[tuple[int, ...]]
    """The training rows, by number; those of one unit stay in one update."""
    run_facts: dict[str, str]
    """What people are shown of the data."""

    def accumulate(self, learner: SupervisedLearner, rows: Sequence[int]) -> dict[str, float]:
        """Adds the gradient of the loss over one update's rows."""
        ...

    def evaluate(self, learner: SupervisedLearner, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Held-out metrics, named `held_out/…`."""
        ...

    def summarise(self, before: Numbers, after: Numbers) -> dict[str, str]:
        """The two measurements, for people."""
        ...


@dataclass(frozen=True)
class SupervisedProgress:
    """What outlives a step, besides the weights: the order of the rows is the seed's."""

    step: int = 0
    """Steps done."""


class BatchSchedule(Sequence[list[int]]):
    """The rows of every update: the units shuffled by (seed, epoch), at most `batch_size` rows or one unit per step.

    An epoch is shuffled when a step of it is asked for. Where units differ in their rows, so may epochs in their steps, which are
    counted first.

    Raises:
        ConfigError: more epochs of such units than can be counted.
    """

    def __init__(self, units: Sequence[tuple[int, ...]], epochs: int, batch_size: int, seed: int) -> None:
        self._units, self._batch_size, self._seed = units, batch_size, seed
        self._epoch: tuple[int, list[list[int]]] = (0, self._shuffled(0))
        if len({len(unit) for unit in units}) == 1:
            self._ends: Sequence[int] = range(
                len(self._epoch[1]), epochs * len(self._epoch[1]) + 1, len(self._epoch[1])
            )
        elif epochs * len(units) > MAX_COUNTED_UNITS:
            raise ConfigError(
                f"epochs must be at most {MAX_COUNTED_UNITS // len(units):,} for these {len(units):,} prompts, not {epochs:,}"
            )
        else:
            self._ends = list(accumulate(len(self._shuffled(epoch)) for epoch in range(epochs)))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        epoch = bisect_right(self._ends, index)
        if epoch != self._epoch[0]:
            self._epoch = (epoch, self._shuffled(epoch))
        return self._epoch[1][index - (self._ends[epoch - 1] if epoch else 0)]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        steps: list[list[int]] = []
        order = list(range(len(self._units)))
        Random(f"{self._seed}/{epoch}").shuffle(order)
        rows: list[int] = []
        for unit in order:
            if rows and len(rows) + len(self._units[unit]) > self._batch_size:
                steps.append(rows)
                rows = []
            rows = [*rows, *self._units[unit]]
        steps.append(rows)
        return steps


def train_supervised(
    objective: Callable[[Any], Objective],
    kind: type[AnyConfig],
    config: AnyConfig | None,
    *,
    resume: str | Path | None,
    stop_after: int | None,
    time_limit: str | None,
    overwrite: bool,
    **followers: Unpack[TrackingOptions],
) -> TrainingResult[Numbers | None]:
    """Trains what `objective` makes of the configuration, or goes on with the run in the folder `resume`.

    Raises:
        PolicygradError: what cannot be trained, with the way out.
    """
    if config is None and resume is not None:
        config = load_config(check_resumable(Path(resume), kind.kind) / f"{kind.kind}.toml", kind())
    chosen = config or kind()
    return SupervisedTrainer(chosen, objective, **followers).train(
        resume=resume, stop_after=stop_after, time_limit=time_limit, overwrite=overwrite
    )


class SupervisedTrainer(BaseTrainer[SupervisedConfig, SupervisedProgress, Numbers]):
    """A training on rows with their answers. `trainer.learner.lr` is its learning rate."""

    learner: LocalSupervisedLearner | FsdpController

    def __init__(
        self, config: SupervisedConfig, objective: Callable[[Any], Objective], **followers: Unpack[TrackingOptions]
    ) -> None:
        super().__init__(config.resolve(), **followers)
        self.kind, self.file = config.kind, f"{config.kind}.toml"  # type: ignore[misc]  # of each instance here
        self._objective = objective
        self._sharded_io: ShardedCheckpointIO | None = None  # of a learner in several processes
        self._guarding = DivergenceGuard(config.guard, lambda text, kind: self.trackers.note(text))

    def build(self, stack: ExitStack) -> None:
        config = resolve_paths(self.config)
        self.objective = self._objective(config)
        self.model, self.tokenizer = self.objective.model, self.objective.tokenizer
        self.schedule = BatchSchedule(self.objective.units, config.epochs, config.batch_size, config.seed)
        stack.enter_context(limit_torch_threads(self.model))
        set_trainable(self.model, config.learner.trainable)
        self.learner = build_supervised_learner(self.model, config, len(self.schedule), self.objective.causal)
        if not isinstance(self.learner, LocalSupervisedLearner):
            from policygrad.training.distributed import ShardedCheckpointIO

            stack.callback(self.learner.close)
            self._sharded_io = ShardedCheckpointIO(self.learner)
        self.data_digest = _digest(config)
        device = next(self.model.parameters()).device.type
        code = zip(
            config_code_references({"map": self.config.row_map}),
            config_code_references({"map": config.row_map}),
            strict=True,
        )
        self.fingerprint = fingerprint_run(replace(config, eval_data=None), device, dict(code))

    @property
    def version(self) -> int:
        return self.learner.version

    @property
    def optimizer(self) -> Optimizer:
        """Of one process, which learns alone."""
        assert isinstance(self.learner, LocalSupervisedLearner)
        return self.learner.optimizer

    @property
    def steps(self) -> int:
        return len(self.schedule)

    def pack_state(self, progress: SupervisedProgress) -> SavedState:
        tensors, values = self.learner.state()
        return tensors, self._values(values)

    @property
    def sharded_state(self) -> ShardedState[SupervisedProgress] | None:
        shares = self._sharded_io
        if shares is None:
            return None
        return ShardedState(
            lambda progress: ({}, self._values(shares.state_values)), shares.start_save, shares.is_sharded
        )

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds beside tensors; those of what learns are given."""
        return {
            "optimizer": values["optimizer"],
            "before": dict(self.before or {}),
            "data": self.data_digest,
            "began": self.fingerprint,
            "changes": self.option_changes,
            "guard": self._guarding.history.to_dict(),
        }

    def check_checkpoint(self, saved: Checkpoint) -> None:
        if lacking := {"optimizer", "before", "data"} - saved.state.keys():
            raise CheckpointError(f"it has no {min(lacking)!r}")
        check_moments(saved.tensors, saved.state["optimizer"])

    def start(self, saved: Checkpoint | None) -> SupervisedProgress:
        if saved is None:
            return SupervisedProgress()
        if saved.state["data"] != self.data_digest:
            raise RunError(
                f"{self.config.data} (or the held-out file) is not what the run in {self.folder} began with: put the old file "
                "back, or train anew with another --output"
            )
        self.compare_with_checkpoint(saved, self.fingerprint, self.config)
        trained = {name.removeprefix("weights/") for name in saved.tensors if name.startswith("weights/")}
        mine = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        if trained != mine:
            odd = min(trained ^ mine)
            raise RunError(
                f"{saved.path} was made with other trainable parameters ({odd}, say): leave learner.trainable as it was"
            )
        try:
            if self._sharded_io is None:
                self._put_back(saved.tensors, saved.state)
            else:
                self._sharded_io.restore(saved.path, self._own(saved.tensors), _whole(saved.state))
        except (KeyError, RuntimeError) as error:
            raise RunError(f"{saved.path} does not fit the model {self.config.model!r}: {error}") from error
        self._guarding.restore(saved.state.get("guard"), self.learner)
        self._publish()
        self.before, self.measured = saved.state["before"], True
        return SupervisedProgress(saved.step)

    @property
    def max_snapshot_bytes(self) -> int:
        if self.config.guard.action != "warn":
            return sys.maxsize  # to undo steps of whatever size
        return super().max_snapshot_bytes if self._sharded_io is None else 0  # which no process has as a whole

    def make_run_info(self, progress: SupervisedProgress) -> RunInfo:
        config = self.config
        rows, epochs = sum(map(len, self.objective.units)), config.epochs
        facts = {
            "model": describe_model(config.model, self.model, config.learner.dtype),
            "data": f"{rows} rows, {epochs} epoch{'s' * (epochs > 1)} of {self.steps // epochs} steps",
            **({"adapters": adapters} if (adapters := describe_adapters(self.model)) else {}),
            **({"learner": f"{config.learner.world_size} processes"} if config.learner.world_size > 1 else {}),
            **self.objective.run_facts,
            "run": str(self.folder),
        }
        title = f"policygrad · {config.kind} on {config.data}"
        first = progress.step + 1
        return RunInfo(
            title,
            facts,
            self.steps,
            first_step=first,
            config=asdict(replace(config, directory=None)),
            folder=self.folder,
        )

    def run_steps(self, progress: SupervisedProgress) -> SupervisedProgress:
        going = True
        while going:
            step, began = progress.step + 1, time.perf_counter()
            values = self.objective.accumulate(self.learner, self.schedule[step - 1])
            norm, lr = self.learner.run_on_all(step_optimizer)
            seconds = time.perf_counter() - began
            values |= {"lr": lr, "epoch": step * self.config.epochs / self.steps, "time/step": seconds}
            values |= {} if norm is None else {"grad_norm": norm}
            values |= {"tokens_per_second": values["tokens"] / seconds}
            self.log(step, values | self._guarding.assess(step, values))
            self._guarding.apply(step, self.learner, self._put_back, self.checkpointer)
            if self._guarding.stop_reason:
                self.stop()
            progress = replace(progress, step=step)
            going = self.should_continue(progress)
        self._publish()
        return progress

    def _put_back(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Weights and optimiser as a checkpoint has them."""
        self.learner.restore(self._own(tensors), _whole(state))

    @staticmethod
    def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of what learns."""
        return {name: x for name, x in tensors.items() if name.startswith(("weights/", "adam/"))}

    def _publish(self) -> None:
        """The weights into the model that is saved, where they are spread."""
        if not isinstance(self.learner, LocalSupervisedLearner):
            copy_weights_(self.learner.publish().tensors, self.model)

    def check_end(self) -> None:
        self._guarding.check(self.progress.step, self.resume_command)

    @property
    def has_eval(self) -> bool:
        return True

    def phase_label(self, when: str) -> str:
        return f"measuring {when}"

    def cached_measurement(self, step: int) -> Numbers | None:
        return None

    def evaluate(self, progress: Callable[[int, int], None]) -> tuple[Numbers, Numbers]:
        values = self.objective.evaluate(self.learner, progress)
        step = self.progress.step
        said = step in dict(self.files.history("eval/loss"))  # a finished run that is resumed says nothing twice
        return values, {} if said else values

    def summarise(self, after: Numbers | None) -> Mapping[str, str]:
        return self.objective.summarise(self.before or {}, after or {})

    def result_values(self, progress: SupervisedProgress, after: Numbers | None) -> dict[str, Any]:
        return {"steps": progress.step, "before": dict(self.before or {}), "after": dict(after or {})}


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's values, as a learner of several processes has them."""
    return {"optimizer": state["optimizer"], "rollouts": 0, "refreshed": False}


def _digest(config: SupervisedConfig) -> list[str | None]:
    """sha256 of the data, so that a resumed run sees the same rows in the same order."""
    files = [config.data] + ([config.eval_data] if config.eval_data else [])
    return [digest_data(file, config.directory) for file in files]
