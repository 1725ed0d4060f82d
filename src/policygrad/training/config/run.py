"""A run's configuration: frozen dataclasses, set by defaults, then a TOML file, then flags. Importing it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Annotated, Any

import tyro

from policygrad.algorithms import DAPO
from policygrad.core.algorithm import Algorithm
from policygrad.core.base import RunLength
from policygrad.core.validation import ask_parts, check_rollout, frozen_problem, list_idle, name_role
from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig, OptimizerConfig, explain_step_size
from policygrad.models.chat.template_options import parse_template_options
from policygrad.models.lora_config import LORA_LR_FACTOR
from policygrad.planning.model_sizes import EMBEDDED_MODEL, EMBEDDED_MODELS, VISION_MODEL
from policygrad.rewards.builtin import check_step_pattern
from policygrad.rewards.config import VARIABLE_NAMES, RewardConfig
from policygrad.rollout.environment import DEFAULT_TIMEOUT
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.config import LOCAL, SamplerConfig, TeacherServerConfig
from policygrad.trackers.registry import DEFAULT_TRACE_MIB, check_tracking, find_idle_tracking
from policygrad.training.config.checkpoint import CheckpointConfig
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.guard import GuardConfig
from policygrad.training.config.option_checks import (
    check_completion_count,
    check_environment_timeout,
    check_folders,
    check_lr,
    check_seed,
)
from policygrad.training.config.optional_arg import optional_arg
from policygrad.training.config.run_name import format_setting, name_run
from policygrad.utils.child_environment import check_variable_names
from policygrad.utils.field_types import check_field_types, describe_idle, list_changed

LEARNER_FIELDS = {
    "logp_old",
    "logp_learner",
    "logp_ref",
    "entropy",
    "sum_pi_squared",
    "values",
    "bootstrap",
    "grad_logp_sq_norm",
    "implicit_reward",
}
"""Batch fields that a learner fills."""
OBJECT_PREFIX = "object:"  # marks, in a file, an option that was given as a Python object
TINY_MODEL_LR, DEFAULT_LR = 1e-3, 1e-6
"""Default learning rates: of the embedded model with 0.7M parameters, divided by √K for K updates per rollout, and of models of
the size that is usually post-trained."""


@dataclass(frozen=True)
class RunOptions:
    """All options of a run apart from its algorithm."""

    model: Annotated[Any, optional_arg("ID|DIR", kind=str)] = "tiny"
    """Directory or hub id of a causal language model, which may also see; in Python also a model.
    tiny = the model inside the package; shapes = the one that sees, the default for --task shapes."""
    tokenizer: Annotated[Any, optional_arg("ID|DIR", "the model's own", str)] = None
    """Directory or hub id of a tokenizer other than the model's. In Python also a tokenizer."""
    template_options: Annotated[
        tuple[str, ...],
        tyro.conf.arg(name="tokenizer.template-options"),
        optional_arg("NAME=VALUE", "the template's own"),
    ] = ()
    """Variables of the chat template: enable_thinking=false. One that the template does not read is refused."""
    trust_remote_code: bool = False
    """Run Python code from the folder or repository of model, tokenizer and reference; without it such a model is refused."""
    task: Annotated[Any, optional_arg("NAME|FILE", kind=str)] = "embedded"
    """Source of prompts: embedded, a reasoning-gym name (gcd+2*chain_sum:max_terms=3), curriculum:NAME, verifiers:ID, or data.
    Data is a .jsonl, .json, .csv, .parquet or .arrow file, a folder, hf:REPOSITORY[:CONFIG[:SPLIT]], a mix, 0.7*a+0.3*b, rows.
    harbor:FOLDER is tasks in Harbor's format."""
    row_map: Annotated[Any, optional_arg("FILE:NAME", "none", str)] = None
    """Function applied to each row of the data, a dict; it returns the row to use, or None to drop it: mine.py:f."""
    skip_bad_rows: Annotated[bool, tyro.conf.arg(name="task.skip-bad-rows")] = False
    """Drop rows that cannot be used, and report how many; otherwise the first is an error, with file and line."""
    fetch_images: Annotated[bool, tyro.conf.arg(name="task.fetch")] = False
    """Download pictures that rows give by URL, each once; without it a row with a URL is refused."""
    decontaminate: Annotated[int, tyro.conf.arg(name="task.decontaminate")] = 0
    """Drop training rows that share this many consecutive words with a held-out prompt (8 to 13 is usual), and report how many.
    0 = only those whose prompt is itself held out."""
    reward: Annotated[tuple[Any, ...], optional_arg("NAME", "the task's own", tuple[str, ...])] = ()
    """Reward functions: names, dotted paths, path/to/file.py:function, or model:DIR for a reward model.
    Each may have a weight, bounds and gates (0.5*math within 0..1 if format)."""
    environment: Annotated[Any, optional_arg("FILE:NAME", "the prompt and one answer", str)] = None
    """One of calculator, mine.py:NAME, gymnasium:ID, textarena:GAME, openenv:URL, verifiers:ID, mcp:COMMAND|URL, rows:NAME+NAME.
    Tasks of programs: harbor:FOLDER. A program that talks to an API: program:COMMAND, agent:FILE.py:FUNCTION.
    Without --reward only its own rewards count."""
    environment_timeout: Annotated[float, tyro.conf.arg(name="environment.timeout")] = DEFAULT_TIMEOUT
    """Seconds for one reset, step or close of the environment, or of a program's own work in an episode, which otherwise fails.
    If the first four calls of a method all exceed it, the run stops, resumably."""
    environment_env: Annotated[tuple[str, ...], VARIABLE_NAMES, tyro.conf.arg(name="environment.env")] = ()
    """Environment variables that an agent's program gets besides the default ones (docs/isolation.md), such as a key."""
    step_end: Annotated[str | None, optional_arg("REGEX", "the task's own")] = None
    """End of a reasoning step, for an algorithm that needs only that (VinePPO): the end of every match; '\\n' = every line."""
    eval_data: Annotated[Any, optional_arg("FILE", "a sixteenth of the task, chosen by a hash of the prompt", str)] = (
        None
    )
    """Held-out problems, a data set or a mix, for a task that is data. In Python also rows."""
    steps: int = 16
    """Number of rollouts, each followed by the algorithm's updates."""
    max_staleness: int = 0
    """Number of steps by which samples may lag behind the weights.
    Above 0, later rollouts are sampled during the updates, and the algorithm corrects for the difference."""
    tokens: Annotated[int | None, optional_arg("INT", "no budget")] = None
    """Stop earlier, after the step in which this many tokens have been sampled; learning-rate schedules still count steps."""
    prompts_per_step: int = 64
    """Prompts per rollout."""
    samples_per_prompt: Annotated[int | None, optional_arg("INT", "the algorithm's own")] = None
    """G, completions per prompt."""
    lr: Annotated[
        float | None,
        optional_arg(
            "FLOAT",
            f"{TINY_MODEL_LR:g}/√K for the tiny model, K updates per rollout; {DEFAULT_LR:g} for others, "
            f"{DEFAULT_LR * LORA_LR_FACTOR:g} for adapters",
        ),
    ] = None
    """Peak learning rate."""
    seed: int = 0
    """Seed of all random numbers."""
    output: Annotated[str | None, optional_arg("DIR", "the next free runs/ALGORITHM-N")] = None
    """Folder of the run."""
    directory: Annotated[str | None, optional_arg("DIR", "the current folder")] = None
    """Folder that relative file names refer to, and then the current one; the run records it, for a resume from elsewhere."""
    sampling: Annotated[SamplingParams, tyro.conf.arg(name="")] = field(default_factory=SamplingParams)
    """How the policy is sampled."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """The engine that samples completions."""
    teacher_server: TeacherServerConfig = field(default_factory=TeacherServerConfig)
    """Teachers behind servers."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer, schedule, clipping."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Precision, device, memory."""
    rewards: RewardConfig = field(default_factory=RewardConfig)
    """Reward workers."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation on held-out problems."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Detection of divergence."""
    verify: int = 2
    """Steps, spread over the run, of which everything is kept that `policygrad verify` needs to repeat and check them."""
    track: Annotated[tuple[str, ...], optional_arg("NAME", "none")] = ()
    """Tracking services: wandb, tensorboard, trackio, mlflow. Each is an extra.
    Where the time goes: trace (a file for ui.perfetto.dev), otel (OpenTelemetry, an extra)."""
    trace_mib: int = DEFAULT_TRACE_MIB
    """MiB of disk that `--track trace` may take; beyond it the parts between the first and the newest are deleted."""
    metrics_port: Annotated[str | None, optional_arg("PORT or HOST:PORT", "no metrics")] = None
    """Serve metrics for Prometheus here: 9100 for this machine alone, 0.0.0.0:9100 for all.
    Needs the extra `prometheus`."""

    @property
    def publishes_sharded(self) -> bool:
        """Whether no process holds the full policy during training: several learn, and engines sample."""
        return self.learner.world_size > 1 and self.sampler.engine != LOCAL


@dataclass(frozen=True)
class UncheckedRun(RunOptions):
    """Options and algorithm before they are checked against each other; a file or flags may still change both."""

    algorithm: Algorithm = DAPO
    """The algorithm: the parts of one equation."""


@dataclass(frozen=True)
class Run(UncheckedRun):
    """One training run. `run.toml` in its folder holds all of it.

    Raises:
        ConfigError: The options contradict each other; the message says which to change.
    """

    def __post_init__(self) -> None:
        for name in ("task", "eval_data"):  # configurations are compared, which tables of pandas refuse
            if not isinstance(given := getattr(self, name), str | None):
                from policygrad.tasks.rows import table_to_rows

                object.__setattr__(self, name, table_to_rows(given))
        if self.task == VISION_MODEL and self.model == EMBEDDED_MODEL:  # which does not see
            object.__setattr__(self, "model", VISION_MODEL)
        check_run(self)

    @property
    def effective_samples_per_prompt(self) -> int:
        """G: `samples_per_prompt`, or the algorithm's own where it is None."""
        return self.algorithm.samples_per_prompt if self.samples_per_prompt is None else self.samples_per_prompt

    @property
    def minibatch_warning(self) -> str:
        """A warning if a rollout has fewer prompts than its algorithm has minibatches of whole groups; otherwise empty."""
        minibatches, prompts = self.algorithm.update_rule.minibatches, self.prompts_per_step
        if minibatches <= prompts:
            return ""
        return (
            f"{self.algorithm.name} splits a rollout into {minibatches} minibatches of whole groups, but {prompts} prompts per "
            f"step make only {prompts}, one prompt each: raise prompts_per_step to {minibatches} for its usual number of updates"
        )

    @property
    def object_options(self) -> tuple[str, ...]:
        """Options given as Python objects, which a file cannot hold; such a run is resumed from Python."""
        names = ("model", "tokenizer", "task", "row_map", "environment", "eval_data")
        objects = tuple(n for n in names if not isinstance(getattr(self, n), str | NoneType))
        return objects + (() if all(isinstance(reward, str) for reward in self.reward) else ("reward",))

    def describe_option(self, option: str) -> str:
        """Return an option's name, or the class of its object."""
        value = getattr(self, option)
        return value if isinstance(value, str) else f"{type(value).__name__} object"

    def without_objects(self) -> Run:
        """Return the run with a placeholder for each object, for files and trackers."""

        def name(value: Any) -> Any:
            if isinstance(value, str):
                return value
            return OBJECT_PREFIX + str(getattr(value, "__name__", type(value).__name__))

        changes: dict[str, Any] = {
            option: name(getattr(self, option)) for option in self.object_options if option != "reward"
        }
        return replace(self, **changes, reward=tuple(map(name, self.reward)))

    def rollouts_ahead(self, step: int) -> int:
        """Return how many rollouts are sampled before `step` starts."""
        return max(0, min(self.max_staleness, self.steps - step + 1))

    def is_finished(self, step: int, tokens: int) -> bool:
        """Return whether the run ends after `step` steps and `tokens` sampled tokens."""
        return step >= self.steps or (self.tokens is not None and tokens >= self.tokens)

    def resolve(self) -> Run:
        """Fill in every open choice: samples per prompt, learning rate, precision, the token budget of parts that use it, and no
        more minibatches than a rollout has prompts."""
        samples = self.effective_samples_per_prompt
        algorithm = replace(self.algorithm.with_max_tokens(self.sampling.max_tokens), samples_per_prompt=samples)
        rule = algorithm.update_rule
        if self.minibatch_warning:
            rule = replace(rule, minibatches=self.prompts_per_step)  # type: ignore[type-var]
            algorithm = replace(algorithm, update_rule=rule)
        updates = rule.updates if rule.uses_lr else rule.critic_updates
        is_embedded = isinstance(self.model, str) and self.model in EMBEDDED_MODELS
        default = TINY_MODEL_LR / updates**0.5 if is_embedded else self.learner.scale_lr(DEFAULT_LR)
        if algorithm.critic is not None and not rule.uses_lr:  # its rate cannot follow the policy's, which has none
            algorithm = replace(algorithm, critic=replace(algorithm.critic, lr=algorithm.critic.learning_rate(default)))
        lr = self.lr if self.lr is not None else default if rule.uses_lr else None
        learner = self.learner.resolve(algorithm.head)
        return replace(self, algorithm=algorithm, samples_per_prompt=samples, lr=lr, learner=learner)


