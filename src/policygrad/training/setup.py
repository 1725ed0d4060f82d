"""What a run or an evaluation stands on: task, model, tokenizer, rewards, sampler, each refused with the way out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from policygrad.checkpoint.format import Checkpoint
from policygrad.environments import EnvironmentFactory, SingleTurn
from policygrad.environments.base import DEFAULT_TIMEOUT
from policygrad.environments.registry import resolve_environment
from policygrad.errors import ConfigError, ModelError, RunError
from policygrad.learners.base import Learner, LearnerSpec
from policygrad.learners.fsdp.torchrun import check_not_torchrun
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.adapters import adapter_configs, add_adapters
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora
from policygrad.models.moe_routing import Routing
from policygrad.models.replica import clone_model, load_reference
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rewards import Reward, RewardPool, resolve_reward
from policygrad.rewards.builtin import StepEnd
from policygrad.rewards.config import RewardConfig
from policygrad.rewards.workers.pool import RewardScorer
from policygrad.rollout.demonstrations import DEMONSTRATION_COLUMN, DEMONSTRATION_HINT, check_demonstrations
from policygrad.rollout.rollouter import Rollouter
from policygrad.rollout.scoring import zero_rewards
from policygrad.samplers.base import AsyncCloseable, Sampler
from policygrad.samplers.config import LOCAL
from policygrad.samplers.engines.registry import WEIGHTS_FOLDER, make_engine_factory
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.tasks import load_task
from policygrad.tasks.base import Task
from policygrad.tasks.rows import RowOptions
from policygrad.training.config.paths import resolve_paths, resolve_rewards
from policygrad.training.config.run import Run
from policygrad.utils.async_runner import AsyncRunner
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.utils.user_code import load_object

if TYPE_CHECKING:
    from policygrad.learners.fsdp.processes import WorkerLauncher


# How a run reads its data: the map it names, loaded.


def load_row_options(map: Any, skip_bad_rows: bool, decontaminate: int = 0) -> RowOptions:
    """With a function, or the one that is so called.

    Raises:
        ConfigError: no such file or function, or what is none.
    """
    found = load_object(map, "--row-map") if isinstance(map, str) else map
    if found is not None and not callable(found):
        raise ConfigError(
            f"--row-map {map} is no function: give one that takes a row, a dict, and returns a row or None"
        )
    return RowOptions(found, skip_bad_rows, decontaminate)


# Who does a run's work where that is not this process and those that it starts: the actors of a cluster, say.


@dataclass(frozen=True)
class Placement:
    """What is None is done here. None of it is part of the run: where work is done changes nothing that comes of it."""

    sampler: Callable[[nn.Module, Tokenizer], Sampler] | None = None
    """Makes what draws completions, in the place of this process; not that of an engine."""
    reward_pool: Callable[[Sequence[Reward], RewardConfig, ProgressCallback], RewardScorer] | None = None
    """Makes what judges."""
    environment: Callable[[EnvironmentFactory], EnvironmentFactory] | None = None
    """From what makes a run's environments to what makes them elsewhere."""
    learner_processes: WorkerLauncher | None = None
    """Where the processes that learn together are."""
    cli_flags: str = ""
    """The options that have a command do it there."""


LOCAL_PLACEMENT = Placement()


PROBE_EXAMPLES = 64
"""Examples of a task that makes them, of which one must have what the algorithm learns from."""
SamplerFactory = Callable[[nn.Module, Tokenizer], Sampler]
"""From the run's model and tokenizer to what samples: an engine, or a wrapper around one."""


