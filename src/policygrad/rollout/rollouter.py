"""The rollout: examples → environments ⇄ sampler → trajectories → rewards → batch. Training and evaluation share this pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from policygrad.core.advantages import OptimalValue
from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, merge
from policygrad.core.vine import Vine
from policygrad.environments import EnvironmentFactory, SingleTurn
from policygrad.environments.agent_program import AgentProgram
from policygrad.environments.base import DEFAULT_TIMEOUT
from policygrad.environments.games import SelfPlay
from policygrad.errors import ConfigError
from policygrad.models.tokenizer import Tokenizer
from policygrad.rewards.builtin import find_answer_extractor
from policygrad.rewards.workers.pool import RewardScorer
from policygrad.rollout.agent_episodes import run_agent_episodes
from policygrad.rollout.batching import (
    ALL_EXCLUDED_NOTE,
    add_turn_states,
    batch_groups,
    count_trained,
    measure_rollout,
    next_examples,
)
from policygrad.rollout.demonstrations import add_demonstrations
from policygrad.rollout.dynamic_sampling import (
    EvaluateFn,
    SamplingRound,
    fill_required_fields,
    groups_to_drop,
    sample_until_full,
)
from policygrad.rollout.environment_calls import EnvironmentCalls
from policygrad.rollout.episodes import run_episodes
from policygrad.rollout.evaluation import EVAL_CHUNK, EvaluationResult, summarise_evaluation
from policygrad.rollout.extra_samples import add_greedy_baseline, add_prefix_values, sample_vine
from policygrad.rollout.game_episodes import run_games
from policygrad.rollout.optimal_values import OptimalValues, estimate_optimal_values
from policygrad.rollout.reference_prompts import add_reference_prompts
from policygrad.rollout.scoring import (
    ScoreFn,
    ScoreStepsFn,
    ScoringResult,
    score_groups,
    score_reasoning_steps,
    score_while_sampling,
)
from policygrad.rollout.teachers import ServedTeachers, add_teacher_positions
from policygrad.rollout.trajectory import (
    EVALUATE,
    TRAIN,
    EpisodeGroup,
    EpisodeSpec,
    RolloutConfig,
    RolloutRequest,
    add_step_marks,
)
from policygrad.samplers.base import LendsMemory, Sampler, SamplingParams, SupportsInFlightUpdates
from policygrad.tasks.base import Example, encode_level_index
from policygrad.utils.async_runner import AsyncRunner
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.utils.spans import span
from policygrad.weight_sync.base import PublishedWeights

SINGLE_TURN_OBSERVATIONS = (
    "the algorithm learns to predict what an environment writes (ObservationNLL), and the run has single answers: set "
    "--environment, or use an algorithm without it, such as grpo"
)


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
    """Groups beyond the step's size, which the next step begins with."""

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
    environment: EnvironmentFactory | AgentProgram = SingleTurn
    run_async: AsyncRunner = field(default_factory=AsyncRunner)
    pool: RewardScorer | None = None
    """The pool that `score` belongs to, to score finished completions while others are sampled; None = score all at the end."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds allowed for one call of an environment."""
    progress: ProgressCallback = ignore_progress
    """Receives which environment call is being waited for."""
    tolerate_timeouts: bool = False
    """Continue the rollout even if an environment method times out in every call."""
    teachers: ServedTeachers | None = None
    """The teachers behind servers, which score each rollout; None = the learner evaluates all."""
    optimal_values: OptimalValues | None = None
    """Values of the training prompts, for an algorithm that needs them; None = all of the task's examples are trained on."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while episodes are run: sampler and pool process one batch of episodes at a time, also with several threads."""

    def update_weights(self, weights: PublishedWeights) -> Metrics:
        """Use these weights for all further episodes. Returns the metrics of the transfer."""
        return self.run_async(self.sampler.update(weights)) or {}

    def lend_memory(self) -> Metrics:
        """Let a sampler on the learner's GPU give its memory to the learner, until weights are updated or episodes are run."""
        return self.run_async(self.sampler.lend_memory()) if isinstance(self.sampler, LendsMemory) else {}

    @property
    def in_flight(self) -> bool:
        """True if `update_weights` may be called while another thread collects; sampling then continues with the new weights."""
        return isinstance(self.sampler, SupportsInFlightUpdates) and self.sampler.in_flight

    def cancel(self) -> None:
        """Abort the sampling of other threads, which raises an error there."""
        self.run_async.cancel()

    def play(
        self, specs: Sequence[EpisodeSpec], samples_per_prompt: int, sampling: SamplingParams
    ) -> list[EpisodeGroup]:
        """Run `samples_per_prompt` episodes for each spec, without scoring them."""
        if isinstance(self.environment, AgentProgram):
            return self.run_async(
                run_agent_episodes(
                    specs,
                    samples_per_prompt,
                    sampling,
                    sampler=self.sampler,
                    encoder=self.tokenizer,
                    program=self.environment,
                    timeout=self.timeout,
                    progress=self.progress,
                )
            )
        options: dict[str, Any] = {
            "sampler": self.sampler,
            "encoder": self.tokenizer,
            "environment": self.environment,
            "calls": EnvironmentCalls(self.timeout, self.progress, tolerate_timeouts=self.tolerate_timeouts),
        }
        run = run_games if isinstance(self.environment, SelfPlay) else run_episodes
        return self.run_async(run(specs, samples_per_prompt, sampling, **options))

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
        reports it.

        Args:
            request: Step, position in the task, and leftover groups of the previous rollout, for filters that keep them.
            evaluate: The learner's `evaluate`, which fills the batch fields that filters need.
        """
        needs = algorithm.all_needs
        if "observation" in needs and self.environment is SingleTurn:
            raise ConfigError(SINGLE_TURN_OBSERVATIONS)
        if "observation" in needs and not self.tokenizer.marks_contents:
            marking = replace(self, tokenizer=replace(self.tokenizer, marks_contents=True))
            return marking.collect(algorithm, config, request, evaluate)
        refilling = next((part for part in algorithm.filters if part.refills), None)
        use_step_scores = "token_reward" in needs or "step_end" not in needs
        excluded = frozenset[int]().union(*(part.excluded_examples for part in algorithm.filters))
        level = next((part.task_level for part in algorithm.filters if part.task_level is not None), 0)

        def index(i: int) -> int:
            return encode_level_index(i if self.optimal_values is None else self.optimal_values.example_index(i), level)

        def example(i: int) -> Example:
            return self.examples(index(i))

        def sample(count: int, position: int) -> SamplingRound:
            chosen, all_excluded = next_examples(example, count, position, excluded)
            max_tokens = config.sampling.max_tokens
            keys = [(self.seed, TRAIN, request.step, index(i)) for i, _ in chosen]
            specs = [EpisodeSpec(x, key, max_tokens) for (_, x), key in zip(chosen, keys, strict=True)]
            groups, scoring = self._play_and_score(specs, config.samples_per_prompt, config.sampling)
            groups, step_scoring = score_reasoning_steps(
                groups, self.score_steps, self.tokenizer.decode, use_scores=use_step_scores
            )
            scoring |= ScoringResult(messages=(ALL_EXCLUDED_NOTE,) * all_excluded) | step_scoring
            batch = batch_groups(groups)
            dropped = groups_to_drop(groups, batch, refilling, evaluate)
            return SamplingRound(groups, batch, dropped, scoring, chosen[-1][0] + 1)

        with self.lock:
            step = sample_until_full(sample, config.prompts_per_step, request, refilling)
            groups, scoring, rounds = step.groups, step.scoring, step.rounds
            if "demonstration" in needs:
                self._require_single_turn(
                    "Demonstrations are complete answers", "an algorithm without them, such as grpo"
                )
                groups, result = add_demonstrations(groups, self.tokenizer, self._score)
                scoring |= result
            on_request = {"demonstration", "rewards", "level", "observation", "role", "peers"}
            reuse = groups == list(rounds[0].groups) and not on_request & needs
            batch = rounds[0].batch if reuse else batch_groups(groups, needs)
            marks = None if self.score_steps is None else [t.step_marks for g in groups for t in g.trajectories]
            if marks is not None:  # filters read the outcome reward: they get the ends of steps, but not their scores
                batch = add_step_marks(batch, marks, scored=False)
            batch = algorithm.apply_filters(
                fill_required_fields(batch, algorithm.filter_needs, evaluate), refilled=True
            )
            if marks is not None:
                batch = add_step_marks(batch, marks, scored=use_step_scores)
            if "turn_state" in needs:  # after the filters, which read the rewards of complete episodes
                batch = add_turn_states(batch, groups, scored="token_reward" in needs)
            batch, groups, result = self._add_extra_samples(algorithm, batch, groups, config.sampling, request.step)
            scoring |= result
            if algorithm.reference is not None and algorithm.reference.templates:
                self._require_single_turn(
                    "Reference.templates replaces the prompt of a complete answer", "a reference with templates=()"
                )
                batch, read = add_reference_prompts(batch, groups, algorithm.reference, self.tokenizer)
                scoring |= ScoringResult(read)
        if algorithm.reference is not None and algorithm.reference.teachers:
            batch = add_teacher_positions(batch, groups, algorithm.reference)
        taught: Metrics = {}
        if self.teachers is not None:
            with span("score by teachers"):
                batch, taught = self.teachers.score(batch)
        metrics = merge(
            measure_rollout([(r.groups, r.batch) for r in rounds]),
            scoring.metrics,
            step.metrics,
            count_trained(sum(len(r.batch.mask) for r in rounds), batch),
            taught,
        )
        return Rollout(batch, tuple(groups), step.position, metrics, scoring.messages, step.leftover_groups)

    def estimate_optimal_values(
        self,
        part: OptimalValue,
        num_prompts: int,
        sampling: SamplingParams,
        file: Path,
        *,
        is_initial: bool,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[Rollouter, tuple[str, ...]]:
        """Return a rollouter that trains on the first prompts with their optimal values, and messages of failed rewards.

        For the arguments see `policygrad.rollout.optimal_values.estimate_optimal_values`.
        """

        def sample(specs: list[EpisodeSpec], count: int) -> tuple[list[EpisodeGroup], ScoringResult]:
            with self.lock:
                return self._play_and_score(specs, count, sampling)

        values, messages = estimate_optimal_values(
            part,
            num_prompts,
            file,
            example=self.examples,
            sample=sample,
            seed=self.seed,
            max_tokens=sampling.max_tokens,
            is_initial=is_initial,
            progress=progress,
        )
        return replace(self, optimal_values=values), messages

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

    def _play_and_score(
        self,
        specs: Sequence[EpisodeSpec],
        samples_per_prompt: int,
        sampling: SamplingParams,
        on_finished: Callable[[int], None] | None = None,
    ) -> tuple[list[EpisodeGroup], ScoringResult]:
        """Run and score episodes; finished completions are scored while others are sampled, if that saves time, and counted."""
        pool, decode = self.pool, self.tokenizer.decode
        if self.environment is not SingleTurn:  # a completion is a turn
            pool, on_finished = None, None
        with score_while_sampling(pool, self.sampler, specs, samples_per_prompt, decode, on_finished) as score:
            groups = self.play(specs, samples_per_prompt, sampling)
            if not any(t.failure for group in groups for t in group.trajectories):
                return score_groups(groups, score or self.score)
        return score_groups(groups, self.score)  # what was scored meanwhile counted on every completion

    def _score(self, groups: list[EpisodeGroup]) -> tuple[list[EpisodeGroup], ScoringResult]:
        return score_groups(groups, self.score)

    def _add_extra_samples(
        self, algorithm: Algorithm, batch: Batch, groups: list[EpisodeGroup], sampling: SamplingParams, step: int
    ) -> tuple[Batch, list[EpisodeGroup], ScoringResult]:
        """Sample what the algorithm needs besides the episodes: prefix values, greedy baselines, or a vine in their place."""
        play, scoring = partial(self.play, sampling=sampling), ScoringResult()
        for part in algorithm.advantage:
            if part.samples_values:
                self._require_single_turn("PrefixValue continues completions", "another advantage, such as GroupMean()")
                batch, result = add_prefix_values(batch, groups, part.samples, play, self._score, step)
                scoring |= result
        if any(isinstance(part, OptimalValue) for part in algorithm.advantage):
            if self.optimal_values is None:
                raise ConfigError(
                    "OptimalValue needs values that are estimated before the first update: train with pg.train or pg.Trainer, or "
                    "give the Rollouter optimal_values (Rollouter.estimate_optimal_values)"
                )
            batch = self.optimal_values.add_to(batch, groups)
            scoring |= ScoringResult(self.optimal_values.metrics(step))
        elif "baseline" in algorithm.all_needs:
            play_greedy = partial(self.play, samples_per_prompt=1, sampling=replace(sampling, temperature=0.0))
            batch, result = add_greedy_baseline(batch, groups, play_greedy, self._score)
            scoring |= result
        for part in algorithm.advantage:
            if isinstance(part, Vine):
                self._require_single_turn("Vine continues completions", "algorithm trpo")
                batch, groups, result = sample_vine(batch, groups, part, play, self._score, step)
                scoring |= result
        return batch, groups, scoring

    def _require_single_turn(self, reason: str, alternative: str) -> None:
        if self.environment is not SingleTurn:
            raise ConfigError(
                f"{reason}, which an environment's episodes do not allow: use a task of prompts and answers, or {alternative}"
            )
