"""One training from beginning to end, whatever is trained: load, measure, step by step with checkpoints, measure again, save a
model that others load. Reinforcement learning, fine-tuning and reward models fill in what differs.
"""

from __future__ import annotations

import json
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

import torch
from torch import nn

from policygrad.checkpoint.format import Checkpoint, newest_step
from policygrad.checkpoint.manager import MAX_SNAPSHOT_BYTES, Checkpointer, HasStep
from policygrad.checkpoint.model_export import save_model
from policygrad.checkpoint.shards import SavedState, ShardedState
from policygrad.errors import ConfigError, RunError
from policygrad.models.loading import TRUST_FLAG
from policygrad.models.tokenizer import Tokenizer
from policygrad.trackers import CompositeTracker, JsonlTracker, RunInfo, Tracker, default_tracker
from policygrad.trackers.services import create_service_trackers
from policygrad.training.config.paths import check_files_exist, relative_to_folder
from policygrad.training.config.serialization import dump_config
from policygrad.training.interrupts import StopController, StopRequested, parse_duration
from policygrad.training.model_card import render_model_card
from policygrad.training.provenance import Fingerprint, compare_fingerprints, list_changed_options
from policygrad.training.run_folder import RunFolder, create_run_folder, open_run_folder, with_end_marker
from policygrad.utils.filesystem import write_atomically

# What is called at every step of a training, and may change it.


