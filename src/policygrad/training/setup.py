"""Load what a run or an evaluation needs: task, rewards, model, tokenizer, sampler, learner; and refuse what does not fit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from policygrad.core.algorithm import Algorithm
from policygrad.core.auxiliary import is_server
from policygrad.core.batch_checks import find_mixed_roles
from policygrad.environments import EnvironmentFactory, SingleTurn
from policygrad.environments.agent_program import AgentProgram
from policygrad.environments.games import INITIAL, RANDOM, SelfPlay
from policygrad.environments.registry import resolve_environment
from policygrad.errors import ConfigError, ModelError, RunError
from policygrad.learners.base import Learner, LearnerSpec
from policygrad.learners.fsdp.torchrun import check_not_torchrun
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.adapters import adapter_configs, add_adapters
from policygrad.models.loading import compute_head_in_float32, load_model
from policygrad.models.moe_routing import Routing
from policygrad.models.replica import clone_model, load_reference
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.planning.cost_model import static_bytes
from policygrad.rewards.base import Reward
from policygrad.rewards.builtin import StepEnd
from policygrad.rewards.config import RewardConfig
from policygrad.rewards.resolve import resolve_reward
from policygrad.rewards.workers.pool import RewardPool, RewardScorer
from policygrad.rollout.demonstrations import DEMONSTRATION_COLUMN, DEMONSTRATION_HINT
from policygrad.rollout.game_episodes import ModelOpponent
from policygrad.rollout.reference_prompts import check_template_columns
from policygrad.rollout.rollouter import SINGLE_TURN_OBSERVATIONS, Rollouter
from policygrad.rollout.row_checks import check_reward_columns, check_rows
from policygrad.rollout.scoring import zero_rewards
from policygrad.rollout.teachers import ServedTeachers, find_teacher
from policygrad.samplers.base import AsyncCloseable, Sampler
from policygrad.samplers.config import LOCAL
from policygrad.samplers.engines.registry import WEIGHTS_FOLDER, LearnerFacts, make_engine_factory
from policygrad.samplers.engines.teachers import TeacherServer
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.tasks import load_task
from policygrad.tasks.base import Task
from policygrad.tasks.rows import RowOptions
from policygrad.training.config.paths import resolve_config_paths, resolve_rewards
from policygrad.training.config.run import Run, RunOptions
from policygrad.training.cost_estimate import compute_algorithm_cost
from policygrad.utils.async_runner import AsyncRunner
from policygrad.utils.devices import pick_device
from policygrad.utils.garbage import paused_garbage_collection
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.utils.user_code import load_object

if TYPE_CHECKING:
    from policygrad.learners.fsdp.processes import WorkerLauncher

PROBE_EXAMPLES = 64  # number of examples of a generated task that are searched for a demonstration
SamplerFactory = Callable[[nn.Module, Tokenizer], Sampler]  # makes a sampler from the run's model and tokenizer
LearnerFactory = Callable[[nn.Module, Run], Learner]
"""Makes a learner from the run's model and configuration: `make_local_learner`, or a wrapper around it."""


@dataclass(frozen=True)
class Placement:
    """Where parts of the work are done, such as in the actors of a cluster. None = in this process and those it starts.

    It is not part of the run's configuration, since it does not affect the results.
    """

    sampler: SamplerFactory | None = None  # makes the sampler in place of this process; unused with an engine
    reward_pool: Callable[[Sequence[Reward], RewardConfig, ProgressCallback], RewardScorer] | None = None
    """Makes the reward workers."""
    environment: Callable[[EnvironmentFactory], EnvironmentFactory] | None = None  # wraps the environment factory
    learner_processes: WorkerLauncher | None = None  # starts the learner's processes
    cli_flags: str = ""  # the command-line options for this placement


