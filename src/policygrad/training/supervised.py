"""Supervised training on labelled rows: rows → loss → update. Fine-tuning and reward models share it.

Everything computed on rows is a function of a `LearnerShard` and of data. With one process that process calls it; with several,
each calls it with its shard of the model and of the micro-batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

import torch
from torch import Tensor, nn

from policygrad.checkpoint.format import Checkpoint
from policygrad.checkpoint.manager import SavedState
from policygrad.core.algorithm import Algorithm
from policygrad.errors import CheckpointError, ConfigError, DataError, PolicygradError, RunError
from policygrad.learners.base import Learner, LearnerSpec
from policygrad.learners.config import LearnerConfig, check_offload
from policygrad.learners.fsdp.torchrun import check_not_torchrun
from policygrad.learners.local.expert_balance import find_expert_balance
from policygrad.learners.local.forward import Evaluator, Network, build_evaluator, choose_kernels, recompute_activations
from policygrad.learners.local.optimizer import MOMENT_PREFIXES, Optimizer, check_moments, set_trainable
from policygrad.learners.local.packing import WorkDivision
from policygrad.models.adapters import describe_adapters
from policygrad.models.tokenizer import PromptTooLongError, Tokenizer
from policygrad.tasks.preferences import TrainEvalSplit, exclude_eval_prompts, split_by_prompt
from policygrad.tasks.rows import HasPrompt, RowOptions, warn_of_skipped
from policygrad.tasks.sources import digest_data
from policygrad.trackers import RunInfo
from policygrad.training.base_trainer import BaseTrainer, TrackingOptions
from policygrad.training.config.paths import resolve_config_paths
from policygrad.training.config.serialization import load_config
from policygrad.training.config.supervised import SupervisedConfig
from policygrad.training.config.trust import find_code_references
from policygrad.training.learner_setup import limit_torch_threads
from policygrad.training.provenance import fingerprint_run
from policygrad.training.run_folder import check_resumable, config_file
from policygrad.training.setup import load_row_options
from policygrad.training.trainer import describe_model
from policygrad.utils.devices import pick_device
from policygrad.utils.out_of_memory import MemoryBudget, keep_gradients
from policygrad.utils.spans import span
from policygrad.weight_sync.base import copy_weights_

if TYPE_CHECKING:
    from policygrad.learners.fsdp.controller import FsdpController

T = TypeVar("T")
R = TypeVar("R", bound=HasPrompt)
AnyConfig = TypeVar("AnyConfig", bound=SupervisedConfig)
MetricValues = Mapping[str, float]
NULL_ALGORITHM = Algorithm(name="rows")
"""The algorithm of a learner in several processes: one update per step, and nothing else that learns."""
MAX_COUNTED_UNITS = 10**7
"""Largest number of units that are shuffled to count the steps of all epochs: some ten seconds."""


class LearnerShard(Protocol):
    """One process's part of the learner; all of it if there is one process."""

    model: nn.Module
    evaluator: Evaluator
    config: LearnerConfig
    optimizer: Optimizer
    division: WorkDivision


