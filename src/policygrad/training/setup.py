"""Load what a run or an evaluation needs: task, rewards, model, tokenizer, sampler; and refuse what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch_checks import find_mixed_roles
from policygrad.environments.registry import resolve_environment
from policygrad.errors import ConfigError
from policygrad.learners.config import check_offload
from policygrad.models.tokenizer import Tokenizer
from policygrad.rewards.base import Reward
from policygrad.rewards.workers.pool import RewardPool, RewardScorer
from policygrad.rollout.environment import SingleTurn, find_capabilities
from policygrad.rollout.providers import RunPlan, find_preparations
from policygrad.rollout.rollouter import Rollouter
from policygrad.rollout.row_checks import check_reward_columns, check_rows
from policygrad.rollout.runners import EnvironmentKind, RunsEpisodes, UsesModels
from policygrad.rollout.scoring import ScoreFn, zero_rewards
from policygrad.samplers.base import Sampler
from policygrad.samplers.config import LOCAL
from policygrad.tasks.base import Task
from policygrad.tasks.registry import load_task
from policygrad.training.config.paths import resolve_config_paths, resolve_rewards
from policygrad.training.config.run import Run, RunOptions
from policygrad.training.placement import LOCAL_PLACEMENT, Placement, SamplerFactory
from policygrad.training.policy_setup import PROBE_EXAMPLES, load_opponent, load_policy, make_sampler
from policygrad.training.reward_setup import choose_rewards, describe_reward
from policygrad.utils.async_runner import AsyncRunner
from policygrad.utils.devices import pick_device
from policygrad.utils.garbage import paused_garbage_collection
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.utils.user_code import load_object

if TYPE_CHECKING:
    from policygrad.tasks.rows import RowOptions


@dataclass(frozen=True, eq=False)
class Resources:
    """Everything loaded."""

    task: Task
    reward_names: tuple[str, ...]  # descriptions of the rewards
    model: nn.Module
    tokenizer: Tokenizer
    rollouter: Rollouter
    has_rewards: bool = True  # False if only a teacher grades the completions


@paused_garbage_collection()
def load_resources(
    stack: ExitStack,
    options: RunOptions,
    algorithm: Algorithm | None = None,
    *,
    sampler: Sampler | SamplerFactory | None = None,
    environment: EnvironmentKind | None = None,
    placement: Placement = LOCAL_PLACEMENT,
    phase: ProgressCallback = ignore_progress,
    has_rewards: bool = True,
) -> Resources:
    """Load everything that training with `algorithm`, or an evaluation (None), needs.

    Args:
        stack: Closes the reward workers and the sampler.
        sampler, environment: Replace the configured ones.
        has_rewards: False = the task is not scored.
        phase: Called with what rewards, servers or environments are being waited for.

    Raises:
        PolicygradError: Something is missing or does not fit; the message says what to change.
    """
    requested, options = resolve_rewards(options), resolve_config_paths(options)
    device = resolve_device(options, algorithm)
    engine = None
    if options.sampler.engine != LOCAL:
        from policygrad.training.engine_setup import make_run_engine

        engine = make_run_engine(options, algorithm, device, sampler, phase)
    kind = load_environment(stack, options, environment, placement)
    task = load_run_task(options, algorithm, kind)
    rewards = RunRewards((), None, has_rewards=False)
    if has_rewards:
        rewards = start_rewards(
            stack, requested, options, algorithm, task, kind, placement, phase
        )  # while the model loads
    policy = load_policy(options, algorithm, device)
    task = check_prompts(task, options, algorithm, kind, policy.tokenizer)
    if isinstance(kind, UsesModels):
        kind = kind.with_models(lambda name: load_opponent(name, options, policy))
    run_async = stack.enter_context(AsyncRunner())
    rollouter = Rollouter(
        examples=task.train_example,
        tokenizer=policy.tokenizer,
        sampler=make_sampler(stack, policy, sampler or engine or placement.sampler, options, algorithm, run_async),
        score=rewards.score,
        seed=options.seed,
        score_steps=rewards.pool.score_steps if rewards.pool and rewards.has_steps else None,
        environment=kind or SingleTurn,
        run_async=run_async,
        pool=rewards.pool,
        timeout=options.environment_timeout,
        progress=phase,
        tolerate_timeouts=not options.rewards.max_failed_steps,
    )
    names = rewards.describe(None if algorithm is None else algorithm.all_needs)
    return Resources(task, names, policy.model, policy.tokenizer, rollouter, rewards.has_rewards)


def plan_run(run: Run, resources: Resources) -> RunPlan:
    """Return what providers that are made before the first update must know of the run."""
    num_rows = len(resources.task.rows)
    return RunPlan(run.algorithm, run.steps, run.prompts_per_step, run.sampling, num_rows, run.tokens)


def prepare_run(
    run: Run, resources: Resources, folder: Path, *, is_initial: bool, phase: ProgressCallback = ignore_progress
) -> tuple[Resources, tuple[str, ...]]:
    """Make what the algorithm's parts need before the first update, or read it in the run's folder.

    Args:
        is_initial: True if the sampler has the initial policy.

    Returns:
        The resources with a rollouter that has it, and messages of failed rewards.
    """
    rollouter, messages, plan = resources.rollouter, list[str](), plan_run(run, resources)
    for part, kind in find_preparations(run.algorithm):
        rollouter, said = kind.prepare_run(part, plan, rollouter, folder, is_initial=is_initial, progress=phase)
        messages += said
    return replace(resources, rollouter=rollouter), tuple(messages)


def resolve_device(options: RunOptions, algorithm: Algorithm | None) -> str:
    """Return the learner's device. Raises ConfigError if it has no memory to take the optimizer's state out of."""
    device = pick_device(options.learner.device)
    if algorithm is not None:
        check_offload(options.learner, options.optimizer, device)
    return device


def load_environment(
    stack: ExitStack, options: RunOptions, environment: EnvironmentKind | None, placement: Placement
) -> EnvironmentKind | None:
    """Return the kind of environment, where its episodes run; None = single-turn.

    Args:
        stack: Leaves it, if it is a context manager.
        environment: Replaces the configured one.
    """
    kind = resolve_environment(options.environment, environment, options.environment_env)
    if kind is not None and placement.environment is not None:
        stays_because = find_capabilities(kind).stays_because
        if stays_because or isinstance(kind, RunsEpisodes):
            reason = stays_because or "an environment with a runner of its own runs in the trainer's process"
            raise ConfigError(f"{reason}, not in actors: set --cluster.environments 0")
        kind = placement.environment(kind)
    if isinstance(kind, AbstractContextManager):  # it tries its servers now rather than in the first episode
        stack.enter_context(kind)
    return kind


def load_run_task(options: RunOptions, algorithm: Algorithm | None, environment: EnvironmentKind | None) -> Task:
    """Load the task, and refuse what does not fit to it."""
    task = load_task(
        options.task,
        seed=options.seed,
        eval_data=options.eval_data,
        row_options=_load_run_row_options(options),
    )
    if algorithm is None:
        return task
    if environment is not None and (options.step_end or "step_end" in algorithm.all_needs):
        raise ConfigError(
            "the algorithm uses the reasoning steps of a completion, and an environment's episodes consist of turns: use a task of "
            "prompts and answers, or an algorithm without steps, such as grpo"
        )
    if find_capabilities(environment).plays_itself and (reason := find_mixed_roles(algorithm)):
        raise ConfigError(reason)
    _check_task(task, environment, algorithm.all_needs)
    return task


@dataclass(frozen=True, eq=False)
class RunRewards:
    """The rewards of a run, and the workers that compute them."""

    rewards: tuple[Reward, ...]
    pool: RewardScorer | None
    """None = no reward functions."""
    has_rewards: bool
    """False = nothing is scored."""

    @property
    def score(self) -> ScoreFn | None:
        """Scores completions; None = the environment gives all rewards."""
        return self.pool.score if self.pool else None if self.has_rewards else zero_rewards

    @property
    def has_steps(self) -> bool:
        """True if reasoning steps are scored, or marked."""
        return any(reward.process_reward for reward in self.rewards)

    def describe(self, needs: frozenset[str] | None) -> tuple[str, ...]:
        """Return the rewards' names, with what is read of them. needs: of the algorithm; None = an evaluation."""
        names = tuple(describe_reward(reward, needs) for reward in self.rewards)
        return names or ("the environment's own" if self.has_rewards else "none",)