LOCAL_PLACEMENT = Placement()


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
    environment: EnvironmentFactory | AgentProgram | None = None,
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
    reward_options, options = resolve_rewards(options), resolve_config_paths(options)
    folder, max_tokens = Path(options.output or ".") / WEIGHTS_FOLDER, options.sampling.max_tokens
    device = pick_device(options.learner.device)
    replays_routing = algorithm is not None and options.learner.routing_replay
    if algorithm is not None and options.learner.offload and not device.startswith("cuda"):
        raise ConfigError(
            "learner.offload moves the optimizer's state from a GPU to this machine's memory, and the learner's device is "
            f"{device}: leave it out"
        )
    facts = LearnerFacts(
        gpus=list_learner_gpus(device, options.learner.world_size),
        replays_experts=replays_routing,
        needs_masks=algorithm is not None and options.sampling.is_truncated,
        resident_bytes=partial(compute_resident_bytes, options, algorithm),
    )
    longest = max(max_tokens, options.evaluation.resolve_sampling(options.sampling).max_tokens)
    sampled = replace(options.sampling, max_tokens=longest)  # servers need room for both
    engine = make_engine_factory(options.sampler, folder, sampled, sampler, phase, facts)
    environment = resolve_environment(options.environment, environment, options.environment_env)
    if environment is not None and placement.environment is not None:
        if isinstance(environment, AgentProgram):
            raise ConfigError(
                f"the program {environment.name} runs on the machine of the trainer, not in actors: set "
                "--cluster.environments 0"
            )
        if isinstance(environment, SelfPlay):
            raise ConfigError(
                f"games such as {environment.__name__} run in the process of the trainer, not in actors: set "
                "--cluster.environments 0"
            )
        environment = placement.environment(environment)
    if isinstance(environment, AbstractContextManager):  # it tries its servers now rather than in the first episode
        stack.enter_context(environment)
    needs = None if algorithm is None else algorithm.all_needs
    step_end = None if algorithm is None else options.step_end
    row_options = load_row_options(
        options.row_map, options.skip_bad_rows, options.decontaminate, fetch_images=options.fetch_images
    )
    task = load_task(options.task, seed=options.seed, eval_data=options.eval_data, row_options=row_options)
    if environment is not None and (step_end or "step_end" in (needs or ())):
        raise ConfigError(
            "the algorithm uses the reasoning steps of a completion, and an environment's episodes consist of turns: use a task of "
            "prompts and answers, or an algorithm without steps, such as grpo"
        )
    plays_itself = isinstance(environment, SelfPlay) and environment.opponent is None
    if plays_itself and algorithm is not None and (reason := find_mixed_roles(algorithm)):
        raise ConfigError(reason)
    _check_task(task, environment, needs)
    environment_only = environment is not None and not reward_options
    has_rewards = has_rewards and bool(
        algorithm is None or algorithm.reads_reward or environment is not None or reward_options or task.rewards
    )
    rewards: tuple[Reward, ...] = ()
    if has_rewards and not environment_only:
        rewards = choose_rewards(task, reward_options, needs, step_end)
        check_reward_columns(rewards, task, environment)
    pool = None
    if rewards:  # the workers import while the model is loaded
        pool = stack.enter_context((placement.reward_pool or RewardPool.from_config)(rewards, options.rewards, phase))
    model = load_model(
        options.model,
        dtype=options.learner.resolve().dtype,
        device=device,
        trust_remote_code=options.trust_remote_code,
        lora=None if algorithm is None else options.learner.adapters,
        seed=options.seed,
    )
    if algorithm is not None and options.learner.resolve(algorithm.head).head == "fp32":
        compute_head_in_float32(model)  # before it is cloned for the sampler
    tokenizer = load_policy_tokenizer(
        options.model, options.tokenizer, model, options.trust_remote_code, options.template_options
    )
    task = check_rows(  # now rather than in a week
        task,
        tokenizer,
        max_tokens,
        environment,
        has_demonstrations="demonstration" in (needs or ()),
        skip_bad_rows=options.skip_bad_rows,
    )
    if algorithm is not None and algorithm.reference is not None and not algorithm.reads_reward and task.rows:
        check_template_columns(task.rows, algorithm.reference)
    if isinstance(environment, SelfPlay):
        environment = load_opponents(environment, options, model, tokenizer, device)
    run_async = stack.enter_context(AsyncRunner())
    factory = sampler or engine or placement.sampler
    sampling_model = model
    samples_ahead = algorithm is not None and options.max_staleness > 0 and not options.publishes_sharded
    if samples_ahead and (factory is None or callable(factory)):  # it samples while the learner changes its weights
        sampling_model = clone_model(model)
    if factory is None:
        routing = Routing.for_model(sampling_model) if replays_routing else None
        loaded: object = LocalSampler.from_tokenizer(
            sampling_model, tokenizer, routing, cuda_graphs=options.sampler.cuda_graphs
        )
    else:
        loaded = call_factory(factory, Sampler, sampling_model, tokenizer)
    if not isinstance(loaded, Sampler):
        raise ConfigError(
            f"sampler is {loaded!r}: pass an object with `async generate(requests)` and `async update(weights)`, see "
            "policygrad.Sampler, or a function of (model, tokenizer) that returns one"
        )
    if isinstance(loaded, AsyncCloseable):
        stack.callback(lambda: run_async(_close(loaded)))
    rollouter = Rollouter(
        task.train_example,
        tokenizer,
        loaded,
        pool.score if pool else None if has_rewards else zero_rewards,
        options.seed,
        pool.score_steps if pool and any(reward.process_reward for reward in rewards) else None,
        environment or SingleTurn,
        run_async,
        pool,
        options.environment_timeout,
        phase,
        not options.rewards.max_failed_steps,
    )
    names = tuple(_describe_reward(reward, needs) for reward in rewards)
    names = names or ("the environment's own" if has_rewards else "none",)
    return Resources(task, names, model, tokenizer, rollouter, has_rewards)


