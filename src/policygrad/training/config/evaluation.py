"""Options of evaluations during a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from policygrad.core.algorithm import Algorithm
from policygrad.core.base import format_steps
from policygrad.errors import ConfigError
from policygrad.samplers.base import SamplingParams
from policygrad.training.config.option_checks import check_completion_count
from policygrad.training.config.optional_arg import optional_arg
from policygrad.utils.field_types import check_field_types, describe_idle, list_changed


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out problems, and on known benchmarks, each with its own sampling."""

    problems: int = 256
    """Number of held-out problems; 0 = no evaluation."""
    samples_per_prompt: int = 8
    """Completions per problem."""
    every: int = 0
    """Also evaluate every this many steps; 0 = only before and after training."""
    temperature: Annotated[float | None, optional_arg("FLOAT", "that of training")] = None
    """Temperature for held-out problems; 0 = greedy, with one completion per problem."""
    top_p: Annotated[float | None, optional_arg("FLOAT", "that of training")] = None
    """Nucleus for held-out problems."""
    top_k: Annotated[int | None, optional_arg("INT", "that of training")] = None
    """Number of most probable tokens for held-out problems; 0 = all."""
    max_tokens: Annotated[int | None, optional_arg("INT", "that of training")] = None
    """Maximum sampled tokens per completion of a held-out problem."""
    benchmarks: Annotated[tuple[str, ...], optional_arg("NAME", "none")] = ()
    """Known benchmarks to measure at the same points: gsm8k,math500,aime24.
    policygrad eval --benchmark list shows all of them."""
    benchmark_data: Annotated[str | None, optional_arg("DIR", "the hub")] = None
    """Folder with the benchmarks' data, NAME.jsonl or .parquet."""
    benchmark_problems: int = 0
    """Number of problems of each benchmark, spread over its data; 0 = all."""
    benchmark_samples: Annotated[int | None, optional_arg("INT", "the benchmark's own")] = None
    """Completions for each problem of a benchmark."""
    benchmark_max_tokens: Annotated[int | None, optional_arg("INT", "the benchmark's own")] = None
    """Maximum sampled tokens per completion of a benchmark."""

    def __post_init__(self) -> None:
        check_field_types(self, "evaluation")
        if self.problems < 0 or self.every < 0 or self.samples_per_prompt < 1:
            raise ConfigError(
                "evaluation.problems and evaluation.every must be at least 0 and evaluation.samples_per_prompt at least 1, not "
                f"{self.problems}, {self.every}, {self.samples_per_prompt}"
            )
        counts = (self.benchmark_samples, self.benchmark_max_tokens)
        if self.benchmark_problems < 0 or any(count is not None and count < 1 for count in counts):
            raise ConfigError(
                "evaluation.benchmark_problems must be at least 0, and evaluation.benchmark_samples and "
                "evaluation.benchmark_max_tokens at least 1"
            )
        try:
            self.resolve_sampling(SamplingParams())
        except ConfigError as error:
            raise ConfigError(f"evaluation: {error}") from error
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ConfigError(
                f"evaluation.temperature=0 makes all {self.samples_per_prompt} samples of a problem equal: set "
                "evaluation.samples_per_prompt to 1, or a temperature above 0"
            )
        if self.benchmarks:
            from policygrad.tasks.benchmarks import parse_benchmarks

            parse_benchmarks(self.benchmarks)

    def resolve_sampling(self, training: SamplingParams) -> SamplingParams:
        """Return how completions of held-out problems are sampled: as in training, but for what is set here."""
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
        return replace(training, **{name: value for name, value in own.items() if value is not None})

    @property
    def measures_problems(self) -> bool:
        """True if held-out problems are measured during training."""
        return bool(self.every and self.problems)

    @property
    def measures_during_training(self) -> bool:
        """True if held-out problems or benchmarks are measured during training."""
        return bool(self.every and (self.problems or self.benchmarks))

    def find_idle(self, steps: int) -> Iterator[str]:
        """Yield options that can have no effect in a run of so many steps, each with a remedy."""
        if not self.problems:
            own = ("samples_per_prompt", "temperature", "top_p", "top_k", "max_tokens")
            reason = "evaluation.problems is 0. Set it above 0, or leave this out"
            yield from describe_idle(list_changed("evaluation", self, own), reason)
        elif self.top_k == 1:
            reason = "evaluation.top_k = 1 leaves the most probable token alone. Set it to 0 (all tokens), or above 1"
            yield from describe_idle(
                list_changed("evaluation", self, ("temperature", "top_p", "samples_per_prompt")), reason
            )
        if not self.benchmarks:
            of_benchmarks = ("benchmark_data", "benchmark_problems", "benchmark_samples", "benchmark_max_tokens")
            reason = "no benchmark is measured. Name some, --evaluation.benchmarks gsm8k, or leave this out"
            yield from describe_idle(list_changed("evaluation", self, of_benchmarks), reason)
        if self.every and not self.measures_during_training:
            reason = "nothing is evaluated. Set --evaluation.problems above 0, or leave it out"
            yield from describe_idle([f"evaluation.every = {self.every}"], reason)
        elif self.every >= steps:
            reason = f"the run has {format_steps(steps)}, and is evaluated at its end anyway. Set it below {steps}"
            yield from describe_idle([f"evaluation.every = {self.every}"], reason)

    def find_unused(self, found: int, *, has_rewards: bool) -> Iterator[str]:
        """Yield options that the task leaves without effect, each with a remedy; found: the held-out problems that it has."""
        if not has_rewards:
            own = ("problems", "samples_per_prompt", "every", "temperature", "top_p", "top_k", "max_tokens")
            reason = "the task has no reward, and the algorithm needs none. Name one, --reward NAME, or leave this out"
            yield from describe_idle(list_changed("evaluation", self, own), reason)
        elif found < self.problems and (changed := list_changed("evaluation", self, ["problems"])):
            yield f"{changed[0]} is more than the task's {found} held-out problems, which are all used: --eval-data FILE has others"

    def check(self, algorithm: Algorithm) -> None:
        """Raise ConfigError for too many completions, or for too few evaluations for the algorithm."""
        check_completion_count(
            "evaluation.problems", self.problems, "evaluation.samples_per_prompt", self.samples_per_prompt
        )
        reference = algorithm.reference
        if reference is not None and reference.refresh_after_stall and not self.measures_problems:
            raise ConfigError(
                f"Reference.refresh_after_stall = {reference.refresh_after_stall} counts periodic evaluations without "
                "improvement, and this run has none: set evaluation.every (and evaluation.problems) above 0, or "
                "refresh_after_stall to 0"
            )