@dataclass(frozen=True)
class Needed:
    """What is to be loaded, by name or as an object."""

    model: Any
    task: Any
    max_tokens: int
    tokenizer: Any = None
    reward: tuple[Any, ...] = ()
    needs: frozenset[str] | None = None
    """The Batch fields an algorithm reads; None = an evaluation."""
    reads_reward: bool = True
    """Whether there must be a reward."""
    step_end: str | None = None
    """A pattern that ends a reasoning step."""
    held_out: Any = None
    seed: int = 0
    dtype: str = "fp32"
    device: str = "auto"
    rewards: RewardConfig = field(default_factory=RewardConfig)
    phase: ProgressCallback = ignore_progress
    """Is told what rewards, servers or environments are waited for."""
    sampler: Sampler | SamplerFactory | None = None
    environment: EnvironmentFactory | None = None
    environment_timeout: float = DEFAULT_TIMEOUT
    routing_replay: bool = False
    engine: SamplerFactory | None = None
    """What makes the sampler that the configuration names; None = this process."""
    apart: bool = False
    """Whether sampling goes on while the weights change, so that it has its own."""
    trust_remote_code: bool = False
    lora: Lora | None = None
    """Adapters to train."""
    map: Any = None
    """What is made of each row of data, by name or a function."""
    skip_bad_rows: bool = False
    decontaminate: int = 0
    """Words in a row that a training prompt may not share with a held-out one."""
    pool: Callable[[Sequence[Reward], RewardConfig, ProgressCallback], RewardScorer] | None = None
    """Makes what judges; None = workers of this process."""


@dataclass(frozen=True, eq=False)
class Resources:
    """Everything loaded."""

    task: Task
    reward_names: tuple[str, ...]
    """In words."""
    model: nn.Module
    tokenizer: Tokenizer
    rollouter: Rollouter
    has_rewards: bool = True
    """Whether answers are worth anything; False = only a teacher grades them."""


def load_resources(stack: ExitStack, needed: Needed) -> Resources:
    """The reward workers, and the loop that awaits a sampler, live as long as `stack`.

    Raises:
        PolicygradError: what does not exist or does not fit, with the way out.
    """
    how = load_row_options(needed.map, needed.skip_bad_rows, needed.decontaminate)
    task = load_task(needed.task, seed=needed.seed, eval_data=needed.held_out, row_options=how)
    if needed.environment is not None and (needed.step_end or "step_end" in (needed.needs or ())):
        raise ConfigError(
            "the algorithm looks at the reasoning steps of an answer, and an episode of an environment has turns: take a task of "
            "prompts and answers, or an algorithm without steps, such as grpo"
        )
    if "demonstration" in (needed.needs or ()):
        _check_shown(task, needed.environment)
    _check_levels(task, needed.needs)
    own = needed.environment is not None and not needed.reward  # the environment says what its turns are worth
    scored = needed.reads_reward or own or bool(needed.reward or task.rewards)
    chosen = () if own or not scored else choose_rewards(task, needed.reward, needed.needs, needed.step_end)
    pool = None
    if chosen:  # its workers import meanwhile
        pool = stack.enter_context(_pool(chosen, needed))
    trust = needed.trust_remote_code
    model = load_model(
        needed.model,
        dtype=needed.dtype,
        device=pick_device(needed.device),
        trust_remote_code=trust,
        lora=needed.lora,
        seed=needed.seed,
    )
    tokenizer = load_policy_tokenizer(needed.model, needed.tokenizer, model, trust)
    for example in task.rows:  # a prompt too long for the model is better found now than in a week
        tokenizer.encode(example.prompt, needed.max_tokens, example.source or "a prompt")
    if "demonstration" in (needed.needs or ()):
        check_demonstrations(task.rows, tokenizer, needed.max_tokens)
    waiter, sampler = stack.enter_context(AsyncRunner()), _sampler(needed, model, tokenizer)
    if isinstance(sampler, AsyncCloseable):
        stack.callback(lambda: waiter(_closed(sampler)))
    rollouter = Rollouter(
        task.train_example,
        tokenizer,
        sampler,
        pool.score if pool else None if scored else zero_rewards,
        needed.seed,
        pool.score_steps if pool and any(reward.process_reward for reward in chosen) else None,
        needed.environment or SingleTurn,
        waiter,
        pool,
        needed.environment_timeout,
        needed.phase,
        not needed.rewards.max_failed_steps,
    )
    names = tuple(_in_words(reward, needed.needs) for reward in chosen) or (
        "the environment's own" if scored else "none",
    )
    return Resources(task, names, model, tokenizer, rollouter, scored)