def load_opponents(
    environment: SelfPlay, options: RunOptions, model: nn.Module, tokenizer: Tokenizer, device: str
) -> SelfPlay:
    """Load the models that play against the policy: the run's own before training, or others by name.

    Raises:
        ModelError: a model that cannot be loaded.
    """
    loaded = dict[str, ModelOpponent]()

    def load(opponent: Any) -> Any:
        if not isinstance(opponent, str) or opponent == RANDOM:
            return opponent
        if opponent not in loaded:
            if opponent == INITIAL:
                network, its_tokenizer = clone_model(model), tokenizer
            else:
                dtype = options.learner.resolve().dtype
                network = load_model(opponent, dtype=dtype, device=device, trust_remote_code=options.trust_remote_code)
                its_tokenizer = load_policy_tokenizer(opponent, None, network, options.trust_remote_code)
            network.requires_grad_(False)
            loaded[opponent] = ModelOpponent(LocalSampler.from_tokenizer(network, its_tokenizer), its_tokenizer)
        return loaded[opponent]

    return replace(environment, opponent=load(environment.opponent), eval_opponent=load(environment.eval_opponent))


def load_row_options(
    row_map: Any, skip_bad_rows: bool, decontaminate: int = 0, *, fetch_images: bool = False
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
    return RowOptions(function, skip_bad_rows, decontaminate, fetch_images)


def load_policy_tokenizer(
    model: Any,
    tokenizer: Any,
    network: nn.Module,
    trust_remote_code: bool = False,
    template_options: Sequence[str] = (),
) -> Tokenizer:
    """Load the requested tokenizer, or the model's own.

    Raises:
        ModelError: The model is an object that names no folder, and there is no tokenizer; or see `with_template_options`.
    """
    source = model if isinstance(model, str) else getattr(getattr(network, "config", None), "_name_or_path", "")
    if not (tokenizer or source):
        raise ModelError("the model is an object that names no folder to read its tokenizer from: pass tokenizer= too")
    loaded = load_tokenizer(tokenizer or source, network, trust_remote_code=trust_remote_code)
    return loaded.with_template_options(template_options)


def _check_task(
    task: Task, environment: EnvironmentFactory | AgentProgram | None, needs: frozenset[str] | None
) -> None:
    """Raise ConfigError if a task cannot have the demonstrations that are learned from, or seems to have none (single steps may go
    without); if observations are learned from and there is no environment; if the task has levels of difficulty that nothing
    changes, or none for a filter that changes them."""
    if "demonstration" in (needs or ()):
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


async def _close(sampler: AsyncCloseable) -> None:
    result: object = sampler.close()
    if isinstance(result, Awaitable):  # a custom sampler's may be synchronous
        await result


def call_factory(value: object, kind: type, *args: object) -> object:
    """Return `value`, or the result of calling it if it is a factory. A class is always a factory, even where a protocol would
    accept it as an instance."""
    is_factory = callable(value) and (isinstance(value, type) or not isinstance(value, kind))
    return value(*args) if is_factory else value  # type: ignore[operator]


def compute_resident_bytes(options: RunOptions, algorithm: Algorithm | None, parameters: int) -> float:
    """Return the bytes of a GPU that the learner keeps while completions are sampled: weights, gradients and moments.

    Args:
        parameters: Of the policy.
    """
    number = 2 if options.learner.resolve().dtype == "bf16" else 4
    if algorithm is None or options.learner.lora:  # adapters and their moments are small
        return float(parameters * number)
    cost = compute_algorithm_cost(algorithm)
    if options.learner.offload:
        return float(parameters * number * (cost.trained_models + cost.frozen_models))
    state = static_bytes(parameters, number, cost.trained_models, cost.frozen_models, options.learner.world_size)
    return sum(state.values())


def list_learner_gpus(device: str, world_size: int) -> range:
    """Return the numbers of the learner's GPUs."""
    kind, _, number = device.partition(":")
    first = int(number or 0)
    return range(first, first + world_size if kind == "cuda" else first)


def choose_rewards(
    task: Task, names: tuple[Any, ...], needs: frozenset[str] | None, step_end: str | None
) -> tuple[Reward, ...]:
    """Return the rewards of the outcome, then those of reasoning steps: the requested ones, those of a pattern, or the task's own.

    Args:
        needs: Batch fields that the algorithm reads; None = an evaluation.
        step_end: Pattern that ends a reasoning step.

    Raises:
        RunError: Nothing scores the outcome, nothing marks the steps that the algorithm needs, or a reward would be ignored.
    """
    requested = tuple(resolve_reward(name) for name in names)
    steps = tuple(reward for reward in requested if reward.process_reward)
    outcome = tuple(reward for reward in requested if not reward.process_reward)
    if steps and needs is None:
        raise RunError(f"reward {steps[0].name!r} scores steps, and an evaluation scores outcomes: leave it out")
    if steps and step_end is not None:
        raise RunError(f"reward {steps[0].name!r} and step_end={step_end!r} both mark where steps end: leave one out")
    if steps and not outcome and not task.rewards:
        raise RunError(
            f"reward {steps[0].name!r} scores steps, and task {task.name!r} has no reward of its own for the outcome: name one "
            f"too, e.g. --reward exact_match {steps[0].name}"
        )
    if step_end is not None:
        steps = (Reward("step_end", StepEnd(step_end), process_reward=True),)
    elif needs is not None and "step_end" in needs and not steps:
        steps = tuple(resolve_reward(name) for name in task.steps)
        if not steps:
            pattern = "" if "token_reward" in needs else "; or --step-end '\\n' to end one at every line"
            raise RunError(
                f"the algorithm uses a completion's reasoning steps, and task {task.name!r} does not mark where they end: use "
                "--task embedded_steps, or name a process reward, --reward exact_match mine.py:f with "
                f"@reward(process=True){pattern}"
            )
    if not outcome:
        if not task.rewards:
            raise RunError(
                f"task {task.name!r} has no reward of its own: choose one, e.g. --reward exact_match or --reward math"
            )
        outcome = tuple(resolve_reward(name) for name in task.rewards)
    return (*outcome, *steps)


def _describe_reward(reward: Reward, needs: frozenset[str] | None) -> str:
    """Return a reward's name, with what is read of it."""
    name = reward.name if reward.weight == 1 else f"{reward.name}*{reward.weight:g}"
    if not reward.process_reward:
        return name
    if isinstance(reward.function, StepEnd):
        return f"steps by {reward.function.pattern!r}"
    only_ends = needs is not None and "step_end" in needs and "token_reward" not in needs
    return f"{name} (only where steps end)" if only_ends else f"{name} (of steps)"


def make_local_learner(model: nn.Module, run: Run, placement: Placement = LOCAL_PLACEMENT) -> Learner:
    """Make the learner of a run, in this process and `learner.world_size` − 1 others.

    Raises:
        ModelError: The reference cannot be read, or has another tokenizer than the policy.
        ConfigError: This is one of several torchrun processes that would each learn alone.
    """
    check_not_torchrun(run.learner.world_size)
    lora, settings = run.learner.adapters, run.algorithm.reference
    loaded = dict[int, nn.Module]()
    for i, name in enumerate(settings.models.values() if settings is not None else ()):
        if not is_server(name):
            loaded[i] = load_reference(
                name,
                load_policy_tokenizer(run.model, run.tokenizer, model, run.trust_remote_code),
                dtype=run.learner.dtype,
                device=str(next(model.parameters()).device),
                trust_remote_code=run.trust_remote_code,
            )
    reference: nn.Module | None = None
    options: dict[str, Any] = {}
    if settings is not None and settings.teachers:
        options = {"teachers": loaded} if loaded else {}
    elif loaded:
        reference = loaded[0]
        if lora is not None and run.algorithm.reward_model is not None and not adapter_configs(reference):
            reference = add_adapters(reference, lora, seed=run.seed)  # the implicit reward model starts as a copy
            reference.requires_grad_(False)
    make: Callable[..., Learner] = LocalLearner
    if run.learner.world_size > 1:  # torch.distributed takes a while to import
        from policygrad.learners.fsdp.controller import start_fsdp_learner

        make = partial(
            start_fsdp_learner,
            replicate_policy=run.sampler.engine == LOCAL and not run.max_staleness and placement.sampler is None,
            stream_weights=run.publishes_sharded,
            folder=Path(run.output) if run.output else None,
            launcher=placement.learner_processes,
        )
    spec = LearnerSpec(run.algorithm, run.lr, run.steps, run.sampling.temperature, run.learner, run.optimizer)
    return make(model, spec, reference=reference, **options)


def connect_teachers(
    stack: ExitStack, run: Run, task: Task, tokenizer: Tokenizer, run_async: AsyncRunner, phase: ProgressCallback
) -> ServedTeachers | None:
    """Connect to the teachers that are behind servers, and check them and the column that chooses between several.

    Args:
        stack: Closes the connections.
        phase: Called while a server is waited for.

    Returns:
        None if no teacher is behind a server.

    Raises:
        EngineError: A server does not answer, or fails a check.
        DataError: An example does not name its teacher.
    """
    reference = run.algorithm.reference
    if reference is None or not reference.models or "logp_ref" not in run.algorithm.needs:
        return None
    if reference.teachers:
        for example in task.rows or [task.train_example(index) for index in range(PROBE_EXAMPLES)]:
            find_teacher(example, list(reference.models), example.source or "an example")
    servers = {
        i: TeacherServer(address, tokenizer, run.teacher_server, phase)
        for i, address in enumerate(reference.models.values())
        if is_server(address)
    }
    if not servers:
        return None
    max_tokens = run.sampling.max_tokens
    lengths = [len(tokenizer.encode(e.prompt, max_tokens, e.source, e.tools).ids) for e in task.rows]
    for server in servers.values():
        stack.callback(partial(_run_closing, run_async, server))
        run_async(server.connect(max(lengths, default=0) + max_tokens))
    return ServedTeachers(servers, run_async)


def _run_closing(run_async: AsyncRunner, server: TeacherServer) -> None:
    run_async(server.close())
