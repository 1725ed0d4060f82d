"""The life of a training run, whatever it trains: load, evaluate, take steps with checkpoints, evaluate again, save a model that
other programs load. Reinforcement learning, fine-tuning and reward models fill in the rest.
"""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from policygrad.checkpoint.format import Checkpoint, list_checkpoints, load_latest, newest_step, parse_step
from policygrad.checkpoint.manager import MAX_SNAPSHOT_BYTES, Checkpointer, HasStep, SavedState, ShardedState
from policygrad.checkpoint.model_export import save_model, write_model
from policygrad.checkpoint.read_back import describe_difference, saved_tensors
from policygrad.errors import ConfigError, ModelError, OutOfMemoryError, RunError
from policygrad.learners.base import CloseableLearner, DistributedLearner, SnapshotLearner
from policygrad.models.loading import TRUST_FLAG
from policygrad.models.tokenizer import Tokenizer
from policygrad.trackers import CompositeTracker, JsonlTracker, RunInfo, Tracker, default_tracker
from policygrad.trackers.base import STOP_SUMMARY
from policygrad.trackers.registry import create_trackers
from policygrad.training.config.paths import check_files_exist, relative_to_folder
from policygrad.training.config.serialization import dump_config
from policygrad.training.divergence_guard import DivergenceGuard, GuardDecision
from policygrad.training.interrupts import StopController, StopRequested, parse_duration
from policygrad.training.loop import StepOutcome
from policygrad.training.memory_limits import MICRO_TOKENS, MemoryLimits, explain_shortage
from policygrad.training.model_card import render_model_card
from policygrad.training.provenance import Fingerprint, compare_fingerprints, list_changed_options
from policygrad.training.run_folder import create_run_folder, open_run_folder, with_end_marker
from policygrad.utils.devices import pick_device
from policygrad.utils.filesystem import write_atomically
from policygrad.utils.garbage import paused_garbage_collection
from policygrad.utils.out_of_memory import ReportsShortage, is_out_of_memory
from policygrad.utils.spans import is_recording, span, start_recording, stop_recording

if TYPE_CHECKING:
    from policygrad.training.best_model import BestModel, BestStep
    from policygrad.training.distributed import ShardedCheckpointIO


