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
from policygrad.checkpoint.shards import SavedState, ShardedState
from policygrad.core.metrics import Mean, Metrics
from policygrad.environments import EnvironmentFactory
from policygrad.errors import CheckpointError, RewardError, RunError
from policygrad.learners.base import CheckedLearner, CloseableLearner, Learner, ReferenceLearner, SnapshotLearner
from policygrad.learners.config import SMALL_MODEL_PARAMETERS
from policygrad.models.adapters import describe_adapters as adapters_words
from policygrad.rewards.resolve import find_rubrics
from policygrad.rewards.workers.failures import FailedStepTracker
from policygrad.rollout import serialization
from policygrad.rollout.evaluation import EvaluationResult
from policygrad.rollout.rollouter import Rollouter
from policygrad.samplers.base import Sampler
from policygrad.samplers.config import LOCAL
from policygrad.tasks.base import Example
from policygrad.trackers import RunInfo, Tracker, format_change
from policygrad.training.base_trainer import BaseTrainer, Callback, TrackingOptions, TrainingResult
from policygrad.training.config.paths import resolve_paths
from policygrad.training.config.run import Run, describe_idle_schedules
from policygrad.training.config.run_name import RunName, name_run
from policygrad.training.config.serialization import algorithm_to_dict, load_config
from policygrad.training.config.trust import CodePermissions, config_code_references, missing_permissions
from policygrad.training.divergence_guard import DivergenceGuard, check_rollback_lr, has_constant_rewards
from policygrad.training.interrupts import StopRequested
from policygrad.training.loop import Progress, StepResult, run_loop
from policygrad.training.provenance import fingerprint_run
from policygrad.training.run_folder import check_resumable
from policygrad.training.setup import (
    LOCAL_PLACEMENT,
    LearnerFactory,
    Placement,
    Resources,
    SamplerFactory,
    build_learner,
    needed_for,
    restore_learner,
)
from policygrad.training.setup import load_resources as load_resources
from policygrad.training.setup import make_local_learner as make_local_learner
from policygrad.training.step_log import build_completion_rows, build_step_notes, compute_step_metrics
from policygrad.weight_sync.base import LazyStateDict, copy_weights_
from policygrad.weight_sync.folder import save_lazy_model

if TYPE_CHECKING:
    from policygrad.training.distributed import ShardedCheckpointIO


# What people are told of a run before its first step.


def describe_run(run: Run, resources: Resources, learner: Learner, folder: Path, measured: bool) -> dict[str, str]:
    """Name and value: the model, the batch, what answers are worth, where files go. measured: whether on held-out problems."""
    batch = f"{run.prompts_per_step} prompts × {run.effective_samples_per_prompt} samples, {run.steps} steps"
    budget = "" if run.tokens is None else f" or {run.tokens:,} tokens, whichever is first"
    ahead = f", sampled {run.max_staleness} ahead of the weights" if run.max_staleness else ""
    adapters = adapters_words(resources.model)
    told = {
        "model": describe_model(run.describe_option("model"), resources.model, run.learner.dtype),
        **({"adapters": adapters} if adapters else {}),
        "batch": batch + budget + ahead,
        "reward": ", ".join(resources.reward_names),
        "run": str(folder),
    }
    if run.learner.world_size > 1:
        shared = (
            f", every {run.learner.tensor_parallel} of which share each layer"
            if run.learner.tensor_parallel > 1
            else ""
        )
        told["learner"] = f"{run.learner.world_size} processes{shared}"
    if run.sampler.engine != LOCAL:
        told["sampler"] = f"{run.sampler.engine} at {', '.join(run.sampler.urls) or 'a server started here'}"
    if isinstance(learner, ReferenceLearner) and run.algorithm.reference and run.algorithm.reference.model:
        told["reference"] = f"{run.algorithm.reference.model} ({learner.reference_parameters / 1e6:.2f}M parameters)"
    if not resources.has_rewards:
        told["held out"] = (
            "not measured: the task has no reward, and the algorithm needs none (--reward NAME gives one)"
        )
    if measured and resources.task.eval_on_train:
        told["held out"] = "too few prompts to hold any out: measured on the training prompts"
    return told


def describe_model(name: str, model: nn.Module, dtype: str) -> str:
    """A model's name, size and precision, and the device it is on."""
    parameters = list(model.parameters())
    return f"{name} ({sum(p.numel() for p in parameters) / 1e6:.2f}M parameters, {dtype} on {parameters[0].device})"


# The problems a run is measured on, and what their scores are called.

