"""Reinforcement learning: what the loop needs around it to be a run that can be stopped, resumed, measured and followed."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from policygrad.checkpoint.format import Checkpoint
from policygrad.checkpoint.shards import Saved, Spread
from policygrad.core.metrics import Mean, Metrics
from policygrad.environments import EnvironmentFactory
from policygrad.errors import CheckpointError, RewardError, RunError
from policygrad.learners.base import Closing, Learner
from policygrad.learners.config import SMALL
from policygrad.learners.local.learner import LocalLearner, check_state
from policygrad.models.adapters import words as adapters_words
from policygrad.rewards.resolve import rubrics_of
from policygrad.rewards.workers.failures import FailingSteps
from policygrad.rollout import serialization
from policygrad.rollout.evaluation import EvaluationResult
from policygrad.rollout.rollouter import Rollouter
from policygrad.samplers.base import Sampler
from policygrad.samplers.config import LOCAL
from policygrad.tasks.base import Example
from policygrad.trackers import RunInfo, Tracker, change
from policygrad.training.base_trainer import Callback, Followers, Lifecycle, Result
from policygrad.training.config.paths import located
from policygrad.training.config.run import Run, idle
from policygrad.training.config.run_name import Composed, composed
from policygrad.training.config.serialization import algorithm_to_dict, load
from policygrad.training.config.trust import Allowed, named, not_allowed
from policygrad.training.divergence_guard import Guarding, check_rate, without_spread
from policygrad.training.interrupts import Stop
from policygrad.training.loop import Done, Progress, loop
from policygrad.training.provenance import began
from policygrad.training.run_folder import check_resumable
from policygrad.training.setup import (
    HERE,
    Hosts,
    LearnerFactory,
    Resources,
    SamplerFactory,
    learner_of,
    needed_for,
    put_back,
)
from policygrad.training.setup import load as load_resources
from policygrad.training.setup import local_learner as local_learner
from policygrad.training.step_log import notes_of, rows_of, values_of
from policygrad.weight_sync.base import Gathered, put_weights
from policygrad.weight_sync.folder import save_gathered

if TYPE_CHECKING:
    from policygrad.training.distributed import Shares


# What people are told of a run before its first step.


def facts(run: Run, resources: Resources, learner: Learner, folder: Path, measured: bool) -> dict[str, str]:
    """Name and value: the model, the batch, what answers are worth, where files go. measured: whether on held-out problems."""
    batch = f"{run.prompts_per_step} prompts × {run.group_size} samples, {run.steps} steps"
    budget = "" if run.tokens is None else f" or {run.tokens:,} tokens, whichever is first"
    ahead = f", sampled {run.staleness} ahead of the weights" if run.staleness else ""
    adapters = adapters_words(resources.model)
    told = {
        "model": described(run.named("model"), resources.model, run.learner.dtype),
        **({"adapters": adapters} if adapters else {}),
        "batch": batch + budget + ahead,
        "reward": ", ".join(resources.rewards),
        "run": str(folder),
    }
    if run.learner.ranks > 1:
        shared = f", every {run.learner.tensor} of which share each layer" if run.learner.tensor > 1 else ""
        told["learner"] = f"{run.learner.ranks} processes{shared}"
    if run.sampler.engine != LOCAL:
        told["sampler"] = f"{run.sampler.engine} at {', '.join(run.sampler.urls) or 'a server started here'}"
    if isinstance(learner, LocalLearner) and run.algorithm.reference and run.algorithm.reference.model:
        told["reference"] = f"{run.algorithm.reference.model} ({learner.reference_parameters / 1e6:.2f}M parameters)"
    if not resources.scored:
        told["held out"] = (
            "not measured: the task has no reward, and the algorithm needs none (--reward NAME gives one)"
        )
    if measured and resources.task.held_out_is_train:
        told["held out"] = "too few prompts to hold any out: measured on the training prompts"
    return told


def described(name: str, model: nn.Module, dtype: str) -> str:
    """A model's name, size and precision, and the device it is on."""
    parameters = list(model.parameters())
    return f"{name} ({sum(p.numel() for p in parameters) / 1e6:.2f}M parameters, {dtype} on {parameters[0].device})"


# The problems a run is measured on, and what their scores are called.

Note = tuple[str, str]
"""A text, and its kind: of one kind only the first is shown."""