class Callback:
    """Called at every step; may change the run. Override the methods you need.

    `trainer` is the running trainer: `trainer.learner.lr` is the learning rate, `trainer.progress` the progress, `trainer.stop()`
    ends the run. A checkpoint holds nothing of a callback, so let it depend on the step number alone.
    """

    def start(self, trainer: Any) -> None:
        """Called once everything is loaded, before the first step."""

    def step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Called after step number `step` (from 1)."""


class TrackingOptions(TypedDict, total=False):
    """Who follows a run. These are the keyword arguments that every trainer takes."""

    display: Tracker | bool
    trackers: Sequence[Tracker]
    callbacks: Sequence[Callback]


M = TypeVar("M")


@dataclass(frozen=True)
class TrainingResult(Generic[M]):
    """The outcome of a run."""

    output: Path
    steps: int
    before: M
    """Evaluation before training; None if there was none, or every reward failed. `after` likewise."""
    after: M
    model: Path | None
    """None if the run stopped before its last step; it can be resumed."""
    interrupted: bool = False
    """Whether a signal, a time limit or `stop()` ended the run early."""
    next_commands: Mapping[str, str] = field(default_factory=dict)
    """What to do with a finished run -> the command."""


C = TypeVar("C", bound=Any)  # a configuration: a frozen dataclass with `output`, `checkpoint`, `guard`, …
P = TypeVar("P", bound=HasStep)


class BaseTrainer(ABC, Generic[C, P, M]):
    """One process's part of a run. Create it once and train once.

    Args:
        display: Where progress is shown: True picks a terminal, plain lines or a notebook; False shows nothing.
        trackers: Further trackers.
        callbacks: Called at every step; they may change the run.
    """

    kind: ClassVar[str]  # name of the command
    file: ClassVar[str]  # name of the configuration file in the run's folder
    model: nn.Module
    tokenizer: Tokenizer
    learner: Any
    progress: P
    run_info: RunInfo  # the run as it was when this process started
    fingerprint: Fingerprint
    last_step: int
    sharded_io: ShardedCheckpointIO | None = None  # saves and restores a learner in several processes
    best: BestModel | None = None  # keeps the best model so far
    memory: MemoryLimits

    def __init__(
        self,
        config: C,
        *,
        display: Tracker | bool = True,
        trackers: Sequence[Tracker] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(f"{callback!r} is no callback: pass instances of subclasses of policygrad.Callback")
        self.config = config
        self._display = display if isinstance(display, Tracker) else default_tracker() if display else Tracker()
        self._other_trackers = (*trackers, *create_trackers(config.track, config.trace_mib))
        self.callbacks = tuple(callbacks)
        self.guard = DivergenceGuard(config.guard, self.note)
        self.before: M | None = None
        self.measured = False
        """Whether `before` is known."""
        self.option_changes: list[dict[str, Any]] = []
        """Options that a resumed run changed, as {"step": after which, "options": ["lr 0.01 -> 0.003"]}; for card and report."""
        self._noted_kinds = set[str]()
        self._early_notes: list[tuple[str, str]] | None = []
        """(text, kind) of notes from before the run's files are open."""
        self.current_step: int | None = None
        """The step at which something is noted now; None before the first one of this process."""

    # What subclasses define

    @abstractmethod
    def build(self, stack: ExitStack) -> None:
        """Load everything. If anything is wrong, raise now, before the run's folder is kept."""

    @abstractmethod
    def start(self, saved: Checkpoint | None) -> P:
        """Return the initial progress, or restore a checkpoint and return its progress."""

    @abstractmethod
    def pack(self, progress: P, tensors: dict[str, Tensor], values: Mapping[str, Any]) -> SavedState:
        """Return what a resumed run needs, from the learner's tensors and values."""

    @abstractmethod
    def load_learner_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Put the learner back to a checkpoint's state."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of the last step."""

    def check_checkpoint(self, saved: Checkpoint) -> None:
        """Raise CheckpointError (or KeyError, TypeError) if a checkpoint is incomplete; the one before is then used."""

    @property
    def max_snapshot_bytes(self) -> int:
        """Largest state that is copied at every step."""
        if self.config.guard.action != "warn":  # any step may have to be undone
            return sys.maxsize
        return MAX_SNAPSHOT_BYTES if isinstance(self.learner, SnapshotLearner) else 0  # elsewhere it may be costly

    @abstractmethod
    def make_run_info(self, progress: P) -> RunInfo:
        """Describe the run for trackers."""

    @abstractmethod
    def run_steps(self, progress: P) -> P:
        """Take the steps, calling `log` and `should_continue` after each."""

    def check_end(self) -> None:
        """Raise the error that ended the run, once its steps are saved."""
        if reason := self.guard.decision.stop_reason:
            raise RunError(
                f"step {self.progress.step}: {reason}: {self.resume_command} resumes it, for example with a lower --lr"
            )

    def is_finished(self, progress: P) -> bool:
        return progress.step >= self.steps

    @property
    def has_eval(self) -> bool:
        """Whether the run is evaluated."""
        return True

    @abstractmethod
    def evaluate(self, progress: Callable[[int, int], None]) -> tuple[M | None, Mapping[str, float]]:
        """Evaluate the model; return the result and its metrics."""

    def cached_measurement(self, step: int) -> M | None:
        """Return an evaluation that the log already holds, from a run that was killed after it."""
        return None

    @property
    def best_metrics(self) -> Mapping[str, bool]:
        """Metrics of the evaluations by which models can be compared, and whether a higher value is better."""
        return {}

    @abstractmethod
    def summarise(self, after: M | None) -> Mapping[str, str]:
        """Describe the evaluations before and after training."""

    @abstractmethod
    def result_values(self, progress: P, after: M | None) -> Mapping[str, Any]:
        """Return the contents of result.json."""

    # The run

    def train(
        self,
        *,
        resume: str | Path | None = None,
        stop_after: int | None = None,
        time_limit: str | None = None,
        overwrite: bool = False,
    ) -> TrainingResult[M | None]:
        """Start a new run, or resume the one in the folder `resume` from its newest intact checkpoint.

        A signal stops the run, resumably (see `StopController`).

        Args:
            stop_after: Stop, resumably, after this many steps of this call.
            time_limit: Stop, resumably, in time to be saved before this much time (23h50m) has passed.
            overwrite: Replace the run that is in the output folder.

        Raises:
            PolicygradError: The run cannot be trained; the message says what to change.
        """
        self.stopping = StopController(None if time_limit is None else parse_duration(time_limit, "time_limit"))
        if stop_after is not None and stop_after < 1:
            raise ConfigError(f"stop_after must be at least 1, not {stop_after}")
        if overwrite and resume is not None:
            raise ConfigError("resume continues a run and overwrite replaces it: leave one of them out")
        with ExitStack() as stack:
            trackers = [self._display, *self._other_trackers]
            if self.config.metrics_port is not None:  # refused before the model is loaded
                from policygrad.trackers.prometheus import PrometheusMetrics

                trackers.append(stack.enter_context(PrometheusMetrics(self.config.metrics_port)))
            self.trackers = CompositeTracker(trackers)
            if any(tracker.records_spans for tracker in trackers):
                from policygrad.utils.span_recorder import SpanRecorder

                start_recording(SpanRecorder())
                stack.callback(stop_recording)
            stack.enter_context(self.stopping)
            if resume is not None:
                opened = open_run_folder(Path(resume), self.kind, self.trackers.note)
            else:
                opened = create_run_folder(self.config.output, self.name, self.file, self.trackers.note, overwrite)
            folder = stack.enter_context(opened)
            self.folder = folder.path
            self.config = replace(self.config, output=str(self.folder))
            if not (self.folder / self.file).exists():  # first of all, so that a run killed now can be resumed
                self._write_configuration()
            stack.push(lambda *error: self.trackers.__exit__(*error))
            self.trackers.phase("loading the model")
            torch.manual_seed(self.config.seed)  # for models and rewards; completions have their own random streams
            try:
                check_files_exist(self.config)
                self.memory = MemoryLimits(self.folder, pick_device(self.config.learner.device))
                loading = span("load")
                with self._explaining_shortage(), self.stopping.interruptible(), paused_garbage_collection(), loading:
                    self.build(stack)
                if self.config.checkpoint.keep_best is not None:
                    from policygrad.training.best_model import check_best_metric

                    check_best_metric(self.config.checkpoint.keep_best, self.best_metrics)
            except StopRequested:
                if folder.has_stash:
                    self.trackers.note(f"stopped while loading; the earlier run in {self.folder} is unchanged")
                    return TrainingResult(self.folder, 0, None, None, None, interrupted=True)
                folder.commit()
                self.trackers.note(f"stopped while loading; resume with: {self.resume_command}")
                done = newest_step(self.folder / "checkpoints")
                return TrainingResult(self.folder, done, None, None, None, interrupted=True)
            folder.commit()
            self.files = JsonlTracker(self.folder)
            self.trackers.add(self.files)
            with self._explaining_shortage():
                return self._train(resume is not None, stop_after)

    @contextmanager
    def _explaining_shortage(self) -> Iterator[None]:
        """Say what fills the memory where it does not suffice, and keep what a resumed run should begin with."""
        try:
            yield
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            shortage = error.with_traceback(None)  # whose frames keep what has filled it
        model, learner = getattr(self, "model", None), getattr(self, "learner", None)
        end = explain_shortage(shortage, model, learner, self.config, self.resume_command)
        self._keep_limit(end)
        raise end

    def _keep_limit(self, shortage: OutOfMemoryError) -> None:
        """Keep what a resumed run should begin with, if that is known."""
        if shortage.limit is not None:
            self.memory.keep(MICRO_TOKENS, self.config.learner.micro_tokens, shortage.limit)

    @property
    def name(self) -> str:
        """Name of a new run's folder."""
        return self.kind

    def _write_configuration(self) -> None:
        text = dump_config(relative_to_folder(self.config, self.folder))
        write_atomically(self.folder / self.file, with_end_marker(text))

    def attach_learner(self, learner: Any, stack: ExitStack) -> None:
        """Use this learner, which `stack` closes."""
        self.learner = learner
        if isinstance(learner, ReportsShortage):
            learner.on_shortage = self._keep_limit
        self.memory.follow(learner, MICRO_TOKENS, self.config.learner.micro_tokens, self.note)
        if isinstance(learner, CloseableLearner):
            stack.callback(learner.close)
        if self.config.learner.world_size > 1:  # torch.distributed takes a while to import
            from policygrad.training.distributed import ShardedCheckpointIO, gather_spans, start_rank_recording

            self.sharded_io = ShardedCheckpointIO(learner) if isinstance(learner, DistributedLearner) else None
            if self.sharded_io is not None and is_recording():
                learner.run_on_all(start_rank_recording)
                stack.push(lambda kind, *_: learner.run_on_all(gather_spans) if kind is None else None)

    def _train(self, resumed: bool, stop_after: int | None) -> TrainingResult[M | None]:
        self.checkpointer = self._make_checkpointer()
        saved = self.checkpointer.restore() if resumed else None
        self.progress = self.start(saved)
        if self.progress.step > self.steps:
            raise RunError(
                f"the run in {self.folder} has completed {self.progress.step} steps, more than steps={self.steps}: leave steps "
                f"out, or set it to {self.progress.step} or more; to stop earlier, start a new run"
            )
        self.files.truncate_after(self.progress.step if saved else -1)
        self._keep_early_notes()
        self._restore_best()
        self._write_configuration()
        self.run_info = self.make_run_info(self.progress)
        self.trackers.start(self.run_info)
        if self.has_eval and not self.measured:
            try:
                self.before = self.evaluate_at("before training", self.progress.step)
                self.measured = True
            except StopRequested:
                return self._stopped()
        self.last_step = self.steps if stop_after is None else min(self.steps, self.progress.step + stop_after)
        self.checkpointer.start(self.progress)
        for callback in self.callbacks:
            callback.start(self)
        self.stopping.training_started()
        with self.checkpointer.save_on_error():
            if self.progress.step < self.last_step and not self.is_finished(self.progress):
                try:
                    self.progress = self.run_steps(self.progress)
                except StopRequested:
                    self.progress = self.checkpointer.rewind()
        self.check_end()
        if not self.is_finished(self.progress):
            return self._stopped()
        try:
            after = self.evaluate_at("after training", self.progress.step) if self.has_eval else None
        except StopRequested:
            return self._stopped()
        model = self._finish(after)
        return TrainingResult(
            self.folder, self.progress.step, self.before, after, model, next_commands=self.next_commands
        )

    def _make_checkpointer(self) -> Checkpointer[P]:
        """Return what saves and restores this run."""
        sharded: ShardedState[P] | None = None
        if (io := self.sharded_io) is not None:
            sharded = ShardedState(lambda p: self.pack(p, {}, self.learner.state_values), io.start_save, io.is_sharded)
        return Checkpointer(
            self.folder / "checkpoints",
            every=self.config.checkpoint.every,
            keep=self.config.checkpoint.keep,
            pack=lambda progress: self.pack(progress, *self.learner.state()),
            version=lambda: self.learner.version,
            sync=self.files.sync,
            note=self.trackers.note,
            resume_command=self.resume_command,
            max_snapshot_bytes=self.max_snapshot_bytes,
            check=self.check_checkpoint,
            sharded=sharded,
            before_save=self.before_save,
        )

    def _finish(self, after: M | None) -> Path:
        """Write the model and the results of a run that is complete, and return the model's folder.

        Raises:
            ModelError: The model that was written is another than the one that was trained.
        """
        values, summary = dict(self.result_values(self.progress, after)), self.summarise(after)
        if self.best is not None and (best := self.best.read()) is not None:
            values["best"] = asdict(best)
        card = render_model_card(
            self.kind,
            self.folder.name,
            tomllib.loads(dump_config(self.config)),
            summary,
            values,
            self.run_info.facts.get("eval data", ""),
            self.option_changes,
            reads_pictures=self.tokenizer.pictures is not None,
        )
        with span("export"):
            model = save_model(self.folder, self.write_weights, self.tokenizer, self.resume_command, card)
        self.checkpointer.finish()
        write_atomically(self.folder / "result.json", json.dumps(values, indent=1) + "\n")
        self.trackers.phase("reading the model back")
        with span("read back"):
            difference = describe_difference(model, self.model, self.written_tensors())
        places = {"model": str(model), **self._describe_best(), "run": str(self.folder)}
        self.trackers.finish({**summary, **places, **self.next_commands})
        if difference:
            raise ModelError(
                f"{model} was written, but it is not the model that was trained: read back, {difference}. Its files stay, and the "
                f"last checkpoint has the trained weights too: {self.resume_command} writes the model again. Please report which "
                "model this is"
            )
        return model

    def evaluate_at(self, when: str, step: int, *, interruptible: bool = True) -> M | None:
        """Evaluate after `step` steps, unless the log already holds the result.

        Raises:
            StopRequested: The run is stopped.
        """
        if (cached := self.cached_measurement(step)) is not None:
            return cached
        phase = f"evaluating {when}"
        self.trackers.phase(phase)
        with span("evaluation", step=step), self.stopping.interruptible() if interruptible else nullcontext():
            result, values = self.evaluate(lambda done, total: self.trackers.phase(phase, done, total))
        self.trackers.phase("")
        if values:
            if self.best is not None:  # first, so that the log holds no evaluation of a model that was lost
                with span("keep best", step=step):
                    self.best.consider(step, values)
            self.trackers.log_evaluation(step, values)
        return result

    def _restore_best(self) -> None:
        """Begin with the best model of the steps that the log holds."""
        metric = self.config.checkpoint.keep_best
        if metric is None:
            return
        from policygrad.training.best_model import BestModel

        self.best = BestModel(self.folder, metric, self.best_metrics[metric], self._write_best, self.note)
        self.best.restore(dict(self.files.history(metric)), lambda name: dict(self.files.history(name)))

    def _write_best(self, folder: Path, best: BestStep) -> None:
        def write(path: Path) -> None:
            self.write_weights(path)
            best.add_to(path)

        card = render_model_card(
            self.kind,
            f"{self.folder.name}, the best model so far",
            tomllib.loads(dump_config(self.config)),
            {"best": f"{best}, of the evaluations up to then"},
            {},
            self.run_info.facts.get("eval data", ""),
            self.option_changes,
            reads_pictures=self.tokenizer.pictures is not None,
        )
        folder.parent.mkdir(exist_ok=True)
        write_model(folder, write, self.tokenizer, card=card)

    def _describe_best(self) -> dict[str, str]:
        if self.best is None or (found := self.best.read()) is None:
            return {}
        return {"best": f"{self.best.path} ({found})"}

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Log a finished step: to the files first, so that everything shown is also on disk."""
        self.trackers.log(step, metrics, completions)
        for callback in self.callbacks:
            callback.step(self, step, metrics)

    def note(self, text: str, kind: str | None = None) -> None:
        """Show a message, of each kind only the first in this process. The run's folder keeps the steps of all of them."""
        kind = text if kind is None else kind
        if self._early_notes is not None:
            self._early_notes.append((text, kind))
        else:
            first = self.current_step is None
            self.files.append_note(self.progress.step if first else self.current_step or 0, text, kind, once=first)
        if kind not in self._noted_kinds:
            self._noted_kinds.add(kind)
            self.trackers.note(text)

    def _keep_early_notes(self) -> None:
        early, self._early_notes = self._early_notes or [], None
        for text, kind in early:
            self.files.append_note(self.progress.step, text, kind, once=True)

    def apply(self, decision: GuardDecision) -> StepOutcome:
        """Carry out the guard's decision on the step that was just logged; return whether the step was undone.

        Raises:
            CheckpointError: A rollback found no intact checkpoint.
        """
        if decision.stop_reason:
            self.stop()
        if decision.action == "warn":
            return StepOutcome()
        saved = None
        if decision.action == "rollback":
            self.checkpointer.wait_for_save()
            saved = load_latest(self.checkpointer.folder, warn=self.note)
        if saved is None:
            assert self.checkpointer.snapshot is not None  # taken at every step unless guard.action is warn
            self.load_learner_state(*self.checkpointer.snapshot)
        else:
            self.load_learner_state(saved.tensors, saved.state)
            step = self.progress.step + 1
            self.note(f"step {step}: restored the weights of step {saved.step}, at a lower learning rate")
        if decision.action == "rollback":
            self.learner.lr *= self.config.guard.lr_factor  # a critic keeps its own
        return StepOutcome(undone=True, restored_state=None if saved is None else saved.state.get("parts"))

    def should_continue(self, progress: P) -> bool:
        """Save a checkpoint when one is due; return whether to take another step."""
        self.progress = progress
        self.stopping.step_done()
        active = progress.step < self.last_step and not self.is_finished(progress) and not self.stopping.requested
        self.checkpointer.on_step(progress, final=not active)
        if self.best is not None:
            self.best.prune([parse_step(path) or 0 for path in list_checkpoints(self.checkpointer.folder)])
        if self.sharded_io is not None and is_recording():
            from policygrad.training.distributed import gather_spans

            self.learner.run_on_all(gather_spans)
        return active

    def before_save(self, progress: P) -> None:
        """Write what belongs to the step that led to `progress`, before the step can be part of a checkpoint."""

    def compare_with_checkpoint(self, saved: Checkpoint) -> None:
        """Note what differs from the checkpoint, and record the options that do.

        Raises:
            RunError: The training or evaluation data differ.
        """
        self.option_changes = [*saved.state.get("option_changes", ())]
        if "fingerprint" not in saved.state:
            return
        for text in compare_fingerprints(saved.state["fingerprint"], self.fingerprint, self.config, self.folder):
            self.note(text)
        if options := list_changed_options(saved.state["fingerprint"], self.fingerprint):
            self.option_changes.append({"step": saved.step, "options": options})

    def stop(self) -> None:
        """End the run, resumably, after the current step."""
        self.stopping.requested = True

    def write_weights(self, folder: Path) -> None:
        """Write the trained model in the format that transformers loads."""
        self.model.save_pretrained(folder)  # type: ignore[operator]

    def written_tensors(self) -> Mapping[str, Tensor]:
        """Return what `write_weights` has written."""
        return saved_tensors(self.model)

    def _stopped(self) -> TrainingResult[M | None]:
        step = self.progress.step
        stopped_after, resume_with = STOP_SUMMARY
        stopped = f"step {step} of {self.steps}"
        self.trackers.finish({stopped_after: stopped, **self._describe_best(), resume_with: self.resume_command})
        return TrainingResult(self.folder, step, self.before, None, None, interrupted=self.stopping.requested)

    @property
    def next_commands(self) -> dict[str, str]:
        """What to do with a finished run -> the command."""
        return {"look at it": f"policygrad report {shlex.quote(str(self.folder))}"}

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        trust = f" {TRUST_FLAG}" if self.config.trust_remote_code else ""
        return f"policygrad {self.kind} --resume {self.folder}{trust}"