Note = tuple[str, str]
"""A text, and its kind: of one kind only the first is shown."""


@dataclass
class EvalProblems:
    """Held-out problems; none where nothing is measured."""

    run: Run
    examples: Sequence[Example] = ()
    is_binary: bool = True
    """Every score so far is 0 or 1."""

    def __bool__(self) -> bool:
        return bool(self.examples)

    def is_due(self, step: int) -> bool:
        """Whether there is an evaluation after this step, before the run's end."""
        every = self.run.evaluation.every
        return bool(every and 0 < step < self.run.steps and step % every == 0 and self)

    def evaluate(self, rollouter: Rollouter, progress: Callable[[int, int], None]) -> EvaluationResult:
        """Raises RewardError as a rollout does."""
        return rollouter.evaluate(self.examples, self.run.evaluation.samples_per_prompt, self.run.sampling, progress)

    def reward_notes(self, found: EvaluationResult) -> Iterator[Note]:
        """What went wrong with rewards."""
        for message in found.messages:
            yield message, message.partition(" (completion ")[0]
        if found.num_failed:
            count = len(self.examples) * self.run.evaluation.samples_per_prompt
            text = f"{found.num_failed} of {count} held-out completions have no reward and count as 0"
            yield text, "held-out completions without a reward"

    def score(self, found: EvaluationResult) -> tuple[float | None, Mapping[str, float]]:
        """(mean, its numbers for the log); None where every reward failed."""
        if not found.has_scores:
            return None, {}
        self.is_binary = self.is_binary and found.is_binary
        numbers = {"eval/reward": found.mean, "eval/reward_stderr": found.standard_error()}
        return found.mean, numbers | self._of_parts(found)

    def _of_parts(self, found: EvaluationResult) -> dict[str, float]:
        """The mean by the part of a mix that a problem is of."""
        means = dict[str, list[float]]()
        for example, mean in zip(self.examples, found.mean_per_problem, strict=True):
            if part := getattr(example, "part", ""):
                means.setdefault(part, []).append(mean)
        return {f"eval/from/{part}": fmean(each) for part, each in means.items()}

    def summarise(self, before: float | None, after: float | None) -> dict[str, str]:
        """The scores before and after, for people."""
        if not self:
            return {}
        if before is None and after is None:
            return {"held-out": "nothing could be scored, before or after: see the notes about the reward functions"}
        name = f"held-out {'accuracy' if self.is_binary else 'reward'}"
        if before is None or after is None:
            first, last = ("not scored" if score is None else f"{score:.2f}" for score in (before, after))
            return {name: f"{first} -> {last}"}
        return {name: format_change(before, after)}


# How many threads torch computes with.


@contextmanager
def limit_torch_threads(model: nn.Module) -> Iterator[None]:
    """One thread for a small model on the CPU, unless OMP_NUM_THREADS says otherwise; as it was, afterwards.

    On two cores the default run's training takes 21 seconds with one thread and 30 with two, which are in each other's and in
    the reward workers' way.
    """
    before = torch.get_num_threads()
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    if (
        on_cpu
        and sum(p.numel() for p in model.parameters()) < SMALL_MODEL_PARAMETERS
        and "OMP_NUM_THREADS" not in os.environ
    ):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# How much memory a run has taken.

MIB = 2**20


def measure_peak_memory() -> dict[str, float]:
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
    allow_code: Sequence[str] = (),
    time_limit: str | None = None,
    overwrite: bool = False,
    sampler: Sampler | SamplerFactory | None = None,
    learner: Learner | LearnerFactory = make_local_learner,
    environment: EnvironmentFactory | None = None,
    display: Tracker | bool = True,
    trackers: Sequence[Tracker] = (),
    callbacks: Sequence[Callback] = (),
) -> TrainingResult[float | None]:
    """Trains as `describe_run` says, or goes on with the run in the folder `resume`.

    stop_after: stop, resumably, after so many steps of this call; stop_before: before so much time (23h50m) has passed. overwrite:
    begin anew in an output folder that holds a run, which is deleted once the new one begins. allow: modules, files or folders
    that run.toml may name as its own parts and rewards; those in the current folder or loaded already need no leave. The rest as in
    `Trainer`.

    Raises:
        PolicygradError: what cannot be trained, with the way out.
    """
    if run is None and resume is not None:
        run = load_config(
            check_resumable(Path(resume), "train") / "run.toml", Run(), CodePermissions(tuple(allow_code))
        )
    trainer = Trainer(
        run,
        sampler=sampler,
        learner=learner,
        environment=environment,
        display=display,
        trackers=trackers,
        callbacks=callbacks,
    )
    return trainer.train(resume=resume, stop_after=stop_after, time_limit=time_limit, overwrite=overwrite)


