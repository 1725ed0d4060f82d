"""A model on known benchmarks: data that is read before the model, prompts that need its tokenizer, scores by workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from policygrad.errors import ModelError
from policygrad.models.tokenizer import Tokenizer
from policygrad.rewards.base import Reward
from policygrad.rewards.resolve import parse_reward, resolve_reward
from policygrad.rewards.workers.pool import RewardPool, RewardScorer
from policygrad.rollout.environment import SingleTurn
from policygrad.rollout.evaluation import EvaluationResult, weighted_mean
from policygrad.rollout.rollouter import Rollouter
from policygrad.samplers.base import Sampler, SamplingParams
from policygrad.tasks.base import Example
from policygrad.tasks.benchmarks import (
    Benchmark,
    BenchmarkData,
    BenchmarkSampling,
    load_benchmark_data,
    parse_benchmarks,
)
from policygrad.training.config.run import RunOptions
from policygrad.training.evaluation import open_resources
from policygrad.training.placement import SamplerFactory
from policygrad.utils.progress import ProgressCallback, ignore_progress


def evaluate_benchmarks(
    options: RunOptions,
    benchmarks: Sequence[tuple[BenchmarkData, SamplingParams, int]],
    *,
    sampler: Sampler | SamplerFactory | None = None,
    progress: Callable[[Benchmark, int, int], None] = lambda benchmark, done, total: None,
    phase: ProgressCallback = ignore_progress,
) -> list[BenchmarkResult]:
    """Measure a model, which is loaded once, on several benchmarks. Raises PolicygradError if something is missing or does not
    fit; the message says what to change.

    Args:
        options: The model, and how it is loaded and scored; task and rewards are ignored.
        benchmarks: Of each its data, how completions are sampled, and how many for each problem.
    """
    check_benchmark_rewards([data.benchmark for data, _, _ in benchmarks])
    longest = max((sampling.max_tokens for _, sampling, _ in benchmarks), default=1)
    options = replace(
        options,
        task=_NoTask(),
        eval_data=None,
        row_map=None,
        reward=(),
        environment=None,
        sampling=replace(options.sampling, max_tokens=longest),
        evaluation=replace(options.evaluation, max_tokens=None),
    )
    make_pool = partial(RewardPool.from_config, config=options.rewards, progress=phase)
    with open_resources(options, None, sampler, None, phase, has_rewards=False) as resources:
        prepared = [prepare_benchmark(*benchmark, resources.tokenizer) for benchmark in benchmarks]
        return [each.evaluate(resources.rollouter, make_pool, partial(progress, each.benchmark)) for each in prepared]


@dataclass(frozen=True)
class _NoTask:
    """A task in the place of the benchmarks, whose prompts need the model's tokenizer."""

    name: str = "benchmarks"
    rewards: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    eval_on_train: bool = False
    rows: Sequence[Example] = ()

    def train_example(self, index: int) -> Example:
        raise IndexError("benchmarks are not trained on")

    def eval_examples(self, count: int) -> list[Example]:
        return []


def load_run_benchmarks(run: RunOptions) -> list[tuple[BenchmarkData, SamplingParams, int]]:
    """Read the data of the benchmarks that a run names, with how it samples them, after checking their graders."""
    config = run.evaluation
    benchmarks = parse_benchmarks(config.benchmarks)
    check_benchmark_rewards(benchmarks)
    loaded = []
    for benchmark in benchmarks:
        settings = benchmark.sampling
        length = config.benchmark_max_tokens or settings.max_tokens
        sampling = replace(
            run.sampling, temperature=settings.temperature, top_p=settings.top_p, top_k=0, max_tokens=length, stop=()
        )
        data = load_benchmark_data(benchmark, config.benchmark_data, config.benchmark_problems)
        loaded.append((data, sampling, config.benchmark_samples or settings.samples))
    return loaded


def check_benchmark_rewards(benchmarks: Sequence[Benchmark]) -> None:
    """Raise ConfigError if a benchmark's grader lacks a library or a sandbox."""
    for benchmark in benchmarks:
        for name in benchmark.rewards:
            resolve_reward(name)