def check_run(run: Run) -> None:
    """Raise ConfigError for the first option that is wrong, alone or together with others."""
    _check_types(run)
    _check_prompts(run)
    _check_length(run)
    algorithm, samples = run.algorithm, run.effective_samples_per_prompt
    check_environment_timeout(run.environment_timeout)
    check_variable_names(run.environment_env, "environment.env")
    check_seed(run.seed)
    check_folders(run.output, run.directory)
    check_tracking(run.track, run.trace_mib, run.metrics_port)
    run.sampling.check(algorithm, samples)
    check_rollout(algorithm)
    _check_step_size(run, samples)
    _check_max_staleness(run)
    _check_lr(run)
    _check_step_end(run)
    run.sampler.check(run.max_staleness, run.sampling)
    run.learner.check(algorithm, run.sampler)
    run.optimizer.check(algorithm, run.learner, run.lr)
    run.guard.check(algorithm)
    run.teacher_server.check(algorithm, run.sampling)
    run.evaluation.check(algorithm)
    run.checkpoint.check(run.evaluation)


def _check_types(run: Run) -> None:
    """Refuse values that are not of an option's kind, the algorithm first of all, which the other checks read."""
    if not isinstance(run.algorithm, Algorithm):
        example = f"pg.get_algorithm({run.algorithm!r})" if isinstance(run.algorithm, str) else "pg.GRPO"
        raise ConfigError(f"algorithm must be an Algorithm, such as {example}, not {run.algorithm!r}")
    for key, part in run.algorithm.named_parts():
        if problem := frozen_problem(type(part), key):
            raise ConfigError(problem)
    if isinstance(run.reward, str):
        raise ConfigError(f"reward must be a tuple of names, reward=({run.reward!r},), not the text {run.reward!r}")
    check_field_types(run)