class Trainer(BaseTrainer[Run, Progress, float]):
    """A run of reinforcement learning.

    sampler: what draws completions, or a function of (model, tokenizer) that makes it; None = this process, with the learner's
    own weights. learner: a function of (model, run). environment: a function of an example, called once per episode; None = the
    prompt and one answer. hosts: who else does a part of the work. display, trackers, callbacks: who follows it, see `BaseTrainer`.
    """

    kind, file = "train", "run.toml"
    resources: Resources
    learner: Learner

    def __init__(
        self,
        run: Run | None = None,
        *,
        sampler: Sampler | SamplerFactory | None = None,
        learner: Learner | LearnerFactory = make_local_learner,
        environment: EnvironmentFactory | None = None,
        placement: Placement = LOCAL_PLACEMENT,
        **followers: Unpack[TrackingOptions],
    ) -> None:
        run = run or Run()
        self._few_prompts = run.minibatch_warning  # which the resolved run no longer shows
        super().__init__(run.resolve(), **followers)
        self._sampler, self._environment, self._hosts = sampler, environment, placement
        self._learner = partial(make_local_learner, placement=placement) if learner is make_local_learner else learner
        given = {
            "sampler": sampler,
            "environment": environment,
            "learner": None if learner is make_local_learner else learner,
        }
        self._python_arguments = [name for name, value in given.items() if value is not None]
        self._noted_kinds: set[str] = set()
        self._waiting = False  # the policy, for its critic
        self.eval_problems = EvalProblems(self.config)
        self._failing = FailedStepTracker(run.rewards.max_failed_fraction, run.rewards.max_failed_steps)
        self._guarding = DivergenceGuard(run.guard, self.note)
        self._gave_up: str | None = None  # why the rewards end the run
        self._sharded_io: ShardedCheckpointIO | None = None  # of a learner in several processes

    @property
    def name(self) -> str:
        return self._composed.name

    @property
    def _composed(self) -> RunName:
        return name_run(self.config.algorithm, self.config.sampling.max_tokens)

    def build(self, stack: ExitStack) -> None:
        run = self.config
        self.resources = found = load_resources(
            stack, needed_for(run, self._sampler, self._environment, self.trackers.phase, self._hosts)
        )
        self.model, self.tokenizer = found.model, found.tokenizer
        stack.enter_context(limit_torch_threads(found.model))
        there, device = resolve_paths(run), next(found.model.parameters()).device.type
        self.learner = build_learner(self._learner, found.model, there)
        if isinstance(self.learner, CloseableLearner):
            stack.callback(self.learner.close)
        if run.learner.world_size > 1:  # torch.distributed takes a while to import
            from policygrad.training.distributed import distribute_sampling, make_sharded_io

            self.resources, self._sharded_io = distribute_sampling(found, self.learner), make_sharded_io(self.learner)
        code = dict(zip(_code(run), _code(there), strict=True))
        self._fingerprint = fingerprint_run(there, device, code)
        check_rollback_lr(self.learner, run.guard)
        measured = run.evaluation.problems if found.has_rewards else 0
        self.eval_problems = EvalProblems(run, found.task.eval_examples(measured) if measured else ())
        for (
            example
        ) in self.eval_problems.examples:  # before there is a folder: a prompt that leaves no room for the completion
            found.tokenizer.encode(example.prompt, run.sampling.max_tokens, example.source or "a held-out prompt")

    def _publish(self) -> None:
        """The learner's weights to the sampler, and into the model that is saved: a learner of one's own may have others in
        memory."""
        published = self.learner.publish()
        self.resources.rollouter.update_weights(published)
        if not isinstance(published.tensors, LazyStateDict):
            copy_weights_(published.tensors, self.model)

    @property
    def version(self) -> int:
        return self.learner.version

    @property
    def steps(self) -> int:
        return self.config.steps

    def is_finished(self, progress: Progress) -> bool:
        return progress.over(self.config)

    @property
    def sharded_state(self) -> ShardedState[Progress] | None:
        shares = self._sharded_io
        if shares is None:
            return None
        return ShardedState(
            lambda progress: self._packed(progress, {}, shares.state_values), shares.start_save, shares.is_sharded
        )

    def pack_state(self, progress: Progress) -> SavedState:
        return self._packed(progress, *self.learner.state())

    def _packed(self, progress: Progress, tensors: dict[str, Tensor], values: Mapping[str, Any]) -> SavedState:
        waiting, said = serialization.pack_rollouts(progress.leftover_groups, progress.queued_rollouts)
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
            "binary": self.eval_problems.is_binary,
            "given": self._python_arguments,
            "began": self._fingerprint,
            "changes": self.option_changes,
            "guard": self._guarding.history.to_dict(),
        }

    def check_checkpoint(self, saved: Checkpoint) -> None:
        state = saved.state
        if lacking := _STATE - state.keys():
            raise CheckpointError(f"it has no {min(lacking)!r}")
        if not all(isinstance(state[name], int | float) for name in ("position", "tokens", "seconds")):
            raise CheckpointError("its counts are no numbers")
        if isinstance(self.learner, CheckedLearner):
            self.learner.check_state(saved.tensors, state["learner"])

    @property
    def max_snapshot_bytes(self) -> int:
        if self.config.guard.action != "warn":  # which is to undo steps of whatever size
            return sys.maxsize
        return (
            super().max_snapshot_bytes if isinstance(self.learner, SnapshotLearner) else 0
        )  # another learner's state may be expensive

    def start(self, saved: Checkpoint | None) -> Progress:
        run, algorithm = self.config, self.config.algorithm
        if saved is None:
            self._publish()
            return Progress(algorithm.init_state())
        state = saved.state
        waiting, tensors = serialization.split_tensors(saved.tensors)
        if ("environment" in state["given"]) is not ("environment" in self._python_arguments):
            had = "was given an environment" if "environment" in state["given"] else "had no environment"
            raise RunError(
                f"{self.folder}: the run {had} from Python, and what it learned there would go on as something else: go on as it "
                f"began, with pg.train(run, resume={str(self.folder)!r}, environment=…) or without"
            )
        self.compare_with_checkpoint(saved, self._fingerprint, run)
        restore = self.learner.restore if self._sharded_io is None else partial(self._sharded_io.restore, saved.path)
        restore_learner(restore, saved, tensors, run, self.folder)
        self.before, self.measured, self.eval_problems.is_binary = state["before"], state["measured"], state["binary"]
        parts, (groups, ahead) = (
            state["parts"],
            serialization.unpack_rollouts(waiting, state, self.resources.task.train_example),
        )
        if state["algorithm"] != algorithm_to_dict(algorithm):
            self.trackers.note(
                "the algorithm is not the one the checkpoint was made with: its parts start without their state"
            )
            parts, groups, ahead = algorithm.init_state(), (), ()
        self._guarding.restore(state.get("guard"), self.learner)
        self._publish()
        return Progress(parts, saved.step, state["position"], state["tokens"], state["seconds"], groups, ahead)

    def make_run_info(self, progress: Progress) -> RunInfo:
        run = self.config
        for text in describe_idle_schedules(run):
            self.trackers.note(text)
        if objects := [*run.object_options, *self._python_arguments]:
            self.trackers.note(
                f"{' and '.join(objects)} given as objects, which run.toml cannot hold: this run can be gone on with from "
                "Python, pg.train(run, resume=folder), but not from the command line alone"
            )
        if self._few_prompts:
            self.trackers.note(self._few_prompts)
        return RunInfo(
            f"policygrad · {self._composed.title} on {run.describe_option('task')}",
            describe_run(run, self.resources, self.learner, self.folder, bool(self.eval_problems)),
            run.steps,
            first_step=progress.step + 1,
            history=self.files.history("reward"),
            token_budget=run.tokens,
            sampled_tokens=progress.tokens,
            config={
                **asdict(replace(run.without_objects(), directory=None)),
                "algorithm": algorithm_to_dict(run.algorithm),
            },
            folder=self.folder,
        )

    def run_steps(self, progress: Progress) -> Progress:
        if self.eval_problems.is_due(progress.step):  # a stop may have come before it
            self.evaluate_at(f"evaluating at step {progress.step}", progress.step)
        progress = run_loop(
            self.config,
            self.resources.rollouter,
            self.learner,
            progress,
            self,
            self.stopping.interruptible,
            self._guarding.settle,
        )
        tensors = self.learner.publish().tensors
        if not isinstance(tensors, LazyStateDict):
            copy_weights_(tensors, self.model)
        return progress

    def write_weights(self, folder: Path) -> None:
        tensors = self.learner.publish().tensors
        if isinstance(tensors, LazyStateDict):
            save_lazy_model(self.model, tensors, folder)
        else:
            super().write_weights(folder)

    def on_step(self, done: StepResult) -> Metrics:
        """After every step: its lines in the files, its picture on the display, and perhaps an evaluation."""
        step = done.step
        scored = self.resources.has_rewards
        values = compute_step_metrics(done, scored)
        for text, kind in build_step_notes(done, values, self._waiting, getattr(self.learner, "not_finite", "")):
            self.note(text, kind)
        self._waiting = "value_pretraining" in values
        values |= self._guarding.assess(step, values, has_constant_rewards(done, values))
        self.log(step, values, build_completion_rows(done, self.resources.tokenizer.decode, scored))
        if self._guarding.apply(step, self.learner, self._put_back, self.checkpointer):
            self._publish()
        if self._guarding.stop_reason:
            self.stop()
        self._gave_up = self._failing.record_step(values.get("completions/failed_ratio", 0.0), done.rollout.messages)
        if self._gave_up:
            self.stop()
            return {}
        if not self.eval_problems.is_due(step):
            return {}
        try:  # what parts remember may hang on the score, and then a step without it is no whole one
            score = self.evaluate_at(
                f"evaluating at step {step}", step, breakable=not self.config.algorithm.init_state()
            )
        except StopRequested:
            return {}
        return {} if score is None else {"eval/reward": Mean(score)}

    def _put_back(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """The learner as a checkpoint has it."""
        self.learner.restore(serialization.split_tensors(tensors)[1], state["learner"])

    def note(self, text: str, kind: str | None = None) -> None:
        """Shown the first time something of its kind is said."""
        kind = text if kind is None else kind
        if kind not in self._noted_kinds:
            self._noted_kinds.add(kind)
            self.trackers.note(text)

    @property
    def has_eval(self) -> bool:
        return bool(self.eval_problems)

    def phase_label(self, when: str) -> str:
        return f"evaluating {when}"

    def cached_measurement(self, step: int) -> float | None:
        return dict(self.files.history("eval/reward")).get(step)

    def evaluate(self, progress: Callable[[int, int], None]) -> tuple[float | None, Mapping[str, float]]:
        """Held-out mean, None when every reward failed."""
        try:
            found = self.eval_problems.evaluate(self.resources.rollouter, progress)
        except RewardError as error:
            raise RewardError(f"{error}. {self._goes_on}") from error
        for text, kind in self.eval_problems.reward_notes(found):
            self.note(text, kind)
        if wrong := self._failing.record_evaluation(not found.has_scores, found.messages):
            raise RewardError(f"{wrong}. {self._goes_on}")
        return self.eval_problems.score(found)

    def check_end(self) -> None:
        self._guarding.check(self.progress.step, self.resume_command)
        if self._gave_up:
            raise RewardError(f"{self._gave_up}. Step {self.progress.step} is saved: {self._goes_on}")

    @property
    def _goes_on(self) -> str:
        """How to go on, when rewards have failed."""
        return f"{self.resume_command} goes on once the reward works, or with --rewards.max-failed-steps 0 whatever it does"

    def summarise(self, after: float | None) -> dict[str, str]:
        return self.eval_problems.summarise(self.before, after)

    def result_values(self, progress: Progress, after: float | None) -> dict[str, Any]:
        return {
            "steps": progress.step,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            **measure_peak_memory(),
            "held_out_before": self.before,
            "held_out_after": after,
        }

    @property
    def resume_command(self) -> str:
        return (
            f"pg.train(run, resume={str(self.folder)!r})"
            if self.config.object_options or self._python_arguments
            else " ".join(filter(None, (super().resume_command + self._leave, self._hosts.cli_flags)))
        )

    @property
    def _leave(self) -> str:
        """What run.toml alone may not have imported, asked or written to by whoever goes on."""
        sampler = {"urls": list(self.config.sampler.urls), "folder": self.config.sampler.folder}
        data = {**_own(resolve_paths(self.config)), "sampler": sampler}
        missing = missing_permissions(data, self.folder / self.file, elsewhere=True)
        return f" --allow-code {shlex.join(missing)}" if missing else ""


def _own(run: Run) -> dict[str, Any]:
    """The options that may name code of one's own."""
    single = {"map": run.row_map, "environment": run.environment}
    named = {option: name for option, name in single.items() if isinstance(name, str)}
    return {"algorithm": algorithm_to_dict(run.algorithm), "reward": list(run.reward), **named}


def _code(run: Run) -> list[str]:
    """The modules and files of one's own that a run takes, and the files that judges go by."""
    rubrics = (file for name in run.reward if isinstance(name, str) for file in find_rubrics(name))
    return [*config_code_references(_own(run)), *rubrics]