@dataclass
class HeldOut:
    """Held-out problems; none where nothing is measured."""

    run: Run
    examples: Sequence[Example] = ()
    binary: bool = True
    """Every score so far is 0 or 1."""

    def __bool__(self) -> bool:
        return bool(self.examples)

    def due(self, step: int) -> bool:
        """Whether there is an evaluation after this step, before the run's end."""
        every = self.run.evaluation.every
        return bool(every and 0 < step < self.run.steps and step % every == 0 and self)

    def evaluate(self, rollouter: Rollouter, progress: Callable[[int, int], None]) -> EvaluationResult:
        """Raises RewardError as a rollout does."""
        return rollouter.evaluate(self.examples, self.run.evaluation.samples, self.run.sampling, progress)

    def notes(self, found: EvaluationResult) -> Iterator[Note]:
        """What went wrong with rewards."""
        for message in found.messages:
            yield message, message.partition(" (completion ")[0]
        if found.failed:
            count = len(self.examples) * self.run.evaluation.samples
            text = f"{found.failed} of {count} held-out completions have no reward and count as 0"
            yield text, "held-out completions without a reward"

    def score(self, found: EvaluationResult) -> tuple[float | None, Mapping[str, float]]:
        """(mean, its numbers for the log); None where every reward failed."""
        if not found.scored:
            return None, {}
        self.binary = self.binary and found.binary
        numbers = {"held_out": found.mean, "held_out_stderr": found.standard_error()}
        return found.mean, numbers | self._of_parts(found)

    def _of_parts(self, found: EvaluationResult) -> dict[str, float]:
        """The mean by the part of a mix that a problem is of."""
        means = dict[str, list[float]]()
        for example, mean in zip(self.examples, found.means, strict=True):
            if part := getattr(example, "part", ""):
                means.setdefault(part, []).append(mean)
        return {f"held_out/from/{part}": fmean(each) for part, each in means.items()}

    def summary(self, before: float | None, after: float | None) -> dict[str, str]:
        """The scores before and after, for people."""
        if not self:
            return {}
        if before is None and after is None:
            return {"held-out": "nothing could be scored, before or after: see the notes about the reward functions"}
        name = f"held-out {'accuracy' if self.binary else 'reward'}"
        if before is None or after is None:
            first, last = ("not scored" if score is None else f"{score:.2f}" for score in (before, after))
            return {name: f"{first} -> {last}"}
        return {name: change(before, after)}


# How many threads torch computes with.


@contextmanager
def few_threads(model: nn.Module) -> Iterator[None]:
    """One thread for a small model on the CPU, unless OMP_NUM_THREADS says otherwise; as it was, afterwards.

    On two cores the default run's training takes 21 seconds with one thread and 30 with two, which are in each other's and in
    the reward workers' way.
    """
    before = torch.get_num_threads()
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    if on_cpu and sum(p.numel() for p in model.parameters()) < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# How much memory a run has taken.

MIB = 2**20


def peak_memory() -> dict[str, float]:
    """MiB that this process has held at most, by name: `peak_memory_mib` of the host's, `peak_cuda_memory_mib` of the GPU's
    where tensors have been on one. Empty where the system does not count (Windows)."""
    peaks: dict[str, float] = {}
    if sys.platform != "win32":
        peaks["peak_memory_mib"] = _most_resident() / MIB
    if torch.cuda.is_available():
        held = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
        peaks |= {"peak_cuda_memory_mib": held / MIB} if held else {}
    return peaks


