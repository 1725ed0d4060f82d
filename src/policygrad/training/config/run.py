"""A run's configuration: frozen dataclasses, defaults < TOML file < flags. Nothing heavy is imported here."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Annotated, Any

import tyro

from policygrad.algorithms import DAPO
from policygrad.core.algorithm import Algorithm
from policygrad.core.trust_region import TrustRegion
from policygrad.core.validation import check_rollout, check_sampling, frozen_problem
from policygrad.environments.base import DEFAULT_TIMEOUT
from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.fsdp.controller import check_fsdp_options
from policygrad.models.lora_config import LORA_LR_FACTOR
from policygrad.rewards.builtin import check_step_pattern
from policygrad.rewards.config import RewardConfig
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.config import LOCAL, SamplerConfig
from policygrad.trackers.services import check_services

# What a run refuses of its options, alone and together, each with the way out.

MAX_LR = 1e6
"""Beyond what any optimiser here makes of a gradient; float32 overflows above 3e38, which no message of torch explains."""
MAX_COMPLETIONS = 2**24
"""Of one rollout or measurement: hundreds of times what anybody draws, and what a machine's memory still lists."""
LEARNER_FIELDS = {"logp_old", "logp_ref", "entropy", "values", "bootstrap", "grad_logp_sq_norm", "implicit_reward"}
"""Batch fields that a learner fills."""


def check_environment_timeout(seconds: float) -> None:
    """Raises ConfigError for what is no limit of an environment's calls."""
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"environment.timeout must be above 0 seconds and finite, not {seconds:g}; a long limit is 86400, a day"
        )


def check_run(run: Run) -> None:
    """Raises ConfigError for the first thing that is wrong."""
    _types(run)
    for name in ("steps", "prompts_per_step"):
        if getattr(run, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(run, name)}")
    if run.decontaminate < 0:
        raise ConfigError(
            f"task.decontaminate is a number of words, at least 0 (0 = equal prompts only), not {run.decontaminate}"
        )
    if run.tokens is not None and run.tokens < 1:
        raise ConfigError(f"tokens must be at least 1, or left out for no budget, not {run.tokens}")
    check_environment_timeout(run.environment_timeout)
    _staleness(run)
    if run.learner.routing_replay and run.sampler.engine != LOCAL:
        raise ConfigError(
            f"learner.routing_replay replays the experts that sampled, which {run.sampler.engine} does not tell: set it to "
            "false, or take --sampler.engine local"
        )
    check_fsdp_options(run.learner)
    check_lr(run.lr)
    check_seed(run.seed)
    check_folders(run.output, run.directory)
    check_services(run.track)
    check_sampling(run.algorithm, run.effective_samples_per_prompt, run.sampling.temperature)
    check_rollout(run.algorithm)
    if run.effective_samples_per_prompt < 1:
        raise ConfigError(f"samples_per_prompt must be at least 1, not {run.effective_samples_per_prompt}")
    check_completion_count(
        "prompts_per_step", run.prompts_per_step, "samples_per_prompt", run.effective_samples_per_prompt
    )
    check_completion_count(
        "evaluation.problems",
        run.evaluation.problems,
        "evaluation.samples_per_prompt",
        run.evaluation.samples_per_prompt,
    )
    if run.sampling.temperature == 0:
        raise ConfigError(
            "temperature 0 leaves nothing to learn from, all samples are equal: set --temperature above 0"
        )
    if run.sampling.is_truncated:
        raise ConfigError(
            "training with top_p < 1 or top_k > 0 would sample from another distribution than the one that learns: the "
            "ratio of an unchanged policy would not be 1. Leave top_p = 1 and top_k = 0 (eval takes both)"
        )
    if run.learner.score_parameters and "grad_logp_sq_norm" not in run.algorithm.needs:
        raise ConfigError(
            f"learner.score_parameters is {run.learner.score_parameters!r}, and no part of {run.algorithm.name} reads score "
            "norms: put OptimalBaseline(norm='exact') into psi, or leave it empty"
        )
    _rate(run)
    _check_steps(run)
    _stall(run)
    if run.minibatch_warning and "minibatches" not in {f.name for f in fields(run.algorithm.update_rule)}:  # type: ignore[arg-type]
        raise ConfigError(
            f"{run.algorithm.update_rule.minibatches} minibatches of whole groups need as many prompts per step, not "
            f"{run.prompts_per_step}"
        )