class Callback:
    """Does nothing at every call: override those that matter.

    `trainer` is what trains: `trainer.learner.lr` is the learning rate, `trainer.progress` how far it is, `trainer.stop()` ends it.
    What a callback remembers is no part of a checkpoint: let it depend on the step's number.
    """

    def start(self, trainer: Any) -> None:
        """Everything is loaded; the first step comes."""

    def step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Step number `step` (from 1) is done."""


# Who follows a training, and what it leaves.

M = TypeVar("M")


class TrackingOptions(TypedDict, total=False):
    """Who follows a training, as `BaseTrainer` takes them."""

    display: Tracker | bool
    trackers: Sequence[Tracker]
    callbacks: Sequence[Callback]


@dataclass(frozen=True)
class TrainingResult(Generic[M]):
    """What a training leaves."""

    output: Path
    steps: int
    before: M
    """Held-out measurement before training; None without one, or where every reward failed. Likewise `after`."""
    after: M
    model: Path | None
    """None when the run was stopped before its last step; it can be resumed."""
    interrupted: bool = False
    """By a signal, a time limit or `stop()`, before what was asked of it was done."""


C = TypeVar("C", bound=Any)  # a configuration: a frozen dataclass with `output` and `checkpoint`
P = TypeVar("P", bound=HasStep)


class BaseTrainer(ABC, Generic[C, P, M]):
    """One process's share of a training. Created once, trained once."""

    kind: ClassVar[str]
    """The command's name."""
    file: ClassVar[str]
    """The configuration in the run's folder."""
    model: nn.Module
    tokenizer: Tokenizer
    progress: P
    run_info: RunInfo
    """At the start of this process."""
    last_step: int

    def __init__(
        self,
        config: C,
        *,
        display: Tracker | bool = True,
        trackers: Sequence[Tracker] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """display: where progress shows: a terminal, plain lines or a notebook, as it fits; False = nowhere. trackers: others
        that follow the run. callbacks: what is called at every step, and may change the run."""
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(f"{callback!r} is no callback: pass instances of subclasses of policygrad.Callback")
        self.config = config
        self._display = display if isinstance(display, Tracker) else default_tracker() if display else Tracker()
        self._other_trackers, self.callbacks = (*trackers, *create_service_trackers(config.track)), tuple(callbacks)
        self.before: M | None = None
        self.measured = False  # `before`
        self.option_changes: list[dict[str, Any]] = []
        """Options that were changed on the way, {"step": after which, "options": ["lr 0.01 -> 0.003"]}; for card and report."""

    # what is trained

    @abstractmethod
    def build(self, stack: ExitStack) -> None:
        """Loads everything; what is wrong is said now, and then there is no folder."""

    @abstractmethod
    def start(self, saved: Checkpoint | None) -> P:
        """Where training begins: at its beginning, or at a checkpoint, which is put back."""

    @abstractmethod
    def pack_state(self, progress: P) -> SavedState:
        """What a resumed run needs."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Of the weights: updates so far."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """The last step's number."""

    def check_checkpoint(self, saved: Checkpoint) -> None:
        """Raises CheckpointError (or KeyError, TypeError) for a checkpoint that lacks something: then the one before is taken."""

    @property
    def max_snapshot_bytes(self) -> int:
        """Bytes of state of which a copy is kept at every step, at most."""
        return MAX_SNAPSHOT_BYTES

    @property
    def sharded_state(self) -> ShardedState[P] | None:
        """How several processes save what they share; None = `pack` has it all."""
        return None

    @abstractmethod
    def make_run_info(self, progress: P) -> RunInfo:
        """The run, for trackers."""

    @abstractmethod
    def run_steps(self, progress: P) -> P:
        """Step after step, each followed by `log` and `keep_going`."""

    def check_end(self) -> None:
        """The steps of this call are done and saved: raises what they came to, where it is an error."""

    def is_finished(self, progress: P) -> bool:
        """Whether the run is at its end."""
        return progress.step >= self.steps

    @property
    @abstractmethod
    def has_eval(self) -> bool:
        """Whether there is anything to measure on."""

    @abstractmethod
    def evaluate(self, progress: Callable[[int, int], None]) -> tuple[M | None, Mapping[str, float]]:
        """The held-out measurement, and its numbers for the log."""

    @abstractmethod
    def cached_measurement(self, step: int) -> M | None:
        """A measurement that the log already holds (a run killed after measuring) is not taken again."""

    @abstractmethod
    def summarise(self, after: M | None) -> Mapping[str, str]:
        """The measurements before and after, for people."""

    @abstractmethod
    def result_values(self, progress: P, after: M | None) -> Mapping[str, Any]:
        """What result.json holds."""

    # the same for all

    def train(
        self,
        *,
        resume: str | Path | None = None,
        stop_after: int | None = None,
        time_limit: str | None = None,
        overwrite: bool = False,
    ) -> TrainingResult[M | None]:
        """From the beginning, or on with the run in the folder `resume`, from its newest intact checkpoint.

        stop_after: stop, resumably, after so many steps of this call. stop_before: be stopped, resumably, before so much time
        (23h50m) has passed. A signal stops it too, see `StopController`. overwrite: begin anew where another run has ended.

        Raises:
            PolicygradError: what cannot be trained, with the way out.
        """
        self.stopping = StopController(None if time_limit is None else parse_duration(time_limit, "stop_before"))
        if stop_after is not None and stop_after < 1:
            raise ConfigError(f"stop_after must be at least 1, not {stop_after}")
        if overwrite and resume is not None:
            raise ConfigError("resume goes on with a run and overwrite begins anew: leave one of them out")
        with ExitStack() as stack:
            self.trackers = CompositeTracker([self._display, *self._other_trackers])
            stack.enter_context(self.stopping)
            held = stack.enter_context(self._held(resume, overwrite))
            self.folder = held.path
            self.config = replace(self.config, output=str(self.folder))
            if not (self.folder / self.file).exists():  # first of all, so that what is killed now can be resumed
                self._write_configuration()
            stack.push(lambda *error: self.trackers.__exit__(*error))
            self.trackers.phase("loading the model")
            torch.manual_seed(self.config.seed)  # what a model or a reward may draw; completions have keys of their own
            try:
                check_files_exist(self.config)
                with self.stopping.interruptible():
                    self.build(stack)
            except StopRequested:
                if held.has_stash:  # it has taken nobody's place yet
                    self.trackers.note(f"stopped while loading; the run that was in {self.folder} is there as it was")
                    return TrainingResult(self.folder, 0, None, None, None, interrupted=True)
                held.commit()
                self.trackers.note(f"stopped while loading; go on with: {self.resume_command}")
                done = newest_step(self.folder / "checkpoints")
                return TrainingResult(self.folder, done, None, None, None, interrupted=True)
            held.commit()
            self._open()
            return self._train(resume is not None, stop_after)

    def _held(self, resume: str | Path | None, overwrite: bool) -> RunFolder:
        """The folder, which no other process works on meanwhile."""
        if resume is not None:
            return open_run_folder(Path(resume), self.kind, self.trackers.note)
        return create_run_folder(self.config.output, self.name, self.file, self.trackers.note, overwrite)

    @property
    def name(self) -> str:
        """What a new folder is called after."""
        return self.kind

    def _write_configuration(self) -> None:
        write_atomically(
            self.folder / self.file, with_end_marker(dump_config(relative_to_folder(self.config, self.folder)))
        )

    def _open(self) -> None:
        """What is written, and what stops it."""
        self.files = JsonlTracker(self.folder)
        self.trackers.add(self.files)

    def _train(self, resumed: bool, stop_after: int | None) -> TrainingResult[M | None]:
        self.checkpointer = Checkpointer(
            self.folder,
            every=self.config.checkpoint.every,
            keep=self.config.checkpoint.keep,
            pack=self.pack_state,
            version=lambda: self.version,
            sync=self.files.sync,
            note=self.trackers.note,
            resume_command=self.resume_command,
            max_snapshot_bytes=self.max_snapshot_bytes,
            check=self.check_checkpoint,
            sharded=self.sharded_state,
        )
        saved = self.checkpointer.restore() if resumed else None
        self.progress = self.start(saved)
        if self.progress.step > self.steps:
            raise RunError(
                f"the run in {self.folder} has done {self.progress.step} steps, and is to end after {self.steps}: leave that "
                f"away, or let it be {self.progress.step} or more; an earlier end is a new run"
            )
        self.files.truncate_after(self.progress.step if saved else -1)
        self._write_configuration()
        self.run_info = self.make_run_info(self.progress)
        self.trackers.start(self.run_info)
        if self.has_eval and not self.measured:
            try:
                self.before, self.measured = (
                    self.evaluate_at(self.phase_label("before training"), self.progress.step),
                    True,
                )
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
        try:
            return self._finish() if self.is_finished(self.progress) else self._stopped()
        except StopRequested:
            return self._stopped()

    @abstractmethod
    def phase_label(self, when: str) -> str:
        """What measuring is called."""

    def evaluate_at(self, phase: str, step: int, *, breakable: bool = True) -> M | None:
        """Measures now, after so many steps, unless the log already holds it. Raises Stop where that is asked for meanwhile."""
        known = self.cached_measurement(step)
        if known is not None:
            return known
        self.trackers.phase(phase)
        with self.stopping.interruptible() if breakable else nullcontext():
            found, values = self.evaluate(lambda done, total: self.trackers.phase(phase, done, total))
        self.trackers.phase("")
        if values:
            self.trackers.log_evaluation(step, values)
        return found

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """A step is done: files first, so that what is shown is also on the disk."""
        self.trackers.log(step, metrics, completions)
        for callback in self.callbacks:
            callback.step(self, step, metrics)

    def should_continue(self, progress: P) -> bool:
        """After every step: perhaps a checkpoint; whether to go on."""
        self.progress = progress
        self.stopping.step_done()
        going = progress.step < self.last_step and not self.is_finished(progress) and not self.stopping.requested
        self.checkpointer.on_step(progress, final=not going)
        return going

    def compare_with_checkpoint(self, saved: Checkpoint, now: Fingerprint, config: C) -> None:
        """Say what is another than at the checkpoint, and record the options that are.

        Raises:
            RunError: another task, or other held-out problems, than the run began with.
        """
        self.option_changes = [*saved.state.get("changes", ())]
        if "began" not in saved.state:
            return
        for text in compare_fingerprints(saved.state["began"], now, config, self.folder):
            self.trackers.note(text)
        if options := list_changed_options(saved.state["began"], now):
            self.option_changes.append({"step": saved.step, "options": options})

    def stop(self) -> None:
        """Ends the run, resumably, after the step at hand."""
        self.stopping.requested = True

    def _finish(self) -> TrainingResult[M | None]:
        after = self.evaluate_at(self.phase_label("after training"), self.progress.step) if self.has_eval else None
        numbers, measured = self.result_values(self.progress, after), self.summarise(after)
        held_out = self.run_info.facts.get("held out", "")
        told = render_model_card(
            self.kind,
            self.folder.name,
            tomllib.loads(dump_config(self.config)),
            measured,
            numbers,
            held_out,
            self.option_changes,
        )
        model = save_model(self.folder, self.write_weights, self.tokenizer.hf, self.resume_command, told)
        self.checkpointer.finish()
        write_atomically(self.folder / "result.json", json.dumps(numbers, indent=1) + "\n")
        self.trackers.finish({**measured, "model": str(model), "run": str(self.folder)})
        return TrainingResult(self.folder, self.progress.step, self.before, after, model)

    def write_weights(self, folder: Path) -> None:
        """The trained model, as others load it."""
        self.model.save_pretrained(folder)  # type: ignore[operator]

    def _stopped(self) -> TrainingResult[M | None]:
        step = self.progress.step
        stopped = f"step {step} of {self.steps}"
        self.trackers.finish({"stopped after": stopped, "go on with": self.resume_command})
        return TrainingResult(self.folder, step, self.before, None, None, interrupted=self.stopping.requested)

    @property
    def resume_command(self) -> str:
        """How to go on."""
        leave = f" {TRUST_FLAG}" if self.config.trust_remote_code else ""
        return f"policygrad {self.kind} --resume {self.folder}{leave}"
