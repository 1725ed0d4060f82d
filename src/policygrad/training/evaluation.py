"""The two halves of the pipeline on their own: a rollout without training; an evaluation on held-out problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory

from policygrad.core.algorithm import Algorithm
from policygrad.rollout.evaluation import EvaluationResult
from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.runners import EnvironmentKind
from policygrad.rollout.trajectory import RolloutConfig, RolloutRequest
from policygrad.samplers.base import Sampler
from policygrad.samplers.config import LOCAL
from policygrad.training.config.option_checks import check_environment_timeout
from policygrad.training.config.run import Run, RunOptions
from policygrad.training.placement import SamplerFactory
from policygrad.training.setup import Resources, load_resources
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.weight_sync.base import PublishedWeights


def collect(
    run: Run | None = None,
    *,
    step: int = 1,
    position: int = 0,
    sampler: Sampler | SamplerFactory | None = None,
    environment: EnvironmentKind | None = None,
) -> Rollout:
    """Return the rollout of one step of a run, without training: its batch, texts and metrics. Raises PolicygradError if
    something is missing or does not fit; the message says what to change."""
    run = (run or Run()).resolve()
    with open_resources(run, run.algorithm, sampler, environment, ignore_progress) as resources:
        config = RolloutConfig(run.sampling, run.prompts_per_step, run.effective_samples_per_prompt)
        return resources.rollouter.collect(run.algorithm, config, RolloutRequest(step, position))


def evaluate(
    options: RunOptions | None = None,
    *,
    sampler: Sampler | SamplerFactory | None = None,
    environment: EnvironmentKind | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    phase: ProgressCallback = ignore_progress,
) -> EvaluationResult:
    """Evaluate a model on a task's held-out problems. Raises PolicygradError if something is missing or does not fit; the
    message says what to change.

    Args:
        options: The model, the task, and how to sample and score: `evaluation.problems` problems with
            `evaluation.samples_per_prompt` completions each, sampled as `sampling` says and `evaluation` changes. Options of
            training are ignored.
        sampler: A sampler other than the configured one.
        environment: An environment other than the configured one.
        progress: Called with (completed, total) problems.
        phase: Called with what rewards, servers or environments are being waited for.
    """
    options = options or RunOptions()
    check_environment_timeout(options.environment_timeout)
    with open_resources(options, None, sampler, environment, phase) as resources:
        examples = resources.task.eval_examples(options.evaluation.problems)
        samples = options.evaluation.samples_per_prompt
        sampling = options.evaluation.resolve_sampling(options.sampling)
        return resources.rollouter.evaluate(examples, samples, sampling, progress)


@contextmanager
def open_resources(
    options: RunOptions,
    algorithm: Algorithm | None,
    sampler: Sampler | SamplerFactory | None,
    environment: EnvironmentKind | None,
    phase: ProgressCallback,
    *,
    has_rewards: bool = True,
) -> Iterator[Resources]:
    """Load everything, with the model's weights published to the engine, if there is one."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="policygrad-"))
        options = replace(options, output=folder)
        resources = load_resources(
            stack,
            options,
            algorithm,
            sampler=sampler,
            environment=environment,
            phase=phase,
            has_rewards=has_rewards,
        )
        if options.sampler.engine != LOCAL:
            weights = dict(resources.model.named_parameters())
            resources.rollouter.update_weights(PublishedWeights(0, weights))
        yield resources
