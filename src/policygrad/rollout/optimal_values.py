"""Optimal values V* of a run's training prompts, estimated from samples of the initial policy before the first update (A*-PO)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from policygrad.core.advantages import OptimalValue
from policygrad.core.base import Part
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum, list_means
from policygrad.errors import ConfigError, RewardError, RunError
from policygrad.rollout.providers import Collected, FieldProvider, ProviderContext, RunPlan
from policygrad.rollout.scoring import ScoringResult
from policygrad.rollout.trajectory import OPTIMAL, EpisodeGroup, EpisodeSpec
from policygrad.samplers.base import SamplingParams
from policygrad.tasks.base import Example
from policygrad.utils.filesystem import read_json, write_atomically
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.utils.spans import span

if TYPE_CHECKING:
    from policygrad.rollout.rollouter import Rollouter

OPTIMAL_VALUES = "optimal_values.json"
"""The file in a run's folder: the number of prompts, and the rewards of those done so far."""
CHUNK = 64  # prompts between two lines of progress, and the most that a killed process loses


@dataclass(frozen=True)
class OptimalValues(FieldProvider):
    """V* of the first prompts of a task. A run with them trains on these prompts alone, over and over."""

    values: tuple[float, ...]
    """By example; NaN where no completion has a reward."""
    num_sampled_tokens: int = 0
    """Tokens that the estimates took, counted with the first step's."""
    seconds: float = 0.0
    """Seconds that they took, counted likewise."""
    fields: ClassVar[frozenset[str]] = frozenset({"baseline"})

    @classmethod
    def for_part(cls, part: Part) -> FieldProvider:
        raise ConfigError(
            "OptimalValue needs values that are estimated before the first update: train with pg.train or pg.Trainer, or give the "
            "Rollouter those of policygrad.rollout.optimal_values.with_optimal_values"
        )

    @classmethod
    def describe_run(cls, part: OptimalValue, plan: RunPlan) -> str:
        """Describe the estimate, for the run's description. Raises ConfigError as `count_valued_prompts` does."""
        number = count_valued_prompts(part, plan)
        return f"{number:,} prompts, each valued by {part.samples} completions before the first update"

    @classmethod
    def prepare_run(
        cls,
        part: OptimalValue,
        plan: RunPlan,
        rollouter: Rollouter,
        folder: Path,
        *,
        is_initial: bool,
        progress: ProgressCallback = ignore_progress,
    ) -> tuple[Rollouter, tuple[str, ...]]:
        """Estimate the values of a run's training prompts, or read those in its folder; see `with_optimal_values`."""
        text, number = "estimating optimal values", count_valued_prompts(part, plan)
        with span("optimal values"):
            prepared = with_optimal_values(
                rollouter,
                part,
                number,
                plan.sampling,
                folder / OPTIMAL_VALUES,
                is_initial=is_initial,
                progress=lambda done, total: progress(text, done, total),
            )
        progress("", 0, 0)
        return prepared

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        batch = self.add_to(collected.batch, collected.groups)
        return collected.with_result(batch, ScoringResult(self.metrics(context.step)))

    def example_index(self, position: int) -> int:
        """Return the index of the training example at a position of the run."""
        return position % len(self.values)

    def add_to(self, batch: Batch, groups: Sequence[EpisodeGroup]) -> Batch:
        """Fill `baseline` with V* of each completion's prompt."""
        by_group = [self.values[group.spec.key[3]] for group in groups]
        return replace(batch, baseline=torch.tensor(by_group, dtype=batch.reward.dtype)[batch.group])

    def time_before(self, step: int) -> Metrics:
        return {"time/optimal_values": Sum(self.seconds)} if step == 1 else {}

    def metrics(self, step: int) -> Metrics:
        """Return the metrics of the first step; none of later ones."""
        if step != 1:
            return {}
        metrics: Metrics = {name: Sum(float(self.num_sampled_tokens)) for name in ("tokens/values", "tokens/sampled")}
        return metrics | list_means({"reward/optimal_value": [v for v in self.values if v == v]})


