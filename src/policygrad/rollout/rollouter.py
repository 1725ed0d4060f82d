"""The rollout: examples → environments ⇄ sampler → trajectories → rewards → batch. Training and evaluation share this pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, merge
from policygrad.models.tokenizer import Tokenizer
from policygrad.rewards.builtin import find_answer_extractor
from policygrad.rewards.workers.pool import RewardScorer
from policygrad.rollout.batching import (
    ALL_EXCLUDED_NOTE,
    ON_REQUEST,
    batch_groups,
    count_trained,
    measure_rollout,
    next_examples,
)
from policygrad.rollout.dynamic_sampling import (
    EvaluateFn,
    SamplingRound,
    fill_required_fields,
    fill_step,
    groups_to_drop,
)
from policygrad.rollout.environment import DEFAULT_TIMEOUT, SingleTurn, find_capabilities
from policygrad.rollout.providers import (
    Collected,
    FieldProvider,
    ProviderContext,
    Stage,
    choose_providers,
    run_providers,
)
from policygrad.rollout.runners import EnvironmentKind, EpisodeContext, make_runner
from policygrad.rollout.scoring import (
    ScoreFn,
    ScoreStepsFn,
    ScoringResult,
    reads_step_scores,
    score_groups,
    score_reasoning_steps,
    score_while_sampling,
)
from policygrad.rollout.trajectory import (
    EVALUATE,
    TRAIN,
    EpisodeGroup,
    EpisodeSpec,
    RolloutConfig,
    RolloutRequest,
)
from policygrad.samplers.base import LendsMemory, Sampler, SamplingParams, SupportsInFlightUpdates
from policygrad.tasks.base import Example, encode_level_index
from policygrad.utils.async_runner import AsyncRunner
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.weight_sync.base import PublishedWeights

if TYPE_CHECKING:
    from policygrad.rollout.evaluation import EvaluationResult


@dataclass(frozen=True, eq=False)
class Rollout:
    """The scored episodes of one step: `batch` to train on, `groups` with the texts."""

    batch: Batch
    groups: tuple[EpisodeGroup, ...]
    """In the order of the batch's rows."""
    position: int
    """Index of the task's next example."""
    metrics: Metrics
    messages: tuple[str, ...] = ()
    """Reward failures, one message per kind, and a note when dynamic sampling could not fill the step."""
    leftover_groups: tuple[EpisodeGroup, ...] = ()
    """Groups that wait for the next rollout: those beyond the step's size, which it begins with, or a replay buffer's."""

    @property
    def prompts(self) -> tuple[Any, ...]:
        """The task's prompt of each episode."""
        return tuple(g.spec.example.prompt for g in self.groups for _ in g.trajectories)

    @property
    def completions(self) -> tuple[str, ...]:
        """The text of each episode."""
        return tuple(t.text for g in self.groups for t in g.trajectories)

    @property
    def num_sampled_tokens(self) -> int:
        """All tokens sampled for this step, those of dropped groups and extra samples included."""
        return int(self.metrics["tokens/sampled"].value)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Sampled tokens of each episode. Unlike `batch.lengths`, not 0 where a reward failed or a filter masked the episode."""
        return tuple(t.num_sampled_tokens for g in self.groups for t in g.trajectories)


@dataclass(frozen=True, eq=False)
class Rollouter:
    """Runs episodes on a task's examples and scores them."""

    examples: Callable[[int], Example]
    """Returns the task's i-th training example."""
    tokenizer: Tokenizer
    sampler: Sampler
    score: ScoreFn | None
    """The reward functions; None = the environment gives all rewards."""
    seed: int = 0
    score_steps: ScoreStepsFn | None = None
    """Splits completions into reasoning steps and scores these; None = no reasoning steps."""
    environment: EnvironmentKind = SingleTurn
    run_async: AsyncRunner = field(default_factory=AsyncRunner)
    pool: RewardScorer | None = None
    """The pool that `score` belongs to, to score finished completions while others are sampled; None = score all at the end."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds allowed for one call of an environment."""
    progress: ProgressCallback = ignore_progress
    """Receives which environment call is being waited for."""
    tolerate_timeouts: bool = False
    """Continue the rollout even if an environment method times out in every call."""
    providers: tuple[FieldProvider, ...] = ()
    """What fills fields of the batch in this run, beside the providers that the algorithm needs by itself."""
    example_index: Callable[[int], int] = int
    """Returns the index of the training example at a position of the run."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while episodes are run: sampler and pool process one batch of episodes at a time, also with several threads."""

    def update_weights(self, weights: PublishedWeights) -> Metrics:
        """Use these weights for all further episodes. Returns the metrics of the transfer."""
        return self.run_async(self.sampler.update(weights)) or {}

    def lend_memory(self) -> Metrics:
        """Let a sampler on the learner's GPU give its memory to the learner, until weights are updated or episodes are run."""
        return self.run_async(self.sampler.lend_memory()) if isinstance(self.sampler, LendsMemory) else {}

    @property
    def is_single_answer(self) -> bool:
        """True if an episode is one completion of the example's prompt."""
        return find_capabilities(self.environment).is_single_answer

    @property
    def in_flight(self) -> bool:
        """True if `update_weights` may be called while another thread collects; sampling then continues with the new weights."""
        return isinstance(self.sampler, SupportsInFlightUpdates) and self.sampler.in_flight

    def time_before(self, step: int) -> Metrics:
        """Return the seconds that providers took for a step before its rollout, which are logged with it."""
        return merge(*(provider.time_before(step) for provider in self.providers))

    def cancel(self) -> None:
        """Abort the sampling of other threads, which raises an error there."""
        self.run_async.cancel()

    def play(
        self, specs: Sequence[EpisodeSpec], samples_per_prompt: int, sampling: SamplingParams
    ) -> list[EpisodeGroup]:
        """Run `samples_per_prompt` episodes for each spec, without scoring them."""
        context = EpisodeContext(self.sampler, self.tokenizer, self.timeout, self.progress, self.tolerate_timeouts)
        return self.run_async(make_runner(self.environment, context)(specs, samples_per_prompt, sampling))

    def collect(
        self,
        algorithm: Algorithm,
        config: RolloutConfig,
        request: RolloutRequest = RolloutRequest(),  # noqa: B008  # frozen
        evaluate: EvaluateFn | None = None,
    ) -> Rollout:
        """Collect one step: `prompts_per_step` groups of `samples_per_prompt` episodes, from example `request.position` on.

        A filter that refills (dynamic sampling) drops groups and samples further prompts, at most `sampling_rounds` times the
        step's. If the step is still not full, dropped groups fill it with weight 0, the others are reweighted, and a note
        reports it. A replay buffer puts groups of earlier steps in their place.

        Args:
            request: Step, position in the task, and leftover groups of the previous rollout, for filters that keep groups.
            evaluate: The learner's `evaluate`, which fills the batch fields that filters need.
        """
        needs = algorithm.all_needs
        # the run's rewards decide whether completions have steps, whoever reads them
        filled = needs - {"step_end"} if self.score_steps is None else needs | {"step_end"}
        providers = choose_providers(algorithm, filled, self.providers)
        tokenizer = self.tokenizer
        for provider in providers:
            provider.check(is_single_answer=self.is_single_answer)
            tokenizer = provider.prepare_tokenizer(tokenizer)
        if tokenizer is not self.tokenizer:
            return replace(self, tokenizer=tokenizer).collect(algorithm, config, request, evaluate)
        replacing = next((part for part in algorithm.filters if part.replaces_groups), None)
        excluded = frozenset[int]().union(*(part.excluded_examples for part in algorithm.filters))
        level = next((part.task_level for part in algorithm.filters if part.task_level is not None), 0)

        def index(i: int) -> int:
            return encode_level_index(self.example_index(i), level)

        def example(i: int) -> Example:
            return self.examples(index(i))

        def sample(count: int, position: int) -> SamplingRound:
            chosen, all_excluded = next_examples(example, count, position, excluded)
            max_tokens = config.sampling.max_tokens
            keys = [(self.seed, TRAIN, request.step, index(i)) for i, _ in chosen]
            specs = [EpisodeSpec(x, key, max_tokens) for (_, x), key in zip(chosen, keys, strict=True)]
            groups, scoring = self._play_and_score(specs, config.samples_per_prompt, config.sampling)
            groups, step_scoring = score_reasoning_steps(
                groups, self.score_steps, self.tokenizer.decode, use_scores=reads_step_scores(needs)
            )
            scoring |= ScoringResult(messages=(ALL_EXCLUDED_NOTE,) * all_excluded) | step_scoring
            batch = batch_groups(groups)
            dropped = groups_to_drop(groups, batch, replacing, evaluate)
            return SamplingRound(groups, batch, dropped, scoring, chosen[-1][0] + 1)

        context = ProviderContext(needs, request.step, config.sampling, self.tokenizer, self.play, self._score)
        with self.lock:
            step = fill_step(sample, config.prompts_per_step, request, replacing)
            reuse = step.groups == list(step.rounds[0].groups) and not ON_REQUEST & needs
            batch = step.rounds[0].batch if reuse else batch_groups(step.groups, needs)
            collected = Collected(batch, step.groups, step.scoring)
            collected = run_providers(providers, collected, context, Stage.EPISODES, Stage.MARKS)
            batch = fill_required_fields(collected.batch, algorithm.filter_needs, evaluate)
            collected = replace(collected, batch=algorithm.apply_filters(batch, refilled=True))
            collected = run_providers(providers, collected, context, Stage.SCORES, Stage.ROWS)
        collected = run_providers(providers, collected, context, Stage.READINGS, Stage.TEACHING)
        batch, scoring = collected.batch, collected.scoring
        metrics = merge(
            measure_rollout([(r.groups, r.batch) for r in step.rounds]),
            scoring.metrics,
            step.metrics,
            count_trained(sum(len(r.batch.mask) for r in step.rounds), batch),
        )
        groups = tuple(collected.groups)
        return Rollout(batch, groups, step.position, metrics, scoring.messages, step.leftover_groups)

    def evaluate(
        self,
        examples: Sequence[Example],
        samples_per_prompt: int,
        sampling: SamplingParams,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> EvaluationResult:
        """Run `samples_per_prompt` episodes of each evaluation example.

        Random numbers are the same in every evaluation, so that two evaluations differ only by the weights.
        """
        from policygrad.rollout.evaluation import EVAL_CHUNK, summarise_evaluation

        groups, scoring = list[EpisodeGroup](), ScoringResult()
        reported = 0

        def report(num_completions: int) -> None:
            """Report a part of a chunk, in problems."""
            nonlocal reported
            if (done := len(groups) + num_completions // samples_per_prompt) > reported:
                reported = done
                progress(done, len(examples))

        for first in range(0, len(examples), EVAL_CHUNK):
            chunk = enumerate(examples[first : first + EVAL_CHUNK], first)
            specs = [EpisodeSpec(x, (self.seed, EVALUATE, 0, i), sampling.max_tokens) for i, x in chunk]
            with self.lock:
                chunk_groups, result = self._play_and_score(specs, samples_per_prompt, sampling, report)
            groups, scoring = [*groups, *chunk_groups], scoring | result
            report(0)
        extract_answer = find_answer_extractor(self.pool.rewards if self.pool else ())
        return summarise_evaluation(groups, scoring.messages, extract_answer)

    def play_and_score(
        self, specs: Sequence[EpisodeSpec], samples_per_prompt: int, sampling: SamplingParams
    ) -> tuple[list[EpisodeGroup], ScoringResult]:
        """Run and score `samples_per_prompt` episodes for each spec."""
        with self.lock:
            return self._play_and_score(specs, samples_per_prompt, sampling)

    def _play_and_score(
        self,
        specs: Sequence[EpisodeSpec],
        samples_per_prompt: int,
        sampling: SamplingParams,
        on_finished: Callable[[int], None] | None = None,
    ) -> tuple[list[EpisodeGroup], ScoringResult]:
        """Run and score episodes; finished completions are scored while others are sampled, if that saves time, and counted."""
        pool, decode = self.pool, self.tokenizer.decode
        if not self.is_single_answer:  # a completion is a turn
            pool, on_finished = None, None
        with score_while_sampling(pool, self.sampler, specs, samples_per_prompt, decode, on_finished) as score:
            groups = self.play(specs, samples_per_prompt, sampling)
            if not any(t.failure for group in groups for t in group.trajectories):
                return score_groups(groups, score or self.score)
        return score_groups(groups, self.score)  # what was scored meanwhile counted on every completion

    def _score(self, groups: list[EpisodeGroup]) -> tuple[list[EpisodeGroup], ScoringResult]:
        return score_groups(groups, self.score)