def check_lr(lr: float | None) -> None:
    """Raises ConfigError for what is no learning rate; one beyond `MAX_LR` only overflows in the optimiser."""
    if lr is None:
        return
    if not 0 <= lr < math.inf:
        raise ConfigError(f"lr must be at least 0 and finite, not {lr}")
    if lr > MAX_LR:
        raise ConfigError(f"lr must be at most {MAX_LR:g}, not {lr:g}")


def check_completion_count(prompts: str, count: int, samples: str, each: int) -> None:
    """Raises ConfigError for more completions at once than `MAX_COMPLETIONS`; the options' names are given."""
    if count * each > MAX_COMPLETIONS:
        raise ConfigError(
            f"{prompts} {count} times {samples} {each} must be at most {MAX_COMPLETIONS:,} completions: lower one of them"
        )


def check_folders(output: str | None, directory: str | None = None) -> None:
    """Raises ConfigError for an output that is empty, as of a variable that was not set: it would be the current folder. And for
    what no file system takes as a name."""
    if output is not None and not str(output).strip():
        raise ConfigError(
            f"output must name a folder, not {output!r}: leave it out for the next free one, or say . for this one"
        )
    for option, name in (("output", output), ("directory", directory)):
        if name is not None and not _is_name(str(name)):
            raise ConfigError(f"{option} must name a folder, not {name!r}, which no file system takes")


