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

from policygrad.checkpoint.format import Checkpoint, newest
from policygrad.checkpoint.manager import KEPT, Checkpointer, Stepped
from policygrad.checkpoint.model_export import save_model
from policygrad.checkpoint.shards import Saved, Spread
from policygrad.errors import ConfigError, RunError
from policygrad.models.loading import FLAG
from policygrad.models.tokenizer import Tokenizer
from policygrad.trackers import JsonlTracker, RunInfo, Tracker, Trackers, default_tracker
from policygrad.trackers.services import services
from policygrad.training.config.paths import check_there, written_to
from policygrad.training.config.serialization import dumps
from policygrad.training.interrupts import Stop, Stopping, seconds
from policygrad.training.model_card import card
from policygrad.training.provenance import Began, changed_options, noticed
from policygrad.training.run_folder import RunFolder, new_folder, resumed_folder, sealed
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


class Followers(TypedDict, total=False):
    """Who follows a training, as `Lifecycle` takes them."""

    display: Tracker | bool
    trackers: Sequence[Tracker]
    callbacks: Sequence[Callback]


@dataclass(frozen=True)
class Result(Generic[M]):
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
P = TypeVar("P", bound=Stepped)


class Lifecycle(ABC, Generic[C, P, M]):
    """One process's share of a training. Created once, trained once."""

    kind: ClassVar[str]
    """The command's name."""
    file: ClassVar[str]
    """The configuration in the run's folder."""
    model: nn.Module
    tokenizer: Tokenizer
    progress: P
    told: RunInfo
    """At the start of this process."""
    until: int

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
        self._others, self.callbacks = (*trackers, *services(config.track)), tuple(callbacks)
        self.before: M | None = None
        self.measured = False  # `before`
        self.changes: list[dict[str, Any]] = []
        """Options that were changed on the way, {"step": after which, "options": ["lr 0.01 -> 0.003"]}; for card and report."""

    # what is trained

    @abstractmethod
    def build(self, stack: ExitStack) -> None:
        """Loads everything; what is wrong is said now, and then there is no folder."""

    @abstractmethod
    def start(self, saved: Checkpoint | None) -> P:
        """Where training begins: at its beginning, or at a checkpoint, which is put back."""

    @abstractmethod
    def pack(self, progress: P) -> Saved:
        """What a resumed run needs."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Of the weights: updates so far."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """The last step's number."""

    def check_saved(self, saved: Checkpoint) -> None:
        """Raises CheckpointError (or KeyError, TypeError) for a checkpoint that lacks something: then the one before is taken."""

    @property
    def keeps(self) -> int:
        """Bytes of state of which a copy is kept at every step, at most."""
        return KEPT

    @property
    def spread(self) -> Spread[P] | None:
        """How several processes save what they share; None = `pack` has it all."""
        return None

    @abstractmethod
    def info(self, progress: P) -> RunInfo:
        """The run, for trackers."""

    @abstractmethod
    def run(self, progress: P) -> P:
        """Step after step, each followed by `log` and `keep_going`."""

    def check_end(self) -> None:
        """The steps of this call are done and saved: raises what they came to, where it is an error."""

    def over(self, progress: P) -> bool:
        """Whether the run is at its end."""
        return progress.step >= self.steps

    @property
    @abstractmethod
    def measures(self) -> bool:
        """Whether there is anything to measure on."""

    @abstractmethod
    def measure(self, progress: Callable[[int, int], None]) -> tuple[M | None, Mapping[str, float]]:
        """The held-out measurement, and its numbers for the log."""

    @abstractmethod
    def known(self, step: int) -> M | None:
        """A measurement that the log already holds (a run killed after measuring) is not taken again."""

    @abstractmethod
    def summary(self, after: M | None) -> Mapping[str, str]:
        """The measurements before and after, for people."""

    @abstractmethod
    def numbers(self, progress: P, after: M | None) -> Mapping[str, Any]:
        """What result.json holds."""

    # the same for all

    def train(
        self,
        *,
        resume: str | Path | None = None,
        stop_after: int | None = None,
        stop_before: str | None = None,
        overwrite: bool = False,
    ) -> Result[M | None]:
        """From the beginning, or on with the run in the folder `resume`, from its newest intact checkpoint.

        stop_after: stop, resumably, after so many steps of this call. stop_before: be stopped, resumably, before so much time
        (23h50m) has passed. A signal stops it too, see `Stopping`. overwrite: begin anew where another run has ended.

        Raises:
            PolicygradError: what cannot be trained, with the way out.
        """
        self.stopping = Stopping(None if stop_before is None else seconds(stop_before, "stop_before"))
        if stop_after is not None and stop_after < 1:
            raise ConfigError(f"stop_after must be at least 1, not {stop_after}")
        if overwrite and resume is not None:
            raise ConfigError("resume goes on with a run and overwrite begins anew: leave one of them out")
        with ExitStack() as stack:
            self.trackers = Trackers([self._display, *self._others])
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
                check_there(self.config)
                with self.stopping.breakable():
                    self.build(stack)
            except Stop:
                if held.replaces:  # it has taken nobody's place yet
                    self.trackers.note(f"stopped while loading; the run that was in {self.folder} is there as it was")
                    return Result(self.folder, 0, None, None, None, interrupted=True)
                held.keep()
                self.trackers.note(f"stopped while loading; go on with: {self.resume_words}")
                done = newest(self.folder / "checkpoints")
                return Result(self.folder, done, None, None, None, interrupted=True)
            held.keep()
            self._open()
            return self._train(resume is not None, stop_after)

    def _held(self, resume: str | Path | None, overwrite: bool) -> RunFolder:
        """The folder, which no other process works on meanwhile."""
        if resume is not None:
            return resumed_folder(Path(resume), self.kind, self.trackers.note)
        return new_folder(self.config.output, self.name, self.file, self.trackers.note, overwrite)

    @property
    def name(self) -> str:
        """What a new folder is called after."""
        return self.kind

    def _write_configuration(self) -> None:
        write_atomically(self.folder / self.file, sealed(dumps(written_to(self.config, self.folder))))

    def _open(self) -> None:
        """What is written, and what stops it."""
        self.files = JsonlTracker(self.folder)
        self.trackers.add(self.files)

    def _train(self, resumed: bool, stop_after: int | None) -> Result[M | None]:
        self.checkpointer = Checkpointer(
            self.folder,
            every=self.config.checkpoint.every,
            keep=self.config.checkpoint.keep,
            pack=self.pack,
            version=lambda: self.version,
            sync=self.files.sync,
            note=self.trackers.note,
            resume=self.resume_words,
            keeps=self.keeps,
            check=self.check_saved,
            spread=self.spread,
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
        self.told = self.info(self.progress)
        self.trackers.start(self.told)
        if self.measures and not self.measured:
            try:
                self.before, self.measured = self.take(self.phase("before training"), self.progress.step), True
            except Stop:
                return self._stopped()
        self.until = self.steps if stop_after is None else min(self.steps, self.progress.step + stop_after)
        self.checkpointer.begin(self.progress)
        for callback in self.callbacks:
            callback.start(self)
        self.stopping.steps_begin()
        with self.checkpointer.rescuing():
            if self.progress.step < self.until and not self.over(self.progress):
                try:
                    self.progress = self.run(self.progress)
                except Stop:
                    self.progress = self.checkpointer.back()
        self.check_end()
        try:
            return self._finish() if self.over(self.progress) else self._stopped()
        except Stop:
            return self._stopped()

    @abstractmethod
    def phase(self, when: str) -> str:
        """What measuring is called."""

    def take(self, phase: str, step: int, *, breakable: bool = True) -> M | None:
        """Measures now, after so many steps, unless the log already holds it. Raises Stop where that is asked for meanwhile."""
        known = self.known(step)
        if known is not None:
            return known
        self.trackers.phase(phase)
        with self.stopping.breakable() if breakable else nullcontext():
            found, values = self.measure(lambda done, total: self.trackers.phase(phase, done, total))
        self.trackers.phase("")
        if values:
            self.trackers.log_evaluation(step, values)
        return found

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """A step is done: files first, so that what is shown is also on the disk."""
        self.trackers.log(step, metrics, completions)
        for callback in self.callbacks:
            callback.step(self, step, metrics)

    def keep_going(self, progress: P) -> bool:
        """After every step: perhaps a checkpoint; whether to go on."""
        self.progress = progress
        self.stopping.stepped()
        going = progress.step < self.until and not self.over(progress) and not self.stopping.asked
        self.checkpointer.after(progress, final=not going)
        return going

    def notice(self, saved: Checkpoint, now: Began, config: C) -> None:
        """Say what is another than at the checkpoint, and record the options that are.

        Raises:
            RunError: another task, or other held-out problems, than the run began with.
        """
        self.changes = [*saved.state.get("changes", ())]
        if "began" not in saved.state:
            return
        for text in noticed(saved.state["began"], now, config, self.folder):
            self.trackers.note(text)
        if options := changed_options(saved.state["began"], now):
            self.changes.append({"step": saved.step, "options": options})

    def stop(self) -> None:
        """Ends the run, resumably, after the step at hand."""
        self.stopping.asked = True

    def _finish(self) -> Result[M | None]:
        after = self.take(self.phase("after training"), self.progress.step) if self.measures else None
        numbers, measured = self.numbers(self.progress, after), self.summary(after)
        held_out = self.told.facts.get("held out", "")
        told = card(
            self.kind, self.folder.name, tomllib.loads(dumps(self.config)), measured, numbers, held_out, self.changes
        )
        model = save_model(self.folder, self.write_weights, self.tokenizer.hf, self.resume_words, told)
        self.checkpointer.finish()
        write_atomically(self.folder / "result.json", json.dumps(numbers, indent=1) + "\n")
        self.trackers.finish({**measured, "model": str(model), "run": str(self.folder)})
        return Result(self.folder, self.progress.step, self.before, after, model)

    def write_weights(self, folder: Path) -> None:
        """The trained model, as others load it."""
        self.model.save_pretrained(folder)  # type: ignore[operator]

    def _stopped(self) -> Result[M | None]:
        step = self.progress.step
        stopped = f"step {step} of {self.steps}"
        self.trackers.finish({"stopped after": stopped, "go on with": self.resume_words})
        return Result(self.folder, step, self.before, None, None, interrupted=self.stopping.asked)

    @property
    def resume_words(self) -> str:
        """How to go on."""
        leave = f" {FLAG}" if self.config.trust_remote_code else ""
        return f"policygrad {self.kind} --resume {self.folder}{leave}"
