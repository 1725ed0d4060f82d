"""The two halves of the pipeline alone: a rollout without training, and a model measured on held-out problems."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from policygrad.environments import EnvironmentFactory
from policygrad.environments.base import DEFAULT_TIMEOUT
from policygrad.environments.registry import resolve_environment
from policygrad.rewards.config import RewardConfig, SandboxChoice
from policygrad.rollout.evaluation import EvaluationResult
from policygrad.rollout.rollouter import Rollout
from policygrad.samplers.base import Sampler, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.registry import WEIGHTS_FOLDER, make_engine_factory
from policygrad.training.config.run import Run, check_environment_timeout
from policygrad.training.setup import Needed, Resources, SamplerFactory, load_resources, needed_for
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.weight_sync.base import PublishedWeights


def collect(
    run: Run | None = None,
    *,
    step: int = 1,
    position: int = 0,
    sampler: Sampler | SamplerFactory | None = None,
    environment: EnvironmentFactory | None = None,
) -> Rollout:
    """One step's rollout of a run, without training: its batch, its texts, its metrics.

    Raises:
        PolicygradError: what does not exist or does not fit, with the way out.
    """
    run = (run or Run()).resolve()
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="policygrad-"))
        found = _drawing(stack, needed_for(replace(run, output=folder), sampler, environment))
        return found.rollouter.collect(
            run.algorithm,
            run.sampling,
            prompts_per_step=run.prompts_per_step,
            samples_per_prompt=run.effective_samples_per_prompt,
            step=step,
            position=position,
        )


def evaluate(
    model: Any,
    task: Any = "embedded",
    *,
    reward: tuple[Any, ...] = (),
    problems: int = 256,
    samples: int = 8,
    sampling: SamplingParams | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    tokenizer: Any = None,
    held_out: Any = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "fp32",
    budget: float = 10.0,
    memory: str = "4GiB",
    sandbox: SandboxChoice = "none",
    reward_environment: tuple[str, ...] = (),
    show_output: bool = False,
    phase: ProgressCallback = ignore_progress,
    sampler: Sampler | SamplerFactory | None = None,
    environment: EnvironmentFactory | str | None = None,
    environment_timeout: float = DEFAULT_TIMEOUT,
    trust_remote_code: bool = False,
    map: Any = None,
    skip_bad_rows: bool = False,
    engine: SamplerConfig | None = None,
) -> EvaluationResult:
    """Scores of a model on a task's held-out problems, as `Run`'s options of these names say; budget, memory, sandbox,
    show_output and reward_environment as `RewardConfig`'s.

    phase: is told what rewards, servers or environments are waited for.
    engine: `Run.sampler`, whose servers are given the model's weights and draw.

    Raises:
        PolicygradError: what does not exist or does not fit, with the way out.
    """
    sampling, engine = sampling or SamplingParams(), engine or SamplerConfig()
    check_environment_timeout(environment_timeout)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="policygrad-"))) / WEIGHTS_FOLDER
        needed = Needed(
            model,
            task,
            sampling.max_tokens,
            tokenizer,
            reward,
            held_out=held_out,
            seed=seed,
            device=device,
            dtype=dtype,
            rewards=RewardConfig(memory, reward_environment, sandbox, show_output, timeout=budget),
            phase=phase,
            sampler=sampler,
            engine=make_engine_factory(engine, folder, sampling, sampler, phase),
            environment=resolve_environment(environment),
            environment_timeout=environment_timeout,
            trust_remote_code=trust_remote_code,
            map=map,
            skip_bad_rows=skip_bad_rows,
        )
        found = _drawing(stack, needed)
        return found.rollouter.evaluate(found.task.eval_examples(problems), samples, sampling, progress)


def _drawing(stack: ExitStack, needed: Needed) -> Resources:
    """What is needed, loaded; an engine has the model's weights."""
    found = load_resources(stack, needed)
    if needed.engine is not None:
        found.rollouter.update_weights(PublishedWeights(0, dict(found.model.named_parameters())))
    return found