def count_valued_prompts(part: OptimalValue, plan: RunPlan) -> int:
    """Return how many prompts are valued before the first update, and trained on.

    Raises:
        ConfigError: They are fewer than a step takes, or their samples alone exceed the token budget.
    """
    option, per_step = "--algorithm.advantage.optimal-value.prompts", plan.prompts_per_step
    if part.prompts is not None and part.prompts < per_step:
        raise ConfigError(
            f"{option} {part.prompts} is less than --prompts-per-step {per_step}, and a step would have prompts twice: set "
            f"it to {per_step} or more"
        )
    visited = plan.steps * per_step
    count = part.prompts or max(per_step, min(plan.num_rows or visited, visited))
    if plan.tokens is not None and count * part.samples >= plan.tokens:
        raise ConfigError(
            f"{plan.algorithm.name} samples {part.samples} completions of {count:,} prompts before its first update, and "
            f"--tokens {plan.tokens:,} would be used up by then: set {option} to fewer prompts, or fewer --steps"
        )
    return count


def with_optimal_values(
    rollouter: Rollouter,
    part: OptimalValue,
    num_prompts: int,
    sampling: SamplingParams,
    file: Path,
    *,
    is_initial: bool,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Rollouter, tuple[str, ...]]:
    """Return a rollouter that trains on the first prompts with their optimal values, and messages of failed rewards.

    For the arguments see `estimate_optimal_values`.
    """
    values, messages = estimate_optimal_values(
        part,
        num_prompts,
        file,
        example=rollouter.examples,
        sample=lambda specs, count: rollouter.play_and_score(specs, count, sampling),
        seed=rollouter.seed,
        max_tokens=sampling.max_tokens,
        is_initial=is_initial,
        progress=progress,
    )
    providers = (*rollouter.providers, values)
    return replace(rollouter, providers=providers, example_index=values.example_index), messages


def estimate_optimal_values(
    part: OptimalValue,
    num_prompts: int,
    file: Path,
    *,
    example: Callable[[int], Example],
    sample: Callable[[list[EpisodeSpec], int], tuple[list[EpisodeGroup], ScoringResult]],
    seed: int,
    max_tokens: int,
    is_initial: bool,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[OptimalValues, tuple[str, ...]]:
    """Estimate V* of the first `num_prompts` prompts, beginning after those in `file`, which is written chunk by chunk.

    Args:
        sample: Plays and scores (specs, samples per prompt) with the current policy.
        is_initial: True if the current policy is the initial one.

    Returns:
        The values, and messages of rewards that failed; V* leaves these out.

    Raises:
        RunError: The file has not all values, and the policy is no longer the initial one.
        RewardError: No completion of a chunk of prompts has a reward.
    """
    saved: dict[str, Any] = {"prompts": num_prompts, "rewards": [], "tokens": 0, "seconds": 0.0}
    if file.exists():
        saved = _read_file(file)
    num_prompts, rewards = saved["prompts"], saved["rewards"]
    if len(rewards) < num_prompts and not is_initial:
        raise RunError(
            f"{file} has optimal values of {len(rewards)} of {num_prompts} prompts, and they are estimated with the initial "
            "policy, which the run has left: put a copy of the file back, or start the run again"
        )
    messages = list[str]()
    for first in range(len(rewards), num_prompts, CHUNK):
        progress(first, num_prompts)
        started, indices = time.perf_counter(), range(first, min(first + CHUNK, num_prompts))
        specs = [EpisodeSpec(example(i), (seed, OPTIMAL, 0, i), max_tokens) for i in indices]
        groups, scored = sample(specs, part.samples)
        messages += scored.messages
        chunk = [[t.reward for t in group.trajectories if t.reward is not None] for group in groups]
        if not any(chunk):
            raise RewardError(
                f"no completion of prompts {first} to {indices[-1]} has a reward, from which optimal values are estimated: "
                f"{'; '.join(scored.messages)}. What {file} holds is kept; resume the run once the reward works"
            )
        rewards += chunk
        saved["tokens"] += sum(t.num_sampled_tokens for group in groups for t in group.trajectories)
        saved["seconds"] += time.perf_counter() - started
        write_atomically(file, json.dumps(saved))
    values = tuple(map(part.estimate_value, rewards))
    return OptimalValues(values, saved["tokens"], saved["seconds"]), tuple(dict.fromkeys(messages))


def _read_file(file: Path) -> dict[str, Any]:
    try:
        saved = read_json(file)
        rewards, number = saved["rewards"], saved["prompts"]
        if not isinstance(number, int) or not 0 < number >= len(rewards):
            raise ValueError(f"{number!r} prompts and rewards of {len(rewards)}")
        float(saved["tokens"] + saved["seconds"] + sum(map(math.fsum, rewards)))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{file} cannot be read as a run's optimal values ({error!r}): put a copy of the file back, or start the run again"
        ) from error
    return saved  # type: ignore[no-any-return]