def start_rewards(
    stack: ExitStack,
    requested: Sequence[Any],
    options: RunOptions,
    algorithm: Algorithm | None,
    task: Task,
    environment: EnvironmentKind | None,
    placement: Placement,
    phase: ProgressCallback,
) -> RunRewards:
    """Choose the rewards and start their workers, which import what they need meanwhile.

    Args:
        stack: Ends the workers.
        requested: The configured rewards.
    """
    has_rewards = bool(
        algorithm is None or algorithm.reads_reward or environment is not None or requested or task.rewards
    )
    is_environment_alone = environment is not None and not requested
    if not has_rewards or is_environment_alone:
        return RunRewards((), None, has_rewards)
    needs, step_end = (None, None) if algorithm is None else (algorithm.all_needs, options.step_end)
    rewards = choose_rewards(task, tuple(requested), needs, step_end)
    check_reward_columns(rewards, task, environment)
    make_pool = placement.reward_pool or RewardPool.from_config
    pool = stack.enter_context(make_pool(rewards, options.rewards, phase)) if rewards else None
    return RunRewards(rewards, pool, has_rewards)


def check_prompts(
    task: Task,
    options: RunOptions,
    algorithm: Algorithm | None,
    environment: EnvironmentKind | None,
    tokenizer: Tokenizer,
) -> Task:
    """Return the task without the rows that the model cannot be asked, now rather than in a week."""
    task = check_rows(
        task,
        tokenizer,
        options.sampling.max_tokens,
        environment,
        has_demonstrations=algorithm is not None and "demonstration" in algorithm.all_needs,
        skip_bad_rows=options.skip_bad_rows,
    )
    reference = None if algorithm is None else algorithm.reference
    if (
        algorithm is not None
        and reference is not None
        and reference.templates
        and not algorithm.reads_reward
        and task.rows
    ):
        from policygrad.rollout.reference_prompts import check_template_columns

        check_template_columns(task.rows, reference)
    return task


