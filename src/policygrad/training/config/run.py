"""A run's configuration: frozen dataclasses, defaults < TOML file < flags. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Annotated, Any

import tyro

from policygrad.algorithms import DAPO
from policygrad.core.algorithm import Algorithm
from policygrad.environments.base import TIMEOUT
from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.models.lora import RATE
from policygrad.rewards.config import Rewarding
from policygrad.samplers.base import Sampling
from policygrad.samplers.config import LOCAL, SamplerConfig
from policygrad.training.config.checks import check
from policygrad.training.config.guard import Guard
from policygrad.training.config.hints import named as named
from policygrad.training.config.hints import optional as optional

OBJECT = "object:"
"""Begins what stands in a file for an object that was given in Python."""
LR_TINY, LR = 1e-3, 1e-6
"""Default learning rates: of the embedded model of 0.7M parameters, over √K for K updates a rollout, and of models of the size
people post-train."""


@dataclass(frozen=True)
class Evaluation:
    """How a run is measured, on held-out problems at the sampling temperature."""

    problems: int = 256
    """Held-out problems; 0 = no evaluation."""
    samples: int = 8
    """Completions per problem."""
    every: int = 0
    """Also evaluate every so many steps; 0 = before and after only."""

    def __post_init__(self) -> None:
        if self.problems < 0 or self.every < 0 or self.samples < 1:
            raise ConfigError(
                "evaluation.problems and evaluation.every must be at least 0 and evaluation.samples at least 1, not "
                f"{self.problems}, {self.every}, {self.samples}"
            )


@dataclass(frozen=True)
class Checkpointing:
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
class Options:
    """All that a run needs to know besides its algorithm."""

    model: Annotated[Any, named("ID|DIR", str)] = "tiny"
    """Directory or hub id of a causal language model; tiny = the base model inside the package. From Python also a model."""
    tokenizer: Annotated[Any, named("ID|DIR", str, "the model's own")] = None
    """Directory or hub id of another tokenizer than the model's. From Python also a tokenizer."""
    trust_remote_code: bool = False
    """Let Python code in the folder or repository of model, tokenizer and reference run; without it such a model is refused."""
    task: Annotated[Any, named("NAME|FILE", str)] = "embedded"
    """Where prompts come from: embedded, a reasoning-gym name (gcd+2*chain_sum:max_terms=3), or data.
    With levels of difficulty: curriculum:NAME. A taskset of verifiers: verifiers:ID.
    Data is a .jsonl, .jsonl.gz, .parquet or .arrow file, a folder of `datasets`, or hf:REPOSITORY[:CONFIG[:SPLIT]].
    Several are mixed by weight: 0.7*a.jsonl+0.3*b.jsonl.
    From Python also rows, each a dict with `prompt`."""
    map: Annotated[Any, named("FILE:NAME", str, "none")] = None
    """A function that is given each row of the data, a dict, and returns the row to use, or None to leave it out: mine.py:f."""
    skip_bad_rows: Annotated[bool, tyro.conf.arg(name="task.skip-bad-rows")] = False
    """Leave out rows that cannot be used, and say how many; without it the first is refused, with file and line."""
    decontaminate: Annotated[int, tyro.conf.arg(name="task.decontaminate")] = 0
    """Leave out of training, and count, rows with so many words in a row of a held-out prompt (8 to 13).
    0 = only those whose prompt is held out itself."""
    reward: Annotated[tuple[Any, ...], named("NAME", tuple[str, ...], "the task's own")] = ()
    """Reward functions: names, dotted paths, path/to/file.py:function, or model:DIR for a reward model.
    Each may have a weight, bounds and gates (0.5*math within 0..1 if format)."""
    environment: Annotated[Any, named("FILE:NAME", str, "the prompt and one answer")] = None
    """What episodes take place in: calculator, or a class or ToolUse of your own, mine.py:NAME.
    Others': gymnasium:ID, textarena:GAME, openenv:http://host:port, verifiers:ID.
    Without --reward its own rewards are all there is. From Python also the object."""
    environment_timeout: Annotated[float, tyro.conf.arg(name="environment.timeout")] = TIMEOUT
    """Seconds that one reset, step or close of the environment may take; what takes longer costs its episode.
    What has not been over a single time after four such calls ends the run, resumably."""
    step_end: Annotated[str | None, optional("REGEX", "the task's own")] = None
    """Where a step ends, for an algorithm that only asks where (VinePPO): at the end of every match, '\\n' = at every line."""
    held_out: Annotated[Any, named("FILE", str, "a sixteenth of the task, chosen by a hash of the prompt")] = None
    """Data of held-out problems, one or a mix, for a task that is data. From Python also rows."""
    steps: int = 16
    """Rollouts, each followed by the algorithm's updates."""
    staleness: int = 0
    """Steps by which samples may be behind the weights.
    Above 0 a later rollout is drawn while these are updated, and what that changes is corrected for."""
    tokens: Annotated[int | None, optional("INT", "no budget")] = None
    """End earlier, after the step in which so many tokens have been sampled; a learning-rate schedule still counts steps."""
    prompts_per_step: int = 64
    """Prompts per rollout."""
    samples_per_prompt: Annotated[int | None, optional("INT", "the algorithm's own")] = None
    """G, completions per prompt."""
    lr: Annotated[
        float | None,
        optional(
            "FLOAT",
            f"{LR_TINY:g}/√K for the tiny model, K updates a rollout; {LR:g} for any other, of adapters {LR * RATE:g}",
        ),
    ] = None
    """Peak learning rate."""
    seed: int = 0
    """Of everything drawn at random."""
    output: Annotated[str | None, optional("DIR", "the next free runs/ALGORITHM-N")] = None
    """The run's folder."""
    directory: Annotated[str | None, optional("DIR", "the current folder")] = None
    """Where relative names of files and folders begin; what is not there is looked for in the current folder.
    A run's own file says it, so that a run goes on from anywhere."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """The policy as it is sampled."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """What draws completions."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW, schedule, clipping."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Precision, device, memory."""
    rewards: Rewarding = field(default_factory=Rewarding)
    """The reward workers."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """Held-out accuracy."""
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    """Checkpoints."""
    guard: Guard = field(default_factory=Guard)
    """Against divergence."""
    track: Annotated[tuple[str, ...], optional("NAME", "none")] = ()
    """Services that follow the run too: wandb, tensorboard, trackio, mlflow. Each is an extra."""


@dataclass(frozen=True)
class Draft(Options):
    """Options and algorithm, not yet checked against each other: a file or flags may still change either."""

    algorithm: Algorithm = DAPO
    """The method: one equation's parts."""