def _check_prompts(run: Run) -> None:
    """Refuse wrong options of the prompts' data and template."""
    parse_template_options(run.template_options)  # for its errors
    if run.decontaminate < 0:
        raise ConfigError(
            f"task.decontaminate is a number of words, at least 0 (0 = identical prompts only), not {run.decontaminate}"
        )


def _check_length(run: Run) -> None:
    """Refuse numbers of steps, prompts or tokens that are too small."""
    for name in ("steps", "prompts_per_step"):
        if getattr(run, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(run, name)}")
    if run.verify < 0:
        raise ConfigError(f"verify is a number of steps, at least 0 (0 = keep nothing), not {run.verify}")
    if run.tokens is not None and run.tokens < 1:
        raise ConfigError(f"tokens must be at least 1, not {run.tokens}; leave it out for no budget")


def _check_step_size(run: Run, samples: int) -> None:
    """Refuse a rollout without completions, with too many, or with too few prompts for the update rule's minibatches."""
    if samples < 1:
        raise ConfigError(f"samples_per_prompt must be at least 1, not {samples}")
    check_completion_count("prompts_per_step", run.prompts_per_step, "samples_per_prompt", samples)
    rule = run.algorithm.update_rule
    if run.minibatch_warning and "minibatches" not in {f.name for f in fields(rule)}:  # type: ignore[arg-type]
        raise ConfigError(
            f"{rule.minibatches} minibatches of whole groups need as many prompts per step, not {run.prompts_per_step}"
        )