def _pool(chosen: tuple[Reward, ...], needed: Needed) -> RewardScorer:
    asked = needed.rewards
    if needed.pool is not None:
        return needed.pool(chosen, asked, needed.phase)
    return RewardPool(
        chosen,
        num_workers=asked.num_workers,
        timeout=asked.timeout,
        memory=asked.memory,
        sandbox=asked.sandbox,
        environment=asked.environment,
        show_output=asked.show_output,
        progress=needed.phase,
        tolerate_unresponsive=not asked.max_failed_steps,
    )


def load_policy_tokenizer(model: Any, tokenizer: Any, network: nn.Module, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer that was asked for, or the model's own.

    Raises:
        ModelError: an object of a model that names no folder, without a tokenizer.
    """
    beside = model if isinstance(model, str) else getattr(getattr(network, "config", None), "_name_or_path", "")
    if not (tokenizer or beside):
        raise ModelError("the model is an object that names no folder to read its tokenizer from: give tokenizer= too")
    return load_tokenizer(tokenizer or beside, network, trust_remote_code=trust_remote_code)


def _check_shown(task: Task, environment: EnvironmentFactory | None) -> None:
    """Raises ConfigError where there can be no demonstration, or none is seen: a step may be without, a task may not."""
    if environment is not None:
        raise ConfigError(
            "the algorithm learns from demonstrations, which are answers, and an episode of an environment has turns: take a task "
            "of prompts and answers, or an algorithm without demonstrations, such as grpo"
        )
    seen = task.rows or [task.train_example(index) for index in range(PROBE_EXAMPLES)]
    if all(example.columns.get(DEMONSTRATION_COLUMN) is None for example in seen):
        which = "no row" if task.rows else f"none of the first {PROBE_EXAMPLES} examples"
        raise ConfigError(
            f"the algorithm learns from demonstrations, and {which} of {task.name!r} has one: {DEMONSTRATION_HINT}"
        )


def _check_levels(task: Task, needs: frozenset[str] | None) -> None:
    """Raises ConfigError for levels of difficulty that nothing moves, or for what would move those of a task without any."""
    levels = getattr(task, "levels", 0)
    if "level" in (needs or ()) and not levels:
        raise ConfigError(
            f"MovingLevel moves the difficulty of a task that has levels, and {task.name!r} has none: take one of reasoning-gym's "
            "curricula, --task curriculum:chain_sum, or drop the filter"
        )
    if levels and needs is not None and "level" not in needs:
        raise ConfigError(
            f"the task {task.name!r} has {levels} levels of difficulty, and nothing moves them: add "
            "--algorithm.filters MovingLevel, or name its data set without curriculum:"
        )


def _sampler(needed: Needed, model: nn.Module, tokenizer: Tokenizer) -> Sampler:
    given = needed.sampler or needed.engine
    model = clone_model(model) if needed.apart and (given is None or callable(given)) else model
    if given is None:
        return LocalSampler.from_tokenizer(
            model, tokenizer, Routing.for_model(model) if needed.routing_replay else None
        )
    sampler = call_factory(given, Sampler, model, tokenizer)
    if not isinstance(sampler, Sampler):
        raise ConfigError(
            f"sampler is {sampler!r}: give an object with `async generate(requests)` and `async update(weights)`, see "
            "policygrad.Sampler, or a function of (model, tokenizer) that returns one"
        )
    return sampler


async def _closed(sampler: AsyncCloseable) -> None:
    found: object = sampler.close()
    if isinstance(found, Awaitable):  # one of somebody's own may close at once
        await found


def call_factory(given: object, kind: type, *args: object) -> object:
    """What was given, or what it makes of `args`: a class is a factory, though a protocol takes it for one of its instances."""
    factory = callable(given) and (isinstance(given, type) or not isinstance(given, kind))
    return given(*args) if factory else given  # type: ignore[operator]


def pick_device(name: str) -> str:
    """auto: cuda where there is one.

    Raises:
        RunError: a device this machine does not have.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name).tolist()  # on the meta device there is nothing to read
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"learner.device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return name


