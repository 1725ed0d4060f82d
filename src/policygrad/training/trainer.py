"""Reinforcement learning runs: the training loop with checkpoints, evaluation, logging and error handling around it."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from policygrad.checkpoint.format import Checkpoint
from policygrad.checkpoint.manager import SavedState
from policygrad.core.base import format_steps
from policygrad.core.metrics import Mean
from policygrad.errors import CheckpointError, ConfigError, RewardError, RunError
from policygrad.learners.base import CheckedLearner, Learner, ReferenceLearner
from policygrad.models.loading import find_zero_embeddings
from policygrad.models.traits import adapter_configs
from policygrad.rewards.workers.failures import FailedStepTracker
from policygrad.rewards.workers.pool import RewardPool
from policygrad.rollout import serialization
from policygrad.rollout.providers import find_preparations
from policygrad.rollout.runners import EnvironmentKind
from policygrad.samplers.base import Sampler, SamplingParams
from policygrad.samplers.config import LOCAL
from policygrad.tasks.base import Example
from policygrad.trackers import RunInfo, Tracker, format_change
from policygrad.trackers.console import Z_95
from policygrad.training.base_trainer import BaseTrainer, Callback, TrackingOptions, TrainingResult
from policygrad.training.config.paths import resolve_config_paths
from policygrad.training.config.run import Run, find_idle_settings
from policygrad.training.config.run_name import RunName, name_run
from policygrad.training.config.serialization import algorithm_to_dict, load_config
from policygrad.training.config.trust import CodePermissions, missing_permissions
from policygrad.training.divergence_guard import has_constant_rewards
from policygrad.training.interrupts import StopRequested
from policygrad.training.learner_setup import connect_teachers, limit_torch_threads, make_learner, make_local_learner
from policygrad.training.loop import Progress, StepOutcome, StepResult, run_loop
from policygrad.training.memory_limits import DECODE_ROWS, describe_longest_text
from policygrad.training.placement import LOCAL_PLACEMENT, LearnerFactory, Placement, SamplerFactory
from policygrad.training.provenance import code_options, fingerprint_inputs
from policygrad.training.run_folder import check_resumable
from policygrad.training.run_state import pack_progress, publish_weights, restore_progress
from policygrad.training.setup import Resources, load_resources, plan_run, prepare_run
from policygrad.training.step_log import (
    build_completion_rows,
    build_step_notes,
    compute_step_metrics,
    describe_zero_embeddings,
    write_thumbnails,
)
from policygrad.training.step_records import StepRecorder, choose_steps
from policygrad.utils.spans import span
from policygrad.weight_sync.base import LazyStateDict, copy_weights_

if TYPE_CHECKING:
    from policygrad.tasks.benchmarks import BenchmarkData
    from policygrad.training.benchmarks import PreparedBenchmark

MIB = 2**20
# Keys that every checkpoint must have.
_REQUIRED_STATE = {
    *("learner", "parts", "algorithm", "position", "tokens", "seconds"),
    *("before", "measured", "eval_is_binary", "python_arguments"),
}


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
    environment: EnvironmentKind | None = None,
    display: Tracker | bool = True,
    trackers: Sequence[Tracker] = (),
    callbacks: Sequence[Callback] = (),
) -> TrainingResult[float | None]:
    """Train as `run` says, or resume the run in the folder `resume`. For the other arguments see `Trainer`.

    Args:
        stop_after: Stop, resumably, after this many steps of this call.
        allow_code: Modules, files or folders that run.toml may name as custom parts and rewards. Those in the current folder, and
            those already imported, need no permission.
        time_limit: Stop, resumably, in time to be saved before this much time (23h50m) has passed.
        overwrite: Replace the run that is in the output folder; it is deleted once the new one has started.

    Raises:
        PolicygradError: The run cannot be trained; the message says what to change.
    """
    if run is None and resume is not None:
        file = check_resumable(Path(resume), "train") / "run.toml"
        run = load_config(file, Run(), CodePermissions(tuple(allow_code)))
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

    Args:
        sampler: A sampler, or a function of (model, tokenizer) that makes one; None = this process, with the learner's weights.
        learner: A function of (model, run).
        environment: A function of an example, called once per episode; None = the prompt and one answer.
        placement: Where parts of the work are done.
        display, trackers, callbacks: See `BaseTrainer`.
    """

    kind, file = "train", "run.toml"
    resources: Resources
    learner: Learner
    eval_examples: Sequence[Example] = ()
    """The held-out problems; none if the run is not evaluated."""
    benchmarks: Sequence[PreparedBenchmark] = ()
    """Known benchmarks that are measured beside the held-out problems."""
    eval_is_binary = True
    """Whether every score so far is 0 or 1."""
    facts: Mapping[str, str]
    """What is made before the first update, for the run's description."""
    recorder: StepRecorder

    def __init__(
        self,
        run: Run | None = None,
        *,
        sampler: Sampler | SamplerFactory | None = None,
        learner: Learner | LearnerFactory = make_local_learner,
        environment: EnvironmentKind | None = None,
        placement: Placement = LOCAL_PLACEMENT,
        **tracking: Unpack[TrackingOptions],
    ) -> None:
        run = run or Run()
        self._minibatch_warning = run.minibatch_warning  # the resolved run has none
        super().__init__(run.resolve(), **tracking)
        self._sampler, self._environment, self._placement = sampler, environment, placement
        is_default = learner is make_local_learner
        self._learner = partial(make_local_learner, placement=placement) if is_default else learner
        arguments = {"sampler": sampler, "environment": environment, "learner": None if is_default else learner}
        self._python_arguments = [name for name, value in arguments.items() if value is not None]
        self._compile_note: str | None = None  # why `learner.compile = auto` is on or off
        self._was_pretraining = False  # whether the last step trained the critic alone
        self._failed_steps = FailedStepTracker(run.rewards.max_failed_fraction, run.rewards.max_failed_steps)
        self._reward_error: str | None = None  # why failing rewards end the run
        self._version_before = 0  # version of the weights at the beginning of the step

    @property
    def name(self) -> str:
        return self._run_name.name

    @property
    def _run_name(self) -> RunName:
        return name_run(self.config.algorithm, self.config.sampling.max_tokens)

    def build(self, stack: ExitStack) -> None:
        run = self.config
        benchmarks: Sequence[tuple[BenchmarkData, SamplingParams, int]] = ()
        if run.evaluation.benchmarks:  # what is missing is refused before the model is loaded
            from policygrad.training.benchmarks import load_run_benchmarks, prepare_benchmark

            benchmarks = load_run_benchmarks(resolve_config_paths(run))
        self.resources = resources = load_resources(
            stack,
            run,
            run.algorithm,
            sampler=self._sampler,
            environment=self._environment,
            placement=self._placement,
            phase=self.trackers.phase,
        )
        self.model, self.tokenizer = resources.model, resources.tokenizer
        self._zero_embeddings = find_zero_embeddings(self.model)
        if run.learner.compile == "auto":
            from policygrad.training.compile_choice import choose_compile

            options, self._compile_note = choose_compile(run, resources.model)
            self.config = run = replace(run, learner=options)  # which run.toml keeps
        stack.enter_context(limit_torch_threads(resources.model))
        prepared = [
            kind.describe_run(part, plan_run(run, resources)) for part, kind in find_preparations(run.algorithm)
        ]
        self.facts = {"prepared": "; ".join(prepared)} if prepared else {}  # refused before the learner is made
        sampler, rows = resources.rollouter.sampler, run.sampling.decode_rows
        self.memory.follow(sampler, DECODE_ROWS, rows, self.note)
        learner = make_learner(self._learner, resources.model, replace(run, learner=self.memory.apply(run.learner)))
        self.attach_learner(learner, stack)
        if run.learner.world_size > 1:
            from policygrad.training.distributed import distribute_sampling

            self.resources = distribute_sampling(resources, self.learner)
        self._connect_teachers(stack)
        self.fingerprint = fingerprint_inputs(run, resources.model)
        if run.guard.action == "rollback" and getattr(learner, "lr", None) is None:
            raise ConfigError(
                f"guard.action=rollback lowers the learning rate, and {type(learner).__name__} has no `lr` to set: use skip or stop"
            )
        if resources.has_rewards and run.evaluation.problems:
            self.eval_examples = resources.task.eval_examples(run.evaluation.problems)
        longest = run.evaluation.resolve_sampling(run.sampling).max_tokens
        for example in self.eval_examples:  # refuse a prompt that leaves no room for a completion now
            source = example.source or "a held-out prompt"
            resources.tokenizer.encode(example.prompt, longest, source, example.tools)
        if benchmarks:
            self.benchmarks = [prepare_benchmark(*benchmark, resources.tokenizer) for benchmark in benchmarks]

    def _connect_teachers(self, stack: ExitStack) -> None:
        """Let the teachers that are behind servers score each rollout."""
        rollouter = self.resources.rollouter
        task, tokenizer = self.resources.task, self.resources.tokenizer
        teachers = connect_teachers(stack, self.config, task, tokenizer, rollouter.run_async, self.trackers.phase)
        if teachers is not None:
            rollouter = replace(rollouter, providers=(*rollouter.providers, teachers))
        self.resources = replace(self.resources, rollouter=rollouter)

    @property
    def steps(self) -> int:
        return self.config.steps

    def is_finished(self, progress: Progress) -> bool:
        return self.config.is_finished(progress.step, progress.tokens)

    def pack(self, progress: Progress, tensors: dict[str, Tensor], values: Mapping[str, Any]) -> SavedState:
        packed, state = pack_progress(progress, self.config.algorithm, tensors, values)
        return packed, {
            **state,
            "before": self.before,
            "measured": self.measured,
            "eval_is_binary": self.eval_is_binary,
            "python_arguments": self._python_arguments,
            "fingerprint": self.fingerprint,
            "option_changes": self.option_changes,
            "guard": asdict(self.guard.history),
        }

    def check_checkpoint(self, saved: Checkpoint) -> None:
        state = saved.state
        if missing := _REQUIRED_STATE - state.keys():
            raise CheckpointError(f"it has no {min(missing)!r}")
        if not all(isinstance(state[name], int | float) for name in ("position", "tokens", "seconds")):
            raise CheckpointError("its counts are not numbers")
        if isinstance(self.learner, CheckedLearner):
            self.learner.check_state(saved.tensors, state["learner"])

    def start(self, saved: Checkpoint | None) -> Progress:
        run, resources, learner = self.config, self.resources, self.learner
        if saved is None:
            publish_weights(learner, resources)
            return Progress(run.algorithm.init_state())
        state = saved.state
        if ("environment" in state["python_arguments"]) is not ("environment" in self._python_arguments):
            had = "was given an environment" if "environment" in state["python_arguments"] else "had no environment"
            raise RunError(
                f"{self.folder}: the run {had} from Python, and would continue as another one: resume it as it started, with "
                f"pg.train(run, resume={str(self.folder)!r}, environment=…) or without environment"
            )
        self.compare_with_checkpoint(saved)
        restore = learner.restore if self.sharded_io is None else partial(self.sharded_io.restore, saved.path)
        progress = restore_progress(saved, run, resources, learner, restore, self.note)
        self.before, self.measured = state["before"], state["measured"]
        self.eval_is_binary = state["eval_is_binary"]
        self.guard.restore(state.get("guard"), learner)
        return progress

    def load_learner_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.learner.restore(serialization.split_tensors(tensors)[1], state["learner"])
        publish_weights(self.learner, self.resources)

    def make_run_info(self, progress: Progress) -> RunInfo:
        run, resources = self.config, self.resources
        unused = run.evaluation.find_unused(len(self.eval_examples), has_rewards=resources.has_rewards)
        benchmarks = (text for each in self.benchmarks for text in each.messages)
        for text in (*find_idle_settings(run), *unused, *benchmarks):
            self.note(text)
        if objects := [*run.object_options, *self._python_arguments]:
            self.note(
                f"{' and '.join(objects)} given as objects, which run.toml cannot hold: resume this run from Python, "
                "pg.train(run, resume=folder), and not from the command line alone"
            )
        for warning in filter(None, (self._minibatch_warning, self._compile_note)):
            self.note(warning)
        batch = (
            f"{run.prompts_per_step} prompts × {run.effective_samples_per_prompt} samples, {format_steps(run.steps)}"
        )
        batch += "" if run.tokens is None else f" or {run.tokens:,} tokens, whichever is first"
        batch += f", sampled up to {run.max_staleness} steps ahead" if run.max_staleness else ""
        facts = {"model": describe_model(run.describe_option("model"), self.model, run.learner.dtype)}
        if adapter_configs(self.model):
            from policygrad.models.adapters import describe_adapters

            facts["adapters"] = describe_adapters(self.model)
        if shares := getattr(resources.task, "shares", ""):
            facts["mix"] = shares
        facts |= {"batch": batch, "reward": ", ".join(resources.reward_names), "run": str(self.folder)}
        if run.learner.world_size > 1:
            size, readers = run.learner.tensor_parallel, run.learner.context_parallel
            shared = f", each layer shared by {size}" if size > 1 else ""
            shared += f", each text divided between {readers}" if readers > 1 else ""
            facts["learner"] = f"{run.learner.world_size} processes{shared}"
        if run.sampler.engine != LOCAL:
            facts["sampler"] = f"{run.sampler.engine} at {', '.join(run.sampler.urls) or 'a server started here'}"
        reference = run.algorithm.reference
        if isinstance(self.learner, ReferenceLearner) and reference and reference.models:
            size = self.learner.reference_parameters
            memory = f"{size / 1e6:.2f}M parameters" if size else "behind a server"
            facts["reference"] = f"{reference.model or ', '.join(reference.teachers)} ({memory})"
        longest, remedy = describe_longest_text(self.model, self.learner, run)
        facts |= {**longest, **self.facts}
        if remedy is not None:
            self.note(remedy)
        if not resources.has_rewards:
            facts["eval data"] = "none: the task has no reward, and the algorithm needs none (--reward NAME gives one)"
        elif self.eval_examples and resources.task.eval_on_train:
            facts["eval data"] = "the training prompts, which are too few to hold any out"
        return RunInfo(
            f"policygrad · {self._run_name.title} on {run.describe_option('task')}",
            facts,
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
        steps = choose_steps(self.steps, self.config.verify)
        self.recorder = StepRecorder(self.folder, steps, self.fingerprint, self.note)
        self.recorder.start(progress.step)
        self.before_save(progress)
        if self._is_eval_due(progress.step):  # the run may have been stopped before it
            self.evaluate_at(f"at step {progress.step}", progress.step)
        with self.stopping.interruptible():
            self.resources, messages = prepare_run(
                self.config, self.resources, self.folder, is_initial=progress.step == 0, phase=self.trackers.phase
            )
        for text in messages:
            self.note(text, text.partition(" (completion ")[0])
        progress = run_loop(
            self.config, self.resources.rollouter, self.learner, progress, self, self.stopping.interruptible
        )
        tensors = self.learner.publish().tensors
        if not isinstance(tensors, LazyStateDict):
            copy_weights_(tensors, self.model)
        return progress

    def write_weights(self, folder: Path) -> None:
        tensors = self.learner.publish().tensors
        if isinstance(tensors, LazyStateDict):
            from policygrad.weight_sync.folder import save_lazy_model

            save_lazy_model(self.model, tensors, folder)
        else:
            copy_weights_(tensors, self.model)  # of which a custom learner may have a copy
            super().write_weights(folder)

    def written_tensors(self) -> Mapping[str, Tensor]:
        tensors = self.learner.publish().tensors
        is_sharded = isinstance(tensors, LazyStateDict) and not adapter_configs(self.model)
        return tensors if is_sharded else super().written_tensors()

    def before_save(self, progress: Progress) -> None:
        """Record the step that led to `progress`, or the state for the next one, if it is one to verify."""
        if self.recorder.is_due(progress.step):
            with span("record", step=progress.step):
                state = self.checkpointer.snapshot
                if state is None and self.sharded_io is None:
                    state = self.pack(progress, *self.learner.state())
                self.recorder.after_step(progress, state)
        self._version_before = self.learner.version

    def on_step(self, result: StepResult) -> StepOutcome:
        """Log a finished step, carry out the guard's decision, and evaluate if it is time."""
        step, has_rewards = result.step, self.resources.has_rewards
        self.current_step = step
        values = compute_step_metrics(result, has_rewards)
        nonfinite = getattr(self.learner, "not_finite", "")
        for text, kind in build_step_notes(result, values, self._was_pretraining, nonfinite):
            self.note(text, kind)
        clip, tokenizer = self.config.optimizer.clip, self.resources.tokenizer
        if text := describe_zero_embeddings(result, values, self._zero_embeddings, clip, tokenizer):
            self.note(text, "zero embedding")
        self._was_pretraining = "value_pretraining" in values
        decision = self.guard.assess(step, values, has_constant_rewards(result, values))
        rows = build_completion_rows(result, self.resources.tokenizer.decode, has_rewards)
        write_thumbnails(self.folder, result.rollout.groups)
        self.log(step, values | decision.metrics, rows)
        outcome = self.apply(decision)
        self.recorder.on_step(result, values | decision.metrics, self._version_before, undone=outcome.undone)
        failed = values.get("completions/failed_ratio", 0.0)
        self._reward_error = self._failed_steps.record_step(failed, result.rollout.messages)
        if self._reward_error:
            self.stop()
        elif self._is_eval_due(step):
            try:  # a step whose parts need the score is incomplete without it
                interruptible = not self.config.algorithm.init_state()
                score = self.evaluate_at(f"at step {step}", step, interruptible=interruptible)
            except StopRequested:
                score = None
            if score is not None:
                return replace(outcome, metrics={"eval/reward": Mean(score)})
        return outcome

    @property
    def has_eval(self) -> bool:
        return bool(self.eval_examples or self.benchmarks)

    @property
    def best_metrics(self) -> Mapping[str, bool]:
        metrics = {"eval/reward": True} if self.eval_examples else {}
        parts = {part for example in self.eval_examples if (part := getattr(example, "part", ""))}
        metrics |= {f"eval/from/{part}": True for part in sorted(parts)}
        for each in self.benchmarks:
            metrics |= each.metric_directions
        return metrics

    def _is_eval_due(self, step: int) -> bool:
        """Return whether to evaluate after this step, which is not the last."""
        every = self.config.evaluation.every
        return self.has_eval and every > 0 and 0 < step < self.steps and step % every == 0

    def cached_measurement(self, step: int) -> float | None:
        if any(step not in dict(self.files.history(name)) for name in self._benchmark_means.values()):
            return None  # the run was resumed with further benchmarks
        return dict(self.files.history("eval/reward")).get(step)

    @property
    def _benchmark_means(self) -> dict[str, str]:
        """The metric with each benchmark's mean, by the benchmark's name."""
        return {each.benchmark.key: f"eval/{each.benchmark.metric_name}/mean" for each in self.benchmarks}

    def evaluate(self, progress: Callable[[int, int], None]) -> tuple[float | None, Mapping[str, float]]:
        mean, metrics = self._evaluate_task(progress) if self.eval_examples else (None, dict[str, float]())
        make_pool = self._placement.reward_pool or RewardPool.from_config
        config, phase = self.config.rewards, self.trackers.phase
        for each in self.benchmarks:
            result = each.evaluate(
                self.resources.rollouter, lambda rewards: make_pool(rewards, config, phase), progress
            )
            for text in result.result.messages:
                self.note(f"{each.benchmark.key}: {text}", f"{each.benchmark.key} {text.partition(' (completion ')[0]}")
            metrics |= result.metrics
        return mean, metrics

    def _evaluate_task(self, progress: Callable[[int, int], None]) -> tuple[float | None, dict[str, float]]:
        """Evaluate on the held-out problems of the run's own task."""
        examples, samples = self.eval_examples, self.config.evaluation.samples_per_prompt
        sampling = self.config.evaluation.resolve_sampling(self.config.sampling)
        try:
            result = self.resources.rollouter.evaluate(examples, samples, sampling, progress)
        except RewardError as error:
            raise RewardError(f"{error}. {self._resume_hint}") from error
        for text in result.messages:
            self.note(text, text.partition(" (completion ")[0])
        if result.num_failed:
            text = (
                f"{result.num_failed} of {len(examples) * samples} held-out completions have no reward and count as 0"
            )
            self.note(text, "held-out completions without a reward")
        if message := self._failed_steps.record_evaluation(not result.has_scores, result.messages):
            raise RewardError(f"{message}. {self._resume_hint}")
        if not result.has_scores:
            return None, {}
        self.eval_is_binary = self.eval_is_binary and result.is_binary
        by_part = dict[str, list[float]]()  # of a mix of data
        for example, mean in zip(examples, result.mean_per_problem, strict=True):
            if part := getattr(example, "part", ""):
                by_part.setdefault(part, []).append(mean)
        metrics = {"eval/reward": result.mean, "eval/reward_stderr": result.standard_error()}
        return result.mean, metrics | {f"eval/from/{part}": fmean(means) for part, means in by_part.items()}

    def check_end(self) -> None:
        super().check_end()
        if self._reward_error:
            raise RewardError(f"{self._reward_error}. Step {self.progress.step} is saved: {self._resume_hint}")

    @property
    def _resume_hint(self) -> str:
        return f"{self.resume_command} resumes once the reward works, or in any case with --rewards.max-failed-steps 0"

    def summarise(self, after: float | None) -> dict[str, str]:
        benchmarks = {name: format_change(*values, 3) for name, values in self._benchmark_changes().items()}
        if not self.eval_examples:
            return benchmarks
        before = self.before
        if before is None and after is None:
            text = "nothing could be scored, before or after: see the notes about the reward functions"
            return {"held-out": text, **benchmarks}
        name = f"held-out {'accuracy' if self.eval_is_binary else 'reward'}"
        if before is None or after is None:
            first, last = ("not scored" if score is None else f"{score:.2f}" for score in (before, after))
            return {name: f"{first} -> {last}", **benchmarks}
        return {name: format_change(before, after, half_width=self._change_half_width()), **benchmarks}

    def _change_half_width(self) -> float:
        """Return half of the 95 % interval of the change of the held-out reward; 0 where its error is not known.

        The two evaluations count as independent. They have the same problems, so that the interval is rather too wide.
        """
        errors = self.files.history("eval/reward_stderr")
        return Z_95 * math.hypot(errors[0][1], errors[-1][1]) if len(errors) > 1 else 0.0

    @property
    def next_commands(self) -> dict[str, str]:
        commands = dict(super().next_commands)
        if not self.config.object_options and not self._python_arguments:  # else Python has to make them again
            if self.resources.has_rewards:
                commands["measure it"] = f"policygrad eval {shlex.quote(str(self.folder))}"
            tokens = "" if self.config.tokens is None else f" --tokens {2 * self.config.tokens}"
            commands["train on"] = f"{self.resume_command} --steps {2 * self.steps}{tokens}"
        return commands

    def _benchmark_changes(self) -> dict[str, tuple[float, float]]:
        """The first and the last mean of each benchmark in the log."""
        histories = {name: self.files.history(metric) for name, metric in self._benchmark_means.items()}
        return {name: (history[0][1], history[-1][1]) for name, history in histories.items() if history}

    def result_values(self, progress: Progress, after: float | None) -> dict[str, Any]:
        changes = {name: {"before": first, "after": last} for name, (first, last) in self._benchmark_changes().items()}
        return {
            "steps": progress.step,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            **measure_peak_memory(),
            "eval_reward_before": self.before,
            "eval_reward_after": after,
            **({"benchmarks": changes} if changes else {}),
        }

    @property
    def resume_command(self) -> str:
        if self.config.object_options or self._python_arguments:
            return f"pg.train(run, resume={str(self.folder)!r})"
        sampler = {name: getattr(self.config.sampler, name) for name in ("urls", "folder", "python")}
        options = {**code_options(resolve_config_paths(self.config)), "sampler": sampler}
        missing = missing_permissions(options, self.folder / self.file, new_process=True)
        allow = f" --allow-code {shlex.join(missing)}" if missing else ""
        return " ".join(filter(None, (super().resume_command + allow, self._placement.cli_flags)))


def describe_model(name: str, model: nn.Module, dtype: str) -> str:
    """Return a model's name, size, precision and device."""
    parameters = list(model.parameters())
    return f"{name} ({sum(p.numel() for p in parameters) / 1e6:.2f}M parameters, {dtype} on {parameters[0].device})"


def measure_peak_memory() -> dict[str, float]:
    """Return this process's peak memory in MiB: `peak_memory_mib` of the host, and `peak_cuda_memory_mib` if a GPU was used. Empty
    where the system does not count it (Windows)."""
    peaks: dict[str, float] = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        resident = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
        status = Path("/proc/self/status")
        if status.exists():  # on Linux getrusage starts from the memory of the parent process
            lines = status.read_text(encoding="ascii", errors="replace").splitlines()
            resident = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        peaks["peak_memory_mib"] = resident / MIB
    if torch.cuda.is_available():
        peak = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
        peaks |= {"peak_cuda_memory_mib": peak / MIB} if peak else {}
    return peaks