def _most_resident() -> float:
    """Bytes. On Linux by VmHWM: getrusage there begins with what the process that started this one held."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


_STATE = {"learner", "parts", "algorithm", "position", "tokens", "seconds", "before", "measured", "binary", "given"}
"""What a checkpoint cannot do without."""


def train(
    run: Run | None = None,
    *,
    resume: str | Path | None = None,
    stop_after: int | None = None,
    allow: Sequence[str] = (),
    stop_before: str | None = None,
    overwrite: bool = False,
    sampler: Sampler | SamplerFactory | None = None,
    learner: Learner | LearnerFactory = local_learner,
    environment: EnvironmentFactory | None = None,
    display: Tracker | bool = True,
    trackers: Sequence[Tracker] = (),
    callbacks: Sequence[Callback] = (),
) -> Result[float | None]:
    """Trains as `run` says, or goes on with the run in the folder `resume`.

    stop_after: stop, resumably, after so many steps of this call; stop_before: before so much time (23h50m) has passed. overwrite:
    begin anew in an output folder that holds a run, which is deleted once the new one begins. allow: modules, files or folders
    that run.toml may name as its own parts and rewards; those in the current folder or loaded already need no leave. The rest as in
    `Trainer`.

    Raises:
        PolicygradError: what cannot be trained, with the way out.
    """
    if run is None and resume is not None:
        run = load(check_resumable(Path(resume), "train") / "run.toml", Run(), Allowed(tuple(allow)))
    trainer = Trainer(
        run,
        sampler=sampler,
        learner=learner,
        environment=environment,
        display=display,
        trackers=trackers,
        callbacks=callbacks,
    )
    return trainer.train(resume=resume, stop_after=stop_after, stop_before=stop_before, overwrite=overwrite)


class Trainer(Lifecycle[Run, Progress, float]):
    """A run of reinforcement learning.

    sampler: what draws completions, or a function of (model, tokenizer) that makes it; None = this process, with the learner's
    own weights. learner: a function of (model, run). environment: a function of an example, called once per episode; None = the
    prompt and one answer. hosts: who else does a part of the work. display, trackers, callbacks: who follows it, see `Lifecycle`.
    """

    kind, file = "train", "run.toml"
    resources: Resources
    learner: Learner

    def __init__(
        self,
        run: Run | None = None,
        *,
        sampler: Sampler | SamplerFactory | None = None,
        learner: Learner | LearnerFactory = local_learner,
        environment: EnvironmentFactory | None = None,
        hosts: Hosts = HERE,
        **followers: Unpack[Followers],
    ) -> None:
        run = run or Run()
        self._few_prompts = run.few_prompts  # which the resolved run no longer shows
        super().__init__(run.resolved(), **followers)
        self._sampler, self._environment, self._hosts = sampler, environment, hosts
        self._learner = partial(local_learner, hosts=hosts) if learner is local_learner else learner
        given = {
            "sampler": sampler,
            "environment": environment,
            "learner": None if learner is local_learner else learner,
        }
        self._given = [name for name, value in given.items() if value is not None]
        self._said: set[str] = set()
        self._waiting = False  # the policy, for its critic
        self.held_out = HeldOut(self.config)
        self._failing = FailingSteps(run.rewards.failing, run.rewards.patience)
        self._guarding = Guarding(run.guard, self.note)
        self._gave_up: str | None = None  # why the rewards end the run
        self._shares: Shares | None = None  # of a learner in several processes

    @property
    def name(self) -> str:
        return self._composed.name

    @property
    def _composed(self) -> Composed:
        return composed(self.config.algorithm, self.config.sampling.max_tokens)

    def build(self, stack: ExitStack) -> None:
        run = self.config
        self.resources = found = load_resources(
            stack, needed_for(run, self._sampler, self._environment, self.trackers.phase, self._hosts)
        )
        self.model, self.tokenizer = found.model, found.tokenizer
        stack.enter_context(few_threads(found.model))
        there, device = located(run), next(found.model.parameters()).device.type
        self.learner = learner_of(self._learner, found.model, there)
        if isinstance(self.learner, Closing):
            stack.callback(self.learner.close)
        if run.learner.ranks > 1:  # torch.distributed takes a while to import
            from policygrad.training.distributed import drawn_by_all, shares_of

            self.resources, self._shares = drawn_by_all(found, self.learner), shares_of(self.learner)
        code = dict(zip(_code(run), _code(there), strict=True))
        self._began = began(there, device, code)
        check_rate(self.learner, run.guard)
        measured = run.evaluation.problems if found.scored else 0
        self.held_out = HeldOut(run, found.task.held_out(measured) if measured else ())
        for (
            example
        ) in self.held_out.examples:  # before there is a folder: a prompt that leaves no room for the completion
            found.tokenizer.encode(example.prompt, run.sampling.max_tokens, example.source or "a held-out prompt")

    def _publish(self) -> None:
        """The learner's weights to the sampler, and into the model that is saved: a learner of one's own may have others in
        memory."""
        published = self.learner.publish()
        self.resources.rollouter.update(published)
        if not isinstance(published.tensors, Gathered):
            put_weights(published.tensors, self.model)

    @property
    def version(self) -> int:
        return self.learner.version

    @property
    def steps(self) -> int:
        return self.config.steps

    def over(self, progress: Progress) -> bool:
        return progress.over(self.config)

    @property
    def spread(self) -> Spread[Progress] | None:
        shares = self._shares
        if shares is None:
            return None
        return Spread(lambda progress: self._packed(progress, {}, shares.values), shares.begin, shares.leaves)

    def pack(self, progress: Progress) -> Saved:
        return self._packed(progress, *self.learner.state())

    def _packed(self, progress: Progress, tensors: dict[str, Tensor], values: Mapping[str, Any]) -> Saved:
        waiting, said = serialization.pack_rollouts(progress.carried, progress.ahead)
        return tensors | waiting, {
            "learner": values,
            "parts": progress.state,
            "algorithm": algorithm_to_dict(self.config.algorithm),
            "position": progress.position,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            **said,
            "before": self.before,
            "measured": self.measured,
            "binary": self.held_out.binary,
            "given": self._given,
            "began": self._began,
            "changes": self.changes,
            "guard": self._guarding.watched.to_dict(),
        }

    def check_saved(self, saved: Checkpoint) -> None:
        state = saved.state
        if lacking := _STATE - state.keys():
            raise CheckpointError(f"it has no {min(lacking)!r}")
        if not all(isinstance(state[name], int | float) for name in ("position", "tokens", "seconds")):
            raise CheckpointError("its counts are no numbers")
        if isinstance(self.learner, LocalLearner) or "learner" not in self._given:
            check_state(saved.tensors, state["learner"])

    @property
    def keeps(self) -> int:
        if self.config.guard.action != "warn":  # which is to undo steps of whatever size
            return sys.maxsize
        return super().keeps if isinstance(self.learner, LocalLearner) else 0  # others may pay dearly for their state

    def start(self, saved: Checkpoint | None) -> Progress:
        run, algorithm = self.config, self.config.algorithm
        if saved is None:
            self._publish()
            return Progress(algorithm.init())
        state = saved.state
        waiting, tensors = serialization.split(saved.tensors)
        if ("environment" in state["given"]) is not ("environment" in self._given):
            had = "was given an environment" if "environment" in state["given"] else "had no environment"
            raise RunError(
                f"{self.folder}: the run {had} from Python, and what it learned there would go on as something else: go on as it "
                f"began, with pg.train(run, resume={str(self.folder)!r}, environment=…) or without"
            )
        self.notice(saved, self._began, run)
        restore = self.learner.restore if self._shares is None else partial(self._shares.restore, saved.path)
        put_back(restore, saved, tensors, run, self.folder)
        self.before, self.measured, self.held_out.binary = state["before"], state["measured"], state["binary"]
        parts, (groups, ahead) = (
            state["parts"],
            serialization.unpack_rollouts(waiting, state, self.resources.task.train),
        )
        if state["algorithm"] != algorithm_to_dict(algorithm):
            self.trackers.note(
                "the algorithm is not the one the checkpoint was made with: its parts start without their state"
            )
            parts, groups, ahead = algorithm.init(), (), ()
        self._guarding.restore(state.get("guard"), self.learner)
        self._publish()
        return Progress(parts, saved.step, state["position"], state["tokens"], state["seconds"], groups, ahead)

    def info(self, progress: Progress) -> RunInfo:
        run = self.config
        for text in idle(run):
            self.trackers.note(text)
        if objects := [*run.objects, *self._given]:
            self.trackers.note(
                f"{' and '.join(objects)} given as objects, which run.toml cannot hold: this run can be gone on with from "
                "Python, pg.train(run, resume=folder), but not from the command line alone"
            )
        if self._few_prompts:
            self.trackers.note(self._few_prompts)
        return RunInfo(
            f"policygrad · {self._composed.title} on {run.named('task')}",
            facts(run, self.resources, self.learner, self.folder, bool(self.held_out)),
            run.steps,
            first_step=progress.step + 1,
            history=self.files.history("reward"),
            tokens=run.tokens,
            sampled=progress.tokens,
            config={
                **asdict(replace(run.without_objects(), directory=None)),
                "algorithm": algorithm_to_dict(run.algorithm),
            },
            folder=self.folder,
        )

    def run(self, progress: Progress) -> Progress:
        if self.held_out.due(progress.step):  # a stop may have come before it
            self.take(f"evaluating at step {progress.step}", progress.step)
        progress = loop(
            self.config,
            self.resources.rollouter,
            self.learner,
            progress,
            self,
            self.stopping.breakable,
            self._guarding.settle,
        )
        tensors = self.learner.publish().tensors
        if not isinstance(tensors, Gathered):
            put_weights(tensors, self.model)
        return progress

    def write_weights(self, folder: Path) -> None:
        tensors = self.learner.publish().tensors
        if isinstance(tensors, Gathered):
            save_gathered(self.model, tensors, folder)
        else:
            super().write_weights(folder)

    def record(self, done: Done) -> Metrics:
        """After every step: its lines in the files, its picture on the display, and perhaps an evaluation."""
        step = done.step
        scored = self.resources.scored
        values = values_of(done, scored)
        for text, kind in notes_of(done, values, self._waiting, getattr(self.learner, "not_finite", "")):
            self.note(text, kind)
        self._waiting = "value_pretraining" in values
        values |= self._guarding.judge(step, values, without_spread(done, values))
        self.log(step, values, rows_of(done, self.resources.tokenizer.decode, scored))
        if self._guarding.act(step, self.learner, self._put_back, self.checkpointer):
            self._publish()
        if self._guarding.gave_up:
            self.stop()
        self._gave_up = self._failing.step(values.get("completions/failed_ratio", 0.0), done.rollout.messages)
        if self._gave_up:
            self.stop()
            return {}
        if not self.held_out.due(step):
            return {}
        try:  # what parts remember may hang on the score, and then a step without it is no whole one
            score = self.take(f"evaluating at step {step}", step, breakable=not self.config.algorithm.init())
        except Stop:
            return {}
        return {} if score is None else {"held_out": Mean(score)}

    def _put_back(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """The learner as a checkpoint has it."""
        self.learner.restore(serialization.split(tensors)[1], state["learner"])

    def note(self, text: str, kind: str | None = None) -> None:
        """Shown the first time something of its kind is said."""
        kind = text if kind is None else kind
        if kind not in self._said:
            self._said.add(kind)
            self.trackers.note(text)

    @property
    def measures(self) -> bool:
        return bool(self.held_out)

    def phase(self, when: str) -> str:
        return f"evaluating {when}"

    def known(self, step: int) -> float | None:
        return dict(self.files.history("held_out")).get(step)

    def measure(self, progress: Callable[[int, int], None]) -> tuple[float | None, Mapping[str, float]]:
        """Held-out mean, None when every reward failed."""
        try:
            found = self.held_out.evaluate(self.resources.rollouter, progress)
        except RewardError as error:
            raise RewardError(f"{error}. {self._goes_on}") from error
        for text, kind in self.held_out.notes(found):
            self.note(text, kind)
        if wrong := self._failing.evaluation(not found.scored, found.messages):
            raise RewardError(f"{wrong}. {self._goes_on}")
        return self.held_out.score(found)

    def check_end(self) -> None:
        self._guarding.check(self.progress.step, self.resume_words)
        if self._gave_up:
            raise RewardError(f"{self._gave_up}. Step {self.progress.step} is saved: {self._goes_on}")

    @property
    def _goes_on(self) -> str:
        """How to go on, when rewards have failed."""
        return f"{self.resume_words} goes on once the reward works, or with --rewards.patience 0 whatever it does"

    def summary(self, after: float | None) -> dict[str, str]:
        return self.held_out.summary(self.before, after)

    def numbers(self, progress: Progress, after: float | None) -> dict[str, Any]:
        return {
            "steps": progress.step,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            **peak_memory(),
            "held_out_before": self.before,
            "held_out_after": after,
        }

    @property
    def resume_words(self) -> str:
        return (
            f"pg.train(run, resume={str(self.folder)!r})"
            if self.config.objects or self._given
            else " ".join(filter(None, (super().resume_words + self._leave, self._hosts.words)))
        )

    @property
    def _leave(self) -> str:
        """What run.toml alone may not have imported, asked or written to by whoever goes on."""
        sampler = {"urls": list(self.config.sampler.urls), "folder": self.config.sampler.folder}
        data = {**_own(located(self.config)), "sampler": sampler}
        missing = not_allowed(data, self.folder / self.file, elsewhere=True)
        return f" --allow {shlex.join(missing)}" if missing else ""


def _own(run: Run) -> dict[str, Any]:
    """The options that may name code of one's own."""
    single = {"map": run.map, "environment": run.environment}
    named = {option: name for option, name in single.items() if isinstance(name, str)}
    return {"algorithm": algorithm_to_dict(run.algorithm), "reward": list(run.reward), **named}


def _code(run: Run) -> list[str]:
    """The modules and files of one's own that a run takes, and the files that judges go by."""
    rubrics = (file for name in run.reward if isinstance(name, str) for file in rubrics_of(name))
    return [*named(_own(run)), *rubrics]