def _is_name(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeError:  # half a surrogate pair
        return False


def check_seed(seed: int) -> None:
    """Raises ConfigError for a seed that torch or a counter-based generator does not take."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be at least 0 and below 2**63, not {seed}")


def _staleness(run: Run) -> None:
    """A rollout drawn during an update cannot ask the weights that are being updated."""
    if run.max_staleness < 0:
        raise ConfigError(f"staleness must be at least 0, not {run.max_staleness}")
    asked = run.algorithm.filter_needs & LEARNER_FIELDS
    if run.max_staleness and asked:
        raise ConfigError(
            f"a filter of {run.algorithm.name} reads {min(asked)}, for which the learner is asked in the midst of a rollout, and "
            f"with staleness {run.max_staleness} it is updating then: set staleness to 0, or drop the filter"
        )


def _stall(run: Run) -> None:
    """A reference that waits for held-out scores which nobody takes."""
    reference, measured = run.algorithm.reference, run.evaluation.every and run.evaluation.problems
    if reference is not None and reference.refresh_after_stall and not measured:
        raise ConfigError(
            f"Reference.refresh_after_stall = {reference.refresh_after_stall} counts periodic held-out evaluations without improvement, and this run "
            "makes none: set evaluation.every (and evaluation.problems) above 0, or stall to 0"
        )


def _rate(run: Run) -> None:
    """Options of a gradient step, where the algorithm's takes none."""
    step, critic = run.algorithm.update_rule, run.algorithm.critic
    if step.uses_lr:
        return
    if run.guard.action == "rollback":
        raise ConfigError(
            f"guard.action rollback lowers the learning rate, and {type(step).__name__} has none: take skip, stop or warn"
        )
    way_out = (
        "algorithm.update_rule.delta, in nats a token, sets how far it goes"
        if isinstance(step, TrustRegion)
        else "it has none"
    )
    if run.lr is not None:
        own = "; the critic's own rate is algorithm.critic.lr" if critic is not None else ""
        raise ConfigError(
            f"lr is {run.lr:g}, and {type(step).__name__} has no learning rate: {way_out}{own}. Leave lr out (--lr None)"
        )
    if critic is None and run.optimizer != OptimizerConfig():
        raise ConfigError(
            f"optimizer.* shapes AdamW's steps, {type(step).__name__} takes none and there is no critic: {way_out}. "
            "Leave the optimizer's options out"
        )


def _check_steps(run: Run) -> None:
    """`step_end` says where steps end, not what they are worth."""
    if run.step_end is None:
        return
    check_step_pattern(run.step_end)
    name, read = run.algorithm.name, run.algorithm.all_needs
    if "step_end" not in read:
        raise ConfigError(f"step_end is {run.step_end!r}, and no part of {name} looks at steps: leave it away")
    if "token_reward" in read:
        raise ConfigError(
            f"step_end {run.step_end!r} says where steps end, and {name} needs to know what they are worth: name a process "
            "reward instead, --reward exact_match mine.py:f with @reward(process=True)"
        )


def _types(run: Run) -> None:
    """From Python it is easy to give a name where an object or several names belong."""
    if not isinstance(run.algorithm, Algorithm):
        way_out = f"pg.get_algorithm({run.algorithm!r})" if isinstance(run.algorithm, str) else "pg.GRPO"
        raise ConfigError(f"algorithm must be an Algorithm, such as {way_out}, not {run.algorithm!r}")
    for place, part in run.algorithm.parts():
        if problem := frozen_problem(type(part), place):
            raise ConfigError(problem)
    if isinstance(run.reward, str):
        raise ConfigError(f"reward must be a tuple of names, reward=({run.reward!r},), not the text {run.reward!r}")


# When a step is taken for a divergence, and what is done about it: data only.

GUARD_ACTIONS = ("warn", "skip", "rollback", "stop")


@dataclass(frozen=True)
class GuardConfig:
    """A step's entropy, KL and gradient norm are compared with the median of the steps before it."""

    action: str = "warn"
    """At a spike: warn; skip (undo the step's updates); rollback (to the last checkpoint, at a lower rate); stop, resumably."""
    window: int = 8
    """Steps that a step is compared with; with fewer behind it none is a spike."""
    grad_norm: float = 10.0
    """A gradient norm above so many times the median, and above 1, is a spike; 0 = none is."""
    kl: float = 10.0
    """Likewise a KL to the reference or to the old policy, above 0.1 nats."""
    entropy: float = 3.0
    """An entropy so many times above the median (and above 1 nat) or below it (from 0.3 nats) is a spike; 0 = none is."""
    lr_factor: float = 0.5
    """A rollback multiplies the learning rate by this."""
    max_consecutive_alarms: int = 8
    """Steps in a row, undone or without any spread of rewards, that stop the run where the action is not warn; 0 = never."""

    def __post_init__(self) -> None:
        _check(self, "grad_norm", "kl", "entropy")


@dataclass(frozen=True)
class SupervisedGuardConfig:
    """Of a training on rows with their answers: a step's loss and gradient norm are compared with the median of those before it."""

    action: str = "warn"
    """At a spike: warn; skip (undo the step); rollback (to the last checkpoint, at a lower rate); stop, resumably."""
    window: int = 8
    """Steps that a step is compared with; with fewer behind it none is a spike."""
    grad_norm: float = 10.0
    """A gradient norm above so many times the median, and above 1, is a spike; 0 = none is."""
    loss: float = 3.0
    """Likewise a loss, above 1 nat."""
    lr_factor: float = 0.5
    """A rollback multiplies the learning rate by this."""
    max_consecutive_alarms: int = 8
    """Steps in a row, undone, that stop the run where the action is not warn; 0 = never."""

    def __post_init__(self) -> None:
        _check(self, "grad_norm", "loss")


def _check(guard: GuardConfig | SupervisedGuardConfig, *factors: str) -> None:
    """Raises ConfigError for what makes no sense."""
    if guard.action not in GUARD_ACTIONS:
        raise ConfigError(f"guard.action must be one of {', '.join(GUARD_ACTIONS)}, not {guard.action!r}")
    if guard.window < 2 or guard.max_consecutive_alarms < 0:
        raise ConfigError(
            "guard.window must be at least 2 and guard.max_consecutive_alarms at least 0 (0 = never), not "
            f"{guard.window}, {guard.max_consecutive_alarms}"
        )
    for name in factors:
        value = getattr(guard, name)
        if not (value == 0 or value > 1):
            raise ConfigError(f"guard.{name} must be above 1, or 0 to look away, not {value}")
    if not 0 < guard.lr_factor < 1:
        raise ConfigError(f"guard.lr_factor must be above 0 and below 1, not {guard.lr_factor}")


# How an option that is left open, or may be an object, shows in the help.


def optional_arg(metavar: str, words: str) -> Any:
    """For an option that may be left open: its help names what is then taken, in words."""

    def hint(default: str) -> str:
        return f"(default: {words if default in ('None', '') else default})"

    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


def named_arg(metavar: str, kind: Any, words: str = "") -> Any:
    """For what has a name on the command line and may be an object in Python."""

    def hint(default: str) -> str:
        known = default.strip("[]'")
        return f"(default: {words if known in ('None', '') else known})"

    return tyro.conf.arg(metavar=metavar, constructor=kind, help_behavior_hint=hint)


OBJECT_PREFIX = "object:"
"""Begins what stands in a file for an object that was given in Python."""
TINY_MODEL_LR, DEFAULT_LR = 1e-3, 1e-6
"""Default learning rates: of the embedded model of 0.7M parameters, over √K for K updates a rollout, and of models of the size
people post-train."""


@dataclass(frozen=True)
class EvaluationConfig:
    """How a run is measured, on held-out problems at the sampling temperature."""

    problems: int = 256
    """Held-out problems; 0 = no evaluation."""
    samples_per_prompt: int = 8
    """Completions per problem."""
    every: int = 0
    """Also evaluate every so many steps; 0 = before and after only."""

    def __post_init__(self) -> None:
        if self.problems < 0 or self.every < 0 or self.samples_per_prompt < 1:
            raise ConfigError(
                "evaluation.problems and evaluation.every must be at least 0 and evaluation.samples_per_prompt at least 1, not "
                f"{self.problems}, {self.every}, {self.samples_per_prompt}"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run can be taken up again."""

    every: int = 25
    """Steps between checkpoints; one is always written at the end and at --stop-after."""
    keep: int = 2
    """How many checkpoints stay on disk; one that a stop has left in between goes first."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ConfigError(
                f"checkpoint.every and checkpoint.keep must be at least 1, not {self.every} and {self.keep}"
            )


@dataclass(frozen=True)
class RunOptions:
    """All that a run needs to know besides its algorithm."""

    model: Annotated[Any, named_arg("ID|DIR", str)] = "tiny"
    """Directory or hub id of a causal language model; tiny = the base model inside the package. From Python also a model."""
    tokenizer: Annotated[Any, named_arg("ID|DIR", str, "the model's own")] = None
    """Directory or hub id of another tokenizer than the model's. From Python also a tokenizer."""
    trust_remote_code: bool = False
    """Let Python code in the folder or repository of model, tokenizer and reference run; without it such a model is refused."""
    task: Annotated[Any, named_arg("NAME|FILE", str)] = "embedded"
    """Where prompts come from: embedded, a reasoning-gym name (gcd+2*chain_sum:max_terms=3), or data.
    With levels of difficulty: curriculum:NAME. A taskset of verifiers: verifiers:ID.
    Data is a .jsonl, .jsonl.gz, .parquet or .arrow file, a folder of `load_dataset_table`, or hf:REPOSITORY[:CONFIG[:SPLIT]].
    Several are mixed by weight: 0.7*a.jsonl+0.3*b.jsonl.
    From Python also rows, each a dict with `prompt`."""
    row_map: Annotated[Any, named_arg("FILE:NAME", str, "none")] = None
    """A function that is given each row of the data, a dict, and returns the row to use, or None to leave it out: mine.py:f."""
    skip_bad_rows: Annotated[bool, tyro.conf.arg(name="task.skip-bad-rows")] = False
    """Leave out rows that cannot be used, and say how many; without it the first is refused, with file and line."""
    decontaminate: Annotated[int, tyro.conf.arg(name="task.decontaminate")] = 0
    """Leave out of training, and count, rows with so many words in a row of a held-out prompt (8 to 13).
    0 = only those whose prompt is held out itself."""
    reward: Annotated[tuple[Any, ...], named_arg("NAME", tuple[str, ...], "the task's own")] = ()
    """Reward functions: names, dotted paths, path/to/file.py:function, or model:DIR for a reward model.
    Each may have a weight, bounds and gates (0.5*math within 0..1 if format)."""
    environment: Annotated[Any, named_arg("FILE:NAME", str, "the prompt and one answer")] = None
    """What episodes take place in: calculator, or a class or ToolUse of your own, mine.py:NAME.
    Others': gymnasium:ID, textarena:GAME, openenv:http://host:port, verifiers:ID.
    Without --reward its own rewards are all there is. From Python also the object."""
    environment_timeout: Annotated[float, tyro.conf.arg(name="environment.timeout")] = DEFAULT_TIMEOUT
    """Seconds that one reset, step or close of the environment may take; what takes longer costs its episode.
    What has not been over a single time after four such calls ends the run, resumably."""
    step_end: Annotated[str | None, optional_arg("REGEX", "the task's own")] = None
    """Where a step ends, for an algorithm that only asks where (VinePPO): at the end of every match, '\\n' = at every line."""
    eval_data: Annotated[Any, named_arg("FILE", str, "a sixteenth of the task, chosen by a hash of the prompt")] = None
    """Data of held-out problems, one or a mix, for a task that is data. From Python also rows."""
    steps: int = 16
    """Rollouts, each followed by the algorithm's updates."""
    max_staleness: int = 0
    """Steps by which samples may be behind the weights.
    Above 0 a later rollout is drawn while these are updated, and what that changes is corrected for."""
    tokens: Annotated[int | None, optional_arg("INT", "no budget")] = None
    """End earlier, after the step in which so many tokens have been sampled; a learning-rate schedule still counts steps."""
    prompts_per_step: int = 64
    """Prompts per rollout."""
    samples_per_prompt: Annotated[int | None, optional_arg("INT", "the algorithm's own")] = None
    """G, completions per prompt."""
    lr: Annotated[
        float | None,
        optional_arg(
            "FLOAT",
            f"{TINY_MODEL_LR:g}/√K for the tiny model, K updates a rollout; {DEFAULT_LR:g} for any other, of adapters {DEFAULT_LR * LORA_LR_FACTOR:g}",
        ),
    ] = None
    """Peak learning rate."""
    seed: int = 0
    """Of everything drawn at random."""
    output: Annotated[str | None, optional_arg("DIR", "the next free runs/ALGORITHM-N")] = None
    """The run's folder."""
    directory: Annotated[str | None, optional_arg("DIR", "the current folder")] = None
    """Where relative names of files and folders begin; what is not there is looked for in the current folder.
    A run's own file says it, so that a run goes on from anywhere."""
    sampling: Annotated[SamplingParams, tyro.conf.arg(name="")] = field(default_factory=SamplingParams)
    """The policy as it is sampled."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """What draws completions."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW, schedule, clipping."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Precision, device, memory."""
    rewards: RewardConfig = field(default_factory=RewardConfig)
    """The reward workers."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Held-out accuracy."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Against divergence."""
    track: Annotated[tuple[str, ...], optional_arg("NAME", "none")] = ()
    """Services that follow the run too: wandb, tensorboard, trackio, mlflow. Each is an extra."""


@dataclass(frozen=True)
class UncheckedRun(RunOptions):
    """Options and algorithm, not yet checked against each other: a file or flags may still change either."""

    algorithm: Algorithm = DAPO
    """The method: one equation's parts."""


@dataclass(frozen=True)
class Run(UncheckedRun):
    """One training run; `run.toml` in its folder holds it whole.

    Raises:
        ConfigError: options that contradict each other, with the reason and the way out.
    """

    def __post_init__(self) -> None:
        check_run(self)

    @property
    def minibatch_warning(self) -> str:
        """What is to be said where a rollout has fewer prompts than its algorithm has minibatches, which are of whole groups;
        empty where it has enough."""
        wanted, prompts = self.algorithm.update_rule.minibatches, self.prompts_per_step
        if wanted <= prompts:
            return ""
        return (
            f"{self.algorithm.name} splits a rollout into {wanted} minibatches of whole groups, and {prompts} prompts a step make "
            f"{prompts}, with one prompt each: raise prompts_per_step to {wanted} for its own number of updates"
        )

    @property
    def object_options(self) -> tuple[str, ...]:
        """The options that are given as objects, which a file cannot hold: such a run goes on from Python only."""
        names = ("model", "tokenizer", "task", "map", "environment", "eval/reward")
        found = tuple(n for n in names if not isinstance(getattr(self, n), str | NoneType))
        return found + (() if all(isinstance(reward, str) for reward in self.reward) else ("reward",))

    def describe_option(self, option: str) -> str:
        """An option for people: its name, or its object's class."""
        value = getattr(self, option)
        return value if isinstance(value, str) else f"{type(value).__name__} object"

    def without_objects(self) -> Run:
        """The same with a word in the place of every object, for files and trackers."""

        def word(value: Any) -> Any:
            return (
                value
                if isinstance(value, str)
                else OBJECT_PREFIX + str(getattr(value, "__name__", type(value).__name__))
            )

        changes: dict[str, Any] = {name: word(getattr(self, name)) for name in self.object_options if name != "reward"}
        return replace(self, **changes, reward=tuple(map(word, self.reward)))

    @property
    def effective_samples_per_prompt(self) -> int:
        """G."""
        return self.algorithm.samples_per_prompt if self.samples_per_prompt is None else self.samples_per_prompt

    @property
    def publishes_sharded(self) -> bool:
        """Whether no process has the policy as a whole once training has begun: several learn, and engines draw."""
        return self.learner.world_size > 1 and self.sampler.engine != LOCAL

    def rollouts_ahead(self, step: int) -> int:
        """Rollouts that are drawn before `step` begins."""
        return max(0, min(self.max_staleness, self.steps - step + 1))

    def resolve(self) -> Run:
        """With every open choice filled in: group size, learning rate, precision, the generation budget in the parts that ask for
        it, and no more minibatches than a rollout has prompts."""
        algorithm = replace(
            self.algorithm.with_max_tokens(self.sampling.max_tokens),
            samples_per_prompt=self.effective_samples_per_prompt,
        )
        if self.minibatch_warning:
            rule = replace(algorithm.update_rule, minibatches=self.prompts_per_step)  # type: ignore[type-var]
            algorithm = replace(algorithm, update_rule=rule)
        step = algorithm.update_rule
        updates = step.updates if step.uses_lr else step.critic_updates
        usual = (
            TINY_MODEL_LR / updates**0.5
            if isinstance(self.model, str) and self.model == "tiny"
            else DEFAULT_LR * self.learner.lora_lr_multiplier
        )
        if (
            algorithm.critic is not None and not algorithm.update_rule.uses_lr
        ):  # there is no policy's rate for it to follow
            algorithm = replace(algorithm, critic=replace(algorithm.critic, lr=algorithm.critic.learning_rate(usual)))
        default = usual if algorithm.update_rule.uses_lr else None
        lr = default if self.lr is None else self.lr
        learner = self.learner.resolve()
        return replace(
            self, algorithm=algorithm, samples_per_prompt=self.effective_samples_per_prompt, lr=lr, learner=learner
        )


# What is to happen in the course of a run, and cannot before its end.


def describe_idle_schedules(run: Run) -> tuple[str, ...]:
    """For people: each schedule of the algorithm, and the watch over processes, that never acts in this run, with the way out.

    A token budget may end a run earlier still; when is not known before.
    """
    return (*_reference(run), *_critic(run), *_watch(run))


def _reference(run: Run) -> Iterator[str]:
    """What is taken anew after the last step is never compared with."""
    reference, steps, evaluated = run.algorithm.reference, run.steps, run.evaluation.every
    if reference is None:
        return
    if reference.refresh_every is not None and reference.refresh_every >= steps:
        less = f", or --algorithm.reference.refresh-every at {max(1, steps // 4)}, say" if steps > 1 else ""
        yield (
            f"Reference.refresh_every = {reference.refresh_every} never acts in this run of {_format_steps(steps)}: π_ref stays the initial "
            f"policy. Set --steps above {reference.refresh_every}{less}"
        )
    first = (
        evaluated * ((reference.refresh_after_stall or 0) + 1) + 1
    )  # the best score, `stall` that do not exceed it, and a rollout
    if reference.refresh_after_stall is not None and first >= steps:
        less = ", or a smaller --evaluation.every" if evaluated > 1 else ""
        yield (
            f"Reference.refresh_after_stall = {reference.refresh_after_stall} never acts in this run of {_format_steps(steps)}: with an evaluation every "
            f"{_format_steps(evaluated)} π_ref is taken anew after step {first} at the earliest. Set --steps above {first}{less}"
        )


def _critic(run: Run) -> Iterator[str]:
    critic = run.algorithm.critic
    if critic is not None and critic.pretrain >= run.steps:
        yield (
            f"Critic.pretrain = {critic.pretrain} may take the whole of this run of {_format_steps(run.steps)}: until the values "
            f"explain {critic.pretrain_until:.0%} of the returns' variance the policy stands still. Set --steps above "
            f"{critic.pretrain}, or a smaller --algorithm.critic.pretrain"
        )


def _watch(run: Run) -> Iterator[str]:
    if run.learner.world_size == 1 and run.learner.hang_timeout != LearnerConfig().hang_timeout:
        yield "learner.hang_timeout is for several processes, and one process learns: leave it out, or set --learner.world-size"


def _format_steps(n: int) -> str:
    return f"{n} step{'s' * (n > 1)}"