def _check_max_staleness(run: Run) -> None:
    """Refuse rollouts ahead of the updates for a filter that needs the learner meanwhile."""
    if run.max_staleness < 0:
        raise ConfigError(f"max_staleness must be at least 0, not {run.max_staleness}")
    learner_fields = run.algorithm.filter_needs & LEARNER_FIELDS
    if run.max_staleness and learner_fields:
        raise ConfigError(
            f"a filter of {run.algorithm.name} reads {min(learner_fields)}, which the learner computes during a rollout, but with "
            f"max_staleness={run.max_staleness} it is updating then: set max_staleness to 0, or drop the filter"
        )


def _check_lr(run: Run) -> None:
    """Refuse a learning rate that is no rate, or that the update rule does not use."""
    check_lr(run.lr)
    rule = run.algorithm.update_rule
    if run.lr is not None and not rule.uses_lr:
        critic_lr = "; the critic's learning rate is algorithm.critic.lr" if run.algorithm.critic is not None else ""
        raise ConfigError(
            f"lr is {run.lr:g}, but {type(rule).__name__} has no learning rate: {explain_step_size(rule)}{critic_lr}. Leave lr out "
            "(--lr None)"
        )


def _check_step_end(run: Run) -> None:
    """Refuse a pattern of reasoning steps that is none, or that the algorithm does not read."""
    if run.step_end is None:
        return
    check_step_pattern(run.step_end)
    if "step_end" not in run.algorithm.all_needs:
        raise ConfigError(
            f"step_end is {run.step_end!r}, but no part of {run.algorithm.name} uses reasoning steps: leave it out"
        )
    if "token_reward" in run.algorithm.all_needs:
        raise ConfigError(
            f"step_end={run.step_end!r} marks where steps end, but {run.algorithm.name} also needs a reward for each: name a "
            "process reward instead, --reward exact_match mine.py:f with @reward(process=True)"
        )