@dataclass(frozen=True)
class Run(Draft):
    """One training run; `run.toml` in its folder holds it whole.

    Raises:
        ConfigError: options that contradict each other, with the reason and the way out.
    """

    def __post_init__(self) -> None:
        check(self)

    @property
    def few_prompts(self) -> str:
        """What is to be said where a rollout has fewer prompts than its algorithm has minibatches, which are of whole groups;
        empty where it has enough."""
        wanted, prompts = self.algorithm.step.minibatches, self.prompts_per_step
        if wanted <= prompts:
            return ""
        return (
            f"{self.algorithm.name} splits a rollout into {wanted} minibatches of whole groups, and {prompts} prompts a step make "
            f"{prompts}, with one prompt each: raise prompts_per_step to {wanted} for its own number of updates"
        )

    @property
    def objects(self) -> tuple[str, ...]:
        """The options that are given as objects, which a file cannot hold: such a run goes on from Python only."""
        names = ("model", "tokenizer", "task", "map", "environment", "held_out")
        found = tuple(n for n in names if not isinstance(getattr(self, n), str | NoneType))
        return found + (() if all(isinstance(reward, str) for reward in self.reward) else ("reward",))

    def named(self, option: str) -> str:
        """An option for people: its name, or its object's class."""
        value = getattr(self, option)
        return value if isinstance(value, str) else f"{type(value).__name__} object"

    def without_objects(self) -> Run:
        """The same with a word in the place of every object, for files and trackers."""

        def word(value: Any) -> Any:
            return value if isinstance(value, str) else OBJECT + str(getattr(value, "__name__", type(value).__name__))

        changes: dict[str, Any] = {name: word(getattr(self, name)) for name in self.objects if name != "reward"}
        return replace(self, **changes, reward=tuple(map(word, self.reward)))

    @property
    def group_size(self) -> int:
        """G."""
        return self.algorithm.samples_per_prompt if self.samples_per_prompt is None else self.samples_per_prompt

    @property
    def streams(self) -> bool:
        """Whether no process has the policy as a whole once training has begun: several learn, and engines draw."""
        return self.learner.ranks > 1 and self.sampler.engine != LOCAL

    def ahead(self, step: int) -> int:
        """Rollouts that are drawn before `step` begins."""
        return max(0, min(self.staleness, self.steps - step + 1))

    def resolved(self) -> Run:
        """With every open choice filled in: group size, learning rate, precision, the generation budget in the parts that ask for
        it, and no more minibatches than a rollout has prompts."""
        algorithm = replace(self.algorithm.with_budget(self.sampling.max_tokens), samples_per_prompt=self.group_size)
        if self.few_prompts:
            algorithm = replace(algorithm, step=replace(algorithm.step, minibatches=self.prompts_per_step))  # type: ignore[type-var]
        step = algorithm.step
        updates = step.updates if step.uses_lr else step.value_updates
        usual = (
            LR_TINY / updates**0.5 if isinstance(self.model, str) and self.model == "tiny" else LR * self.learner.rate
        )
        if algorithm.critic is not None and not algorithm.step.uses_lr:  # there is no policy's rate for it to follow
            algorithm = replace(algorithm, critic=replace(algorithm.critic, lr=algorithm.critic.rate(usual)))
        default = usual if algorithm.step.uses_lr else None
        lr = default if self.lr is None else self.lr
        learner = self.learner.resolved()
        return replace(self, algorithm=algorithm, samples_per_prompt=self.group_size, lr=lr, learner=learner)