def _load_run_row_options(options: RunOptions) -> RowOptions | None:
    given = (options.row_map, options.skip_bad_rows, options.decontaminate, options.fetch_images)
    return load_row_options(*given) if any(given) else None


def load_row_options(
    row_map: Any, skip_bad_rows: bool, decontaminate: int = 0, fetch_images: bool = False
) -> RowOptions:
    """Load the row map, a function or its name.

    Raises:
        ConfigError: There is no such file or function, or it is not callable.
    """
    function = load_object(row_map, "--row-map") if isinstance(row_map, str) else row_map
    if function is not None and not callable(function):
        raise ConfigError(
            f"--row-map {row_map} is no function: give one that takes a row, a dict, and returns a row or None"
        )
    from policygrad.tasks.rows import RowOptions

    return RowOptions(function, skip_bad_rows, decontaminate, fetch_images)


def _check_task(task: Task, environment: EnvironmentKind | None, needs: frozenset[str] | None) -> None:
    """Raise ConfigError if a task cannot have the demonstrations that are learned from, or seems to have none (single steps may go
    without); if observations are learned from and there is no environment; if the task has levels of difficulty that nothing
    changes, or none for a filter that changes them."""
    if "demonstration" in (needs or ()):
        from policygrad.rollout.demonstrations import DEMONSTRATION_COLUMN, DEMONSTRATION_HINT

        if environment is not None:
            raise ConfigError(
                "the algorithm learns from demonstrations, which are single completions, and an environment's episodes consist of "
                "turns: use a task of prompts and answers, or an algorithm without demonstrations, such as grpo"
            )
        examples = task.rows or [task.train_example(index) for index in range(PROBE_EXAMPLES)]
        if all(example.columns.get(DEMONSTRATION_COLUMN) is None for example in examples):
            which = "no row" if task.rows else f"none of the first {PROBE_EXAMPLES} examples"
            raise ConfigError(
                f"the algorithm learns from demonstrations, and {which} of {task.name!r} has one: {DEMONSTRATION_HINT}"
            )
    if "observation" in (needs or ()) and environment is None:
        from policygrad.rollout.observations import SINGLE_TURN_OBSERVATIONS

        raise ConfigError(SINGLE_TURN_OBSERVATIONS)
    levels = getattr(task, "levels", 0)
    if "level" in (needs or ()) and not levels:
        raise ConfigError(
            f"MovingLevel changes the difficulty of a task with levels, and {task.name!r} has none: use one of reasoning-gym's "
            "curricula, --task curriculum:chain_sum, or drop the filter"
        )
    if levels and needs is not None and "level" not in needs:
        raise ConfigError(
            f"the task {task.name!r} has {levels} levels of difficulty, and nothing changes them: add "
            "--algorithm.filters MovingLevel, or name its data set without curriculum:"
        )