@dataclass(frozen=True)
class BenchmarkResult:
    """A model's results on a benchmark."""

    benchmark: Benchmark
    settings: BenchmarkSampling  # as the completions were sampled
    result: EvaluationResult
    weights: Mapping[str, tuple[int, ...]]  # of a further figure: each problem's weight
    messages: tuple[str, ...] = ()  # about the settings

    @property
    def figures(self) -> dict[str, tuple[float, float]]:
        """The benchmark's further figures by name, each with its standard error over problems."""
        figures = {}
        for metric in self.benchmark.metrics:
            values = self.result.reward_per_problem(parse_reward(metric.reward).title)
            weights = self.weights.get(metric.name, (1,) * len(values))
            figures[metric.name] = weighted_mean(values, weights)
        return figures

    @property
    def metrics(self) -> dict[str, float]:
        """Its metrics for a run's log, under `eval/NAME/`."""
        name, result, k = self.benchmark.metric_name, self.result, self.settings.samples
        metrics = {f"eval/{name}/mean": result.mean, f"eval/{name}/stderr": result.standard_error()}
        if k > 1:
            metrics |= {f"eval/{name}/pass_at_{k}": result.pass_at(k), f"eval/{name}/majority": result.majority}
        for figure, (value, error) in self.figures.items():
            metrics |= {f"eval/{name}/{figure}": value, f"eval/{name}/{figure}_stderr": error}
        return metrics | {f"eval/{name}/truncated_ratio": result.num_truncated / max(1, k * len(result.problems))}


@dataclass(frozen=True)
class PreparedBenchmark:
    """A benchmark's prompts for one model."""

    benchmark: Benchmark
    examples: Sequence[Example]
    sampling: SamplingParams
    samples: int
    weights: Mapping[str, tuple[int, ...]]
    messages: tuple[str, ...] = ()

    @property
    def metric_directions(self) -> dict[str, bool]:
        """The names of `BenchmarkResult.metrics` by which models can be compared, and whether a higher value is better."""
        name, k = self.benchmark.metric_name, self.samples
        higher = ["mean", *((f"pass_at_{k}", "majority") if k > 1 else ()), *(m.name for m in self.benchmark.metrics)]
        return {f"eval/{name}/{each}": True for each in higher} | {f"eval/{name}/truncated_ratio": False}

    def evaluate(
        self,
        rollouter: Rollouter,
        make_pool: Callable[[Sequence[Reward]], RewardScorer],
        progress: Callable[[int, int], None],
    ) -> BenchmarkResult:
        """Sample and score, with the rollouter's sampler and the benchmark's own rewards."""
        with make_pool(tuple(map(resolve_reward, self.benchmark.rewards))) as pool:
            scored = replace(rollouter, score=pool.score, score_steps=None, pool=pool, environment=SingleTurn)
            result = scored.evaluate(self.examples, self.samples, self.sampling, progress)
        sampling = self.sampling
        settings = BenchmarkSampling(sampling.temperature, sampling.top_p, sampling.max_tokens, self.samples)
        return BenchmarkResult(self.benchmark, settings, result, self.weights, self.messages)


def prepare_benchmark(
    data: BenchmarkData, sampling: SamplingParams, samples: int, tokenizer: Tokenizer
) -> PreparedBenchmark:
    """Make a benchmark's prompts for a model, and lower the length of completions to what it has room for.

    Raises:
        ModelError: A prompt alone is too long for the model.
    """
    benchmark, messages = data.benchmark, list[str]()
    chat = getattr(tokenizer.hf, "chat_template", None) is not None
    if not chat:
        messages.append(f"{benchmark.key}: {tokenizer.name} has no chat template, so prompts are plain text")
    examples = data.make_examples(chat=chat)
    if (positions := tokenizer.context_length) is not None:
        try:
            lengths = [len(tokenizer.encode(x.prompt, 1, x.source or benchmark.key).ids) for x in examples]
        except ModelError as error:
            raise ModelError(f"benchmark {benchmark.key} does not fit the model: {error}") from error
        room = positions - max(lengths)
        if room < sampling.max_tokens:
            messages.append(
                f"{benchmark.key}: max_tokens is {room} instead of {sampling.max_tokens}, since the model has {positions} "
                f"positions and the longest prompt {max(lengths)} tokens"
            )
            sampling = replace(sampling, max_tokens=room)
    weights = {}
    for metric in benchmark.metrics:
        if metric.per:
            weights[metric.name] = tuple(len(_get_list(columns, metric.per)) for _, columns in data.rows)
    return PreparedBenchmark(benchmark, examples, sampling, samples, weights, tuple(messages))


def _get_list(columns: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = columns.get(name)
    return value if isinstance(value, (list, tuple)) else ()