class SupervisedLearner(Protocol):
    """Runs functions on every shard of a learner."""

    def run_on_all(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of each process's shard and of these arguments in every process; return this process's result."""


class LocalSupervisedLearner:
    """A learner in this process alone. `steps`: updates of the run, for the learning-rate schedule; `causal`: see `Objective`."""

    supports_snapshots = True

    def __init__(self, model: nn.Module, config: SupervisedConfig, steps: int, causal: bool = True) -> None:
        self.division = WorkDivision(next(model.parameters()).device)
        if config.learner.gradient_checkpointing:
            recompute_activations(model)
        self.model, self.config = model, config.learner
        evaluator = build_evaluator(model, 1.0) if causal else Evaluator(Network(model), 1.0)
        self.evaluator = choose_kernels(evaluator, self.config)
        if causal:
            find_expert_balance(self.evaluator, self.config, self.division)  # refused here, before the run
        assert config.lr is not None  # `SupervisedConfig.resolve` has filled it in
        self.optimizer = Optimizer(model, config.optimizer, config.lr, steps)
        self.optimizer.check_masters()

    def run_on_all(self, function: Callable[..., T], *args: Any) -> T:
        return function(self, *args)

    @property
    def optimizers(self) -> list[Optimizer]:
        return [self.optimizer]

    @property
    def memory(self) -> MemoryBudget:
        """What limits the tokens of a pass once memory has run out."""
        return self.division.memory

    @property
    def version(self) -> int:
        """Number of updates so far."""
        return self.optimizer.num_updates

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    def state(self) -> SavedState:
        """Return what a checkpoint holds."""
        tensors, values = self.optimizer.state()
        return tensors, {"optimizer": values}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self.optimizer.restore(tensors, values["optimizer"])


def run_passes(shard: LearnerShard, work: Callable[[], T]) -> T:
    """Return `work()`, passes over an update's micro-batches; anew, with smaller ones, if memory runs out (`MemoryBudget`)."""
    return shard.division.memory.run(work, keep_gradients(shard.optimizer.parameters, shard.optimizer.masters))


def step_optimizer(shard: LearnerShard) -> tuple[float | None, float]:
    """Take the update from the accumulated gradient; return (gradient norm before clipping, learning rate).

    Raises:
        NumericsError: The gradient is not finite; the weights are unchanged.
    """
    return shard.optimizer.step()


def get_device(shard: LearnerShard) -> torch.device:
    return next(shard.model.parameters()).device


class Objective(Protocol):
    """A model, its rows, and a loss."""

    model: nn.Module
    causal: bool  # whether the model is a language model, whose log-probabilities the loss uses
    tokenizer: Tokenizer
    units: list[tuple[int, ...]]  # the training rows by number; the rows of a unit stay in one update
    run_facts: dict[str, str]  # what to show of the data

    def accumulate(self, learner: SupervisedLearner, rows: Sequence[int]) -> dict[str, float]:
        """Add the gradient of the loss over one update's rows; return metrics."""

    def evaluate(self, learner: SupervisedLearner, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Return the held-out metrics, named `eval/…`."""

    def summarise(self, before: MetricValues, after: MetricValues) -> dict[str, str]:
        """Describe the evaluations before and after training."""


def read_rows(
    config: SupervisedConfig, read: Callable[[str, RowOptions], list[R]], noun: str
) -> tuple[list[R], TrainEvalSplit, dict[str, str]]:
    """Return the training rows followed by those of `eval_data`, which of them are for what, and facts to show about them."""
    options = load_row_options(config.row_map, config.skip_bad_rows, fetch_images=config.fetch_images)
    rows = train_rows = read(config.data, options)
    eval_rows = read(config.eval_data, options) if config.eval_data else []
    if eval_rows:
        train_rows = exclude_eval_prompts(rows, eval_rows, config.data, str(config.eval_data))
        size = len(train_rows)
        split = TrainEvalSplit(tuple(range(size)), tuple(range(size, size + len(eval_rows))), eval_on_train=False)
    else:
        split = split_by_prompt(rows)
    facts = {"eval data": _describe_evaluation(split)}
    if len(train_rows) < len(rows):
        facts["left out"] = f"{len(rows) - len(train_rows)} {noun} with prompts of the evaluation data"
    return [*train_rows, *eval_rows], split, facts


def encode_rows(
    config: SupervisedConfig,
    rows: Sequence[R],
    split: TrainEvalSplit,
    facts: Mapping[str, str],
    encode: Callable[[R], T],
) -> tuple[list[R], list[T], TrainEvalSplit, dict[str, str]]:
    """Return the rows, their encodings, the split and the facts, without the rows that the model cannot read where
    `config.skip_bad_rows` allows it. They are counted in a warning; the others stay in their half.

    Raises:
        PolicygradError: `encode` raised it for a row that is not to be skipped.
        DataError: No row is left to train on.
    """
    kept, encodings, number, first_error = list[R](), list[T](), dict[int, int](), ""
    for index, row in enumerate(rows):
        try:
            encodings.append(encode(row))
        except PolicygradError as error:
            if not config.skip_bad_rows:
                if isinstance(error, PromptTooLongError):
                    raise PromptTooLongError(f"{error}. --skip-bad-rows leaves such rows out") from error
                raise
            first_error = first_error or str(error)
            continue
        number[index] = len(kept)
        kept.append(row)
    if len(kept) == len(rows):
        return kept, encodings, split, dict(facts)
    warn_of_skipped(config.data, len(rows) - len(kept), len(rows), first_error)
    train, evaluated = ([number[i] for i in half if i in number] for half in (split.train, split.eval))
    if not train:
        raise DataError(f"{config.data}: no row is left to train on; the first that was skipped: {first_error}")
    split = TrainEvalSplit(tuple(train), tuple(evaluated or train), split.eval_on_train or not evaluated)
    return kept, encodings, split, {**facts, "eval data": _describe_evaluation(split)}


def _describe_evaluation(split: TrainEvalSplit) -> str:
    on_train = "the training rows, which are too few to hold any out"
    return on_train if split.eval_on_train else f"{len(split.eval)} rows"


@dataclass(frozen=True)
class SupervisedProgress:
    """The state of a run between two steps, apart from the weights. The order of the rows follows from the seed."""

    step: int = 0  # completed steps


class BatchSchedule:
    """The rows of every update: units shuffled by (seed, epoch), with at most `batch_size` rows or one unit per update.

    An epoch is shuffled when one of its steps is requested. If units differ in size, epochs may differ in their number of steps,
    and all of them are shuffled once to count the steps.

    Raises:
        ConfigError: There are too many epochs of such units to count.
    """

    def __init__(self, units: Sequence[tuple[int, ...]], epochs: int, batch_size: int, seed: int) -> None:
        self._units, self._batch_size, self._seed = units, batch_size, seed
        self._epoch: tuple[int, list[list[int]]] = (0, self._shuffle(0))
        if len({len(unit) for unit in units}) == 1:
            steps = len(self._epoch[1])
            self._ends: Sequence[int] = range(steps, epochs * steps + 1, steps)
        elif epochs * len(units) > MAX_COUNTED_UNITS:
            raise ConfigError(
                f"epochs must be at most {MAX_COUNTED_UNITS // len(units):,} for these {len(units):,} prompts, not {epochs:,}"
            )
        else:
            self._ends = list(accumulate(len(self._shuffle(epoch)) for epoch in range(epochs)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        epoch = bisect_right(self._ends, index)
        if epoch != self._epoch[0]:
            self._epoch = (epoch, self._shuffle(epoch))
        return self._epoch[1][index - (self._ends[epoch - 1] if epoch else 0)]

    def _shuffle(self, epoch: int) -> list[list[int]]:
        order = list(self._units)
        Random(f"{self._seed}/{epoch}").shuffle(order)
        steps: list[list[int]] = [[]]
        for unit in order:
            if steps[-1] and len(steps[-1]) + len(unit) > self._batch_size:
                steps.append([])
            steps[-1] += unit
        return steps


def load_resumed_config(kind: type[AnyConfig], resume: str | Path | None) -> AnyConfig:
    """Return the configuration of the run in the folder `resume`; the default if there is none."""
    if resume is None:
        return kind()
    return load_config(config_file(check_resumable(Path(resume), kind.kind), kind.kind), kind())


class SupervisedTrainer(BaseTrainer[SupervisedConfig, SupervisedProgress, MetricValues]):
    """A run of supervised training. `trainer.learner.lr` is its learning rate."""

    learner: LocalSupervisedLearner | FsdpController

    def __init__(
        self, config: SupervisedConfig, objective: Callable[[Any], Objective], **tracking: Unpack[TrackingOptions]
    ) -> None:
        super().__init__(config.resolve(), **tracking)
        self.kind, self.file = config.kind, f"{config.kind}.toml"  # type: ignore[misc]  # set per instance here
        self._make_objective = objective

    def build(self, stack: ExitStack) -> None:
        config = resolve_config_paths(self.config)
        check_offload(config.learner, config.optimizer, pick_device(config.learner.device))
        self.objective = self._make_objective(config)
        self.model, self.tokenizer = self.objective.model, self.objective.tokenizer
        self.schedule = BatchSchedule(self.objective.units, config.epochs, config.batch_size, config.seed)
        stack.enter_context(limit_torch_threads(self.model))
        set_trainable(self.model, config.learner.trainable, config.learner.vision)
        check_not_torchrun(config.learner.world_size)
        learner: LocalSupervisedLearner | FsdpController
        fitting = replace(config, learner=self.memory.apply(config.learner))
        if config.learner.world_size == 1:
            learner = LocalSupervisedLearner(self.model, fitting, len(self.schedule), self.objective.causal)
        else:
            from policygrad.learners.fsdp.controller import start_fsdp_learner
            from policygrad.learners.fsdp.sharding import ModelSkeleton

            learner = start_fsdp_learner(
                self.model,
                LearnerSpec(NULL_ALGORITHM, config.lr, self.steps, config=fitting.learner, optimizer=config.optimizer),
                skeleton=None if self.objective.causal else ModelSkeleton.without_shortcuts(self.model),
                folder=Path(config.output) if config.output else None,
            )
        self.attach_learner(learner, stack)
        # so that a resumed run sees the same rows
        self.data_digest = [digest_data(file, config.directory) for file in (config.data, config.eval_data) if file]
        device = next(self.model.parameters()).device.type
        code = (find_code_references({"row_map": c.row_map}) for c in (self.config, config))
        self.fingerprint = fingerprint_run(replace(config, eval_data=None), device, dict(zip(*code, strict=True)))

    @property
    def steps(self) -> int:
        return len(self.schedule)

    def pack(self, progress: SupervisedProgress, tensors: dict[str, Tensor], values: Mapping[str, Any]) -> SavedState:
        return tensors, {
            "optimizer": values["optimizer"],
            "before": dict(self.before or {}),
            "data": self.data_digest,
            "fingerprint": self.fingerprint,
            "option_changes": self.option_changes,
            "guard": asdict(self.guard.history),
        }

    def check_checkpoint(self, saved: Checkpoint) -> None:
        if missing := {"optimizer", "before", "data"} - saved.state.keys():
            raise CheckpointError(f"it has no {min(missing)!r}")
        check_moments(saved.tensors, saved.state["optimizer"])

    def start(self, saved: Checkpoint | None) -> SupervisedProgress:
        if saved is None:
            return SupervisedProgress()
        if saved.state["data"] != self.data_digest:
            raise RunError(
                f"{self.config.data} (or the evaluation data) is not what the run in {self.folder} started with: restore the old "
                "file, or start a new run with another --output"
            )
        self.compare_with_checkpoint(saved)
        before = {name.removeprefix("weights/") for name in saved.tensors if name.startswith("weights/")}
        current = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        if before != current:
            raise RunError(
                f"{saved.path} has other trainable parameters ({min(before ^ current)}, say): leave learner.trainable as it was"
            )
        restore = self.learner.restore if self.sharded_io is None else partial(self.sharded_io.restore, saved.path)
        try:
            restore(*_split_learner_state(saved.tensors, saved.state))
        except (KeyError, RuntimeError) as error:
            raise RunError(f"{saved.path} does not fit the model {self.config.model!r}: {error}") from error
        self.guard.restore(saved.state.get("guard"), self.learner)
        self._gather_weights()
        self.before, self.measured = saved.state["before"], True
        return SupervisedProgress(saved.step)

    def load_learner_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.learner.restore(*_split_learner_state(tensors, state))

    def make_run_info(self, progress: SupervisedProgress) -> RunInfo:
        config = self.config
        rows, epochs = sum(map(len, self.objective.units)), config.epochs
        adapters = describe_adapters(self.model)
        facts = {
            "model": describe_model(config.model, self.model, config.learner.dtype),
            "data": f"{rows} rows, {epochs} epoch{'s' * (epochs > 1)} of {self.steps // epochs} steps",
            **({"adapters": adapters} if adapters else {}),
            **({"learner": f"{config.learner.world_size} processes"} if config.learner.world_size > 1 else {}),
            **self.objective.run_facts,
            "run": str(self.folder),
        }
        return RunInfo(
            f"policygrad · {config.kind} on {config.data}",
            facts,
            self.steps,
            first_step=progress.step + 1,
            config=asdict(replace(config, directory=None)),
            folder=self.folder,
        )

    def run_steps(self, progress: SupervisedProgress) -> SupervisedProgress:
        active = True
        while active:
            step = progress.step + 1
            with span("step", step=step):
                with span("learn", step=step) as learning:
                    values = self.objective.accumulate(self.learner, self.schedule[step - 1])
                    with span("optimizer step"):
                        norm, lr = self.learner.run_on_all(step_optimizer)
                values |= {"lr": lr, "epoch": step * self.config.epochs / self.steps, "time/step": learning.seconds}
                values |= {} if norm is None else {"grad_norm": norm}
                values |= {"tokens_per_second": values["tokens"] / learning.seconds}
                self.current_step = step
                with span("log", step=step):
                    decision = self.guard.assess(step, values)
                    self.log(step, values | decision.metrics)
                    self.apply(decision)
                progress = replace(progress, step=step)
                active = self.should_continue(progress)
        self._gather_weights()
        return progress

    def _gather_weights(self) -> None:
        """Copy the weights of several processes into the model that is saved."""
        if isinstance(self.learner, Learner):
            copy_weights_(self.learner.publish().tensors, self.model)

    def evaluate(self, progress: Callable[[int, int], None]) -> tuple[MetricValues, MetricValues]:
        values = self.objective.evaluate(self.learner, progress)
        is_logged = self.progress.step in dict(self.files.history("eval/loss"))  # by a finished run that is resumed
        return values, {} if is_logged else values

    def summarise(self, after: MetricValues | None) -> Mapping[str, str]:
        return self.objective.summarise(self.before or {}, after or {})

    def result_values(self, progress: SupervisedProgress, after: MetricValues | None) -> dict[str, Any]:
        return {"steps": progress.step, "before": dict(self.before or {}), "after": dict(after or {})}


def _split_learner_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> SavedState:
    """Return a checkpoint's part for the learner, with the values that a learner in several processes also expects."""
    learner_tensors = {name: x for name, x in tensors.items() if name.startswith(("weights/", *MOMENT_PREFIXES))}
    return learner_tensors, {"optimizer": state["optimizer"], "rollouts": 0, "refreshed": False}