def find_idle_settings(run: Run) -> tuple[str, ...]:
    """Return what can have no effect in this run, each with a remedy: schedules that it is too short for, and settings that
    differ from what is usual.

    A token budget may end a run even earlier, at a step that is not known in advance.
    """
    length = RunLength(run.steps, run.evaluation.every)
    updates = run.steps * run.algorithm.update_rule.updates
    return (
        *ask_parts(run.algorithm, "find_idle_schedules", length),
        *_find_idle_parts(run),
        *_find_idle_options(run),
        *run.sampler.find_idle(run.sampling),
        *run.optimizer.find_idle(updates),
        *run.learner.find_idle(),
        *run.guard.find_idle(run.steps),
        *run.evaluation.find_idle(run.steps),
        *run.checkpoint.find_idle(run.steps),
        *find_idle_tracking(run.track, run.trace_mib),
    )


def _find_idle_parts(run: Run) -> Iterator[str]:
    """Yield parts and settings of parts that were changed, and cannot act beside the others."""
    changes = name_run(run.algorithm, run.sampling.max_tokens)
    settings = dict[str, list[str]]()  # reason -> what it is about
    for change in changes.part_changes:
        role = name_role(change.field)
        for part in change.added:
            idle_here = list_idle(part, run.algorithm)
            if reason := idle_here.get(""):
                settings.setdefault(reason, []).append(f"the {role} {type(part).__name__}")
                continue
            for f in fields(part):
                value = getattr(part, f.name)
                if (reason := idle_here.get(f.name)) and value != f.default:
                    text = f"{type(part).__name__}.{f.name} = {format_setting(value)} of the {role}"
                    settings.setdefault(reason, []).append(text)
    for setting in changes.setting_changes:
        field, part = next(
            ((key.partition(".")[0], p) for key, p in run.algorithm.named_parts() if type(p).__name__ == setting.part),
            ("", None),
        )
        if part is not None and (reason := list_idle(part, run.algorithm).get(setting.name)):
            value = format_setting(setting.new_value)
            settings.setdefault(reason, []).append(f"{setting.part}.{setting.name} = {value} of the {name_role(field)}")
    for reason, idle in settings.items():
        yield from describe_idle(idle, reason)


def _find_idle_options(run: Run) -> Iterator[str]:
    """Yield options of no section that can have no effect, or another one than it seems."""
    if run.environment is None:
        reason = "the run has no environment. Name one, --environment, or leave this out"
        idle = list_changed("", run, ["environment_timeout", "environment_env"])
        yield from describe_idle([text.replace("environment_", "environment.") for text in idle], reason)
    own, samples = run.algorithm.samples_per_prompt, run.effective_samples_per_prompt
    if samples > 1 and samples != own and not any(part.uses_group_statistics for part in run.algorithm.parts()):
        yield (
            f"samples_per_prompt = {samples}: no part of {run.algorithm.name} compares the samples of a prompt, so that this is "
            f"only {run.prompts_per_step * samples} completions of {run.prompts_per_step} prompts. --samples-per-prompt 1 "
            f"--prompts-per-step {run.prompts_per_step * samples} has as many, each of another prompt"
        )