def get_reward_names(task: Task, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """The rewards asked for, or the task's own.

    Raises:
        RunError: a task without rewards of its own, and none chosen.
    """
    names = chosen or task.rewards
    if not names:
        raise RunError(
            f"task {task.name!r} has no reward of its own: choose one, e.g. --reward exact_match or --reward math"
        )
    return tuple(names)


def choose_rewards(
    task: Task, chosen: tuple[str, ...], needs: frozenset[str] | None, step_end: str | None
) -> tuple[Reward, ...]:
    """The rewards of the outcome, then those of the steps where there are any: asked for, by a pattern, or the task's own.

    Raises:
        RunError: nothing to score the outcome, or nothing to say where steps end for an algorithm that asks; and what would
            be ignored.
    """
    named = tuple(resolve_reward(name) for name in chosen)
    steps = tuple(reward for reward in named if reward.process_reward)
    outcome = tuple(reward for reward in named if not reward.process_reward)
    if steps and needs is None:
        raise RunError(f"reward {steps[0].name!r} scores steps, and an evaluation is of outcomes: leave it away")
    if steps and step_end is not None:
        raise RunError(f"reward {steps[0].name!r} and step_end {step_end!r} both say where steps end: leave one away")
    if not outcome and steps and not task.rewards:
        raise RunError(
            f"reward {steps[0].name!r} scores steps, and task {task.name!r} has no reward of its own for the outcome: name "
            f"one too, e.g. --reward exact_match {steps[0].name}"
        )
    if step_end is not None:
        steps = (Reward("step_end", StepEnd(step_end), process_reward=True),)
    elif needs is not None and "step_end" in needs and not steps:
        steps = tuple(resolve_reward(name) for name in task.steps)
        if not steps:
            raise RunError(_no_steps(task, needs))
    return (*(outcome or tuple(resolve_reward(name) for name in get_reward_names(task, ()))), *steps)


def _no_steps(task: Task, needs: frozenset[str]) -> str:
    """The way out of a task without steps."""
    pattern = "" if "token_reward" in needs else "; or --step-end '\\n' to end one at every line"
    return (
        f"the algorithm looks at an answer's steps, and task {task.name!r} does not say where they end: take --task "
        "embedded_steps, or name a process reward, --reward exact_match mine.py:f with @reward(process=True)" + pattern
    )


def _in_words(reward: Reward, needs: frozenset[str] | None) -> str:
    """A reward for people, with what is read of it."""
    name = reward.name if reward.weight == 1 else f"{reward.name}*{reward.weight:g}"
    if not reward.process_reward:
        return name
    if isinstance(reward.function, StepEnd):
        return f"steps by {reward.function.pattern!r}"
    only_ends = needs is not None and "step_end" in needs and "token_reward" not in needs
    return f"{name} (only where steps end)" if only_ends else f"{name} (of steps)"


def needed_for(
    run: Run,
    sampler: Sampler | SamplerFactory | None = None,
    environment: EnvironmentFactory | None = None,
    phase: ProgressCallback = ignore_progress,
    hosts: Placement = LOCAL_PLACEMENT,
) -> Needed:
    """What a run is to load."""
    rewards, run = resolve_rewards(run), resolve_paths(run)
    engine = make_engine_factory(run.sampler, Path(run.output or ".") / WEIGHTS_FOLDER, run.sampling, sampler, phase)
    world = resolve_environment(run.environment, environment)
    return Needed(
        run.model,
        run.task,
        run.sampling.max_tokens,
        tokenizer=run.tokenizer,
        reward=rewards,
        needs=run.algorithm.all_needs,
        reads_reward=run.algorithm.reads_reward,
        step_end=run.step_end,
        held_out=run.eval_data,
        seed=run.seed,
        dtype=run.learner.dtype,
        device=run.learner.device,
        rewards=run.rewards,
        phase=phase,
        sampler=sampler,
        engine=engine or hosts.sampler,
        environment=world if world is None or hosts.environment is None else hosts.environment(world),
        environment_timeout=run.environment_timeout,
        routing_replay=run.learner.routing_replay,
        apart=run.max_staleness > 0 and not run.publishes_sharded,
        trust_remote_code=run.trust_remote_code,
        lora=run.learner.adapters,
        map=run.row_map,
        skip_bad_rows=run.skip_bad_rows,
        decontaminate=run.decontaminate,
        pool=hosts.reward_pool,
    )


# What learns in a run, and how it goes on from a checkpoint.

LearnerFactory = Callable[[nn.Module, Run], Learner]
"""From the run's model and its configuration to what learns: `make_local_learner`, or a wrapper around it."""


def make_local_learner(model: nn.Module, run: Run, placement: Placement = LOCAL_PLACEMENT) -> Learner:
    """The learner of a run: in this process, and in `learner.world_size` − 1 others. hosts: where those are, and who draws.

    Raises:
        ModelError: a reference that is named and cannot be read, or has not the policy's tokenizer.
        ConfigError: a process of torchrun's that would learn for itself.
    """
    check_not_torchrun(run.learner.world_size)
    named = run.algorithm.reference.model if run.algorithm.reference is not None else None
    reference: nn.Module | None = None
    if named is not None:
        tokenizer = load_policy_tokenizer(run.model, run.tokenizer, model, run.trust_remote_code)
        device = str(next(model.parameters()).device)
        reference = load_reference(
            named, tokenizer, dtype=run.learner.dtype, device=device, trust_remote_code=run.trust_remote_code
        )
        if (
            run.learner.adapters is not None
            and run.algorithm.reward_model is not None
            and not adapter_configs(reference)
        ):
            reference = add_adapters(reference, run.learner.adapters, seed=run.seed).requires_grad_(
                False
            )  # what learns begins as it
    make: Callable[..., Learner] = LocalLearner
    if run.learner.world_size > 1:  # torch.distributed takes a while to import
        from policygrad.learners.fsdp.controller import start_fsdp_learner

        replicate_policy = run.sampler.engine == LOCAL and not run.max_staleness and placement.sampler is None
        folder = Path(run.output) if run.output else None
        make = partial(
            start_fsdp_learner,
            replicate_policy=replicate_policy,
            stream_weights=run.publishes_sharded,
            folder=folder,
            launcher=placement.learner_processes,
        )
    spec = LearnerSpec(run.algorithm, run.lr, run.steps, run.sampling.temperature, run.learner, run.optimizer)
    return make(model, spec, reference=reference)


def build_learner(given: Learner | LearnerFactory, model: nn.Module, run: Run) -> Learner:
    """What was given, or what it makes of model and run.

    Raises:
        ConfigError: neither is a learner.
    """
    learner = call_factory(given, Learner, model, run)
    if not isinstance(learner, Learner):
        raise ConfigError(
            f"learner is {learner!r}: give a function of (model, run) that returns what policygrad.Learner describes "
            "(evaluate, update, publish, version, state, restore), such as pg.make_local_learner"
        )
    return learner


def restore_learner(
    restore: Callable[[Mapping[str, Tensor], Mapping[str, Any]], None],
    saved: Checkpoint,
    tensors: Mapping[str, Tensor],
    run: Run,
    folder: Path,
) -> None:
    """The learner as it was at the checkpoint, whose own tensors these are. restore: the learner's.

    Raises:
        RunError: a checkpoint of another algorithm, or of another model.
    """
    try:
        restore(tensors, saved.state["learner"])
    except KeyError as error:
        raise RunError(
            f"{saved.path} has no {error}, which {run.algorithm.name} needs: go on with the algorithm that the run began with, "
            f"or train anew from its model, --model {folder}"
        ) from error
    except RuntimeError as error:
        raise RunError(f"{saved.path} does not fit the model {run.describe_option('model')!r}: {error}") from error
