"""Everything left of the batch: examples → environments ⇄ sampler → trajectories → rewards → batch. For training, evaluation
and prefix values it is one pipeline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, merge
from policygrad.core.vine import Vine
from policygrad.environments import EnvironmentFactory, SingleTurn
from policygrad.environments.base import DEFAULT_TIMEOUT
from policygrad.errors import ConfigError
from policygrad.rewards.builtin import find_answer_extractor
from policygrad.rewards.workers.pool import RewardScorer
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
from policygrad.rollout.episodes import Encoder, run_episodes
from policygrad.rollout.evaluation import EvaluationResult, summarise_evaluation
from policygrad.rollout.extra_samples import add_greedy_baseline, add_prefix_values, sample_vine
from policygrad.rollout.scoring import (
    ScoreFn,
    ScoreStepsFn,
    ScoringResult,
    collect_step_marks,
    score_groups,
    score_reasoning_steps,
    score_while_sampling,
)
from policygrad.rollout.trajectory import EVALUATE, TRAIN, EpisodeGroup, EpisodeSpec, add_step_marks
from policygrad.samplers.base import Sampler, SamplingParams, SupportsInFlightUpdates
from policygrad.tasks.base import Example, encode_level_index
from policygrad.utils.async_runner import AsyncRunner
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.weight_sync.base import PublishedWeights

EVAL_CHUNK = 64
"""Held-out examples at a time, so that progress shows."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """A step's episodes, judged; what stands in text is for people and logs, the batch is what trains."""

    batch: Batch
    groups: tuple[EpisodeGroup, ...]
    """Row by row those of the batch."""
    position: int
    """The task's next example."""
    metrics: Metrics
    messages: tuple[str, ...] = ()
    """What went wrong with rewards, once per kind, and what dynamic sampling could not fill."""
    leftover_groups: tuple[EpisodeGroup, ...] = ()
    """Groups that the step has no room for, to begin the next one with."""

    @property
    def prompts(self) -> tuple[Any, ...]:
        """Per episode, as the task gave it."""
        return tuple(g.spec.example.prompt for g in self.groups for _ in g.trajectories)

    @property
    def completions(self) -> tuple[str, ...]:
        """Per episode."""
        return tuple(t.text for g in self.groups for t in g.trajectories)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens drawn for it, of whatever became of them."""
        return int(self.metrics["tokens/sampled"].value)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Per episode, tokens sampled; `batch.lengths` is 0 where a reward failed or a filter masked."""
        return tuple(t.num_sampled_tokens for g in self.groups for t in g.trajectories)


@dataclass(frozen=True, eq=False)
class Rollouter:
    """Plays episodes about a task's examples and judges them. `examples(i)` is the task's i-th training example."""

    examples: Callable[[int], Example]
    tokenizer: Encoder
    sampler: Sampler
    score: ScoreFn | None
    """The reward functions; None = the environment's own rewards are all there is."""
    seed: int = 0
    score_steps: ScoreStepsFn | None = None
    """Where reasoning steps end and what they are worth; None = nobody looks at them."""
    environment: EnvironmentFactory = SingleTurn
    run_async: AsyncRunner = field(default_factory=AsyncRunner)
    pool: RewardScorer | None = None
    """Whose `score` it is, so that what is over can be judged while others are drawn; None = all is judged at the end."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds that one call of an environment may take."""
    progress: ProgressCallback = ignore_progress
    """Is told which call of an environment is waited for."""
    tolerate_timeouts: bool = False
    """A method of an environment that is never over in time does not end the rollout."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Whoever collects while another thread may evaluate holds it: sampler and pool are told of one batch of episodes at a time."""

    def update_weights(self, weights: PublishedWeights) -> Metrics:
        """From now on episodes are played with these weights; what it cost to get them there."""
        return self.run_async(self.sampler.update(weights)) or {}

    @property
    def in_flight(self) -> bool:
        """Whether `update` may be called while another thread collects: what is drawn from then on is drawn with these weights."""
        return isinstance(self.sampler, SupportsInFlightUpdates) and self.sampler.in_flight

    def cancel(self) -> None:
        """Ends what other threads are drawing, with an error there."""
        self.run_async.cancel()

    def play(
        self, specs: Sequence[EpisodeSpec], samples_per_prompt: int, sampling: SamplingParams
    ) -> list[EpisodeGroup]:
        """n episodes from each start, not judged yet."""
        calls = EnvironmentCalls(self.timeout, self.progress, tolerate_timeouts=self.tolerate_timeouts)
        episodes = run_episodes(
            specs,
            samples_per_prompt,
            sampling,
            sampler=self.sampler,
            encoder=self.tokenizer,
            environment=self.environment,
            calls=calls,
        )
        return self.run_async(episodes)

    def collect(
        self,
        algorithm: Algorithm,
        sampling: SamplingParams,
        *,
        prompts_per_step: int,
        samples_per_prompt: int,
        step: int = 1,
        position: int = 0,
        leftover_groups: Sequence[EpisodeGroup] = (),
        evaluate: EvaluateFn | None = None,
    ) -> Rollout:
        """A step's worth of groups: `prompts` × `samples` episodes, from the task's example `position` on.

        A filter that refills (dynamic sampling) sets groups aside and takes further prompts, at most its `rounds` times the
        step's; what is missing then is filled with groups set aside at weight 0, the others are reweighted, and that is
        reported. carried: what the step before has left (`Rollout.leftover_groups`), where the filter carries. evaluate: a learner's,
        for what filters read.
        """
        refilling = next((part for part in algorithm.filters if part.refills), None)
        worth = "token_reward" in algorithm.all_needs or "step_end" not in algorithm.all_needs

        resting = frozenset[int]().union(*(part.excluded_examples for part in algorithm.filters))
        level = next((part.task_level for part in algorithm.filters if part.task_level is not None), 0)

        def sample(count: int, position: int) -> tuple[SamplingRound, ScoringResult, int]:
            chosen, again = next_examples(
                lambda i: self.examples(encode_level_index(i, level)), count, position, resting
            )
            starts = [
                self._start(encode_level_index(i, level), example, sampling, TRAIN, step) for i, example in chosen
            ]
            groups, said = self._judged(starts, samples_per_prompt, sampling)
            groups, of_steps = score_reasoning_steps(groups, self.score_steps, self.tokenizer.decode, use_scores=worth)
            batch = batch_groups(groups)
            said |= ScoringResult(messages=(ALL_EXCLUDED_NOTE,) * again)
            return (
                SamplingRound(groups, batch, groups_to_drop(groups, batch, refilling, evaluate)),
                said | of_steps,
                chosen[-1][0] + 1,
            )

        found = sample_until_full(sample, prompts_per_step, position, refilling, leftover_groups)
        kept, rounds, judged = found.groups, found.rounds, found.scoring
        whole = (
            len(rounds) == 1
            and len(rounds[0].groups) == len(kept)
            and not (found.num_carried_over or found.num_unfilled)
        )
        if "demonstration" in algorithm.all_needs:
            kept, of_shown = self._with_demonstrations(kept)
            judged |= of_shown
        whole = whole and not {"demonstration", "rewards", "level"} & algorithm.all_needs
        batch = rounds[0].batch if whole else batch_groups(kept, algorithm.all_needs)
        if (
            self.score_steps is not None
        ):  # filters look at the outcome's score: they see where steps end, not their worth
            batch = add_step_marks(batch, collect_step_marks(kept), scored=False)
        batch = algorithm.apply_filters(fill_required_fields(batch, algorithm.filter_needs, evaluate), refilled=True)
        if self.score_steps is not None:
            batch = add_step_marks(batch, collect_step_marks(kept), scored=worth)
        if "turn_state" in algorithm.all_needs:  # filters look at whole episodes' rewards
            batch = add_turn_states(batch, kept, scored="token_reward" in algorithm.all_needs)
        batch, kept, cost = self._sampled_further(algorithm, batch, kept, sampling, step)
        judged |= cost
        measured = measure_rollout([(r.groups, r.batch) for r in rounds])
        metrics = merge(
            measured, judged.metrics, found.metrics, count_trained(sum(len(r.batch.mask) for r in rounds), batch)
        )
        return Rollout(batch, tuple(kept), found.position, metrics, judged.messages, found.leftover_groups)

    def _judged(
        self, starts: Sequence[EpisodeSpec], n: int, sampling: SamplingParams
    ) -> tuple[list[EpisodeGroup], ScoringResult]:
        pool = self.pool if self.environment is SingleTurn else None
        with score_while_sampling(pool, self.sampler, starts, n, self.tokenizer.decode) as score:
            return score_groups(self.play(starts, n, sampling), score or self.score)

    def _start(self, index: int, example: Example, sampling: SamplingParams, stream: int, step: int) -> EpisodeSpec:
        return EpisodeSpec(example, (self.seed, stream, step, index), sampling.max_tokens)

    def _sampled_further(
        self, algorithm: Algorithm, batch: Batch, groups: list[EpisodeGroup], sampling: SamplingParams, step: int
    ) -> tuple[Batch, list[EpisodeGroup], ScoringResult]:
        """(the batch, its groups, what it cost) after what parts have sampled beside the episodes, or in their place."""
        judged = ScoringResult()
        for link in algorithm.advantage:
            if link.samples_values:
                batch, cost = self._with_values(batch, groups, sampling, link.samples, step)
                judged |= cost
        if "baseline" in algorithm.all_needs:
            batch, cost = add_greedy_baseline(batch, groups, lambda s: self._greedy(s, sampling))
            judged |= cost
        for vine in (link for link in algorithm.advantage if isinstance(link, Vine)):
            batch, groups, cost = self._branched(batch, groups, vine, sampling, step)
            judged |= cost
        return batch, groups, judged

    def _greedy(self, starts: list[EpisodeSpec], sampling: SamplingParams) -> tuple[list[EpisodeGroup], ScoringResult]:
        """One episode from each start, of the most probable token at every step."""
        return score_groups(self.play(starts, 1, replace(sampling, temperature=0.0)), self.score)

    def _with_demonstrations(self, groups: list[EpisodeGroup]) -> tuple[list[EpisodeGroup], ScoringResult]:
        if self.environment is not SingleTurn:
            raise ConfigError(
                "a demonstration is an answer, and an episode of an environment has turns: take a task of prompts and answers, or "
                "an algorithm without demonstrations, such as grpo"
            )
        return add_demonstrations(groups, self.tokenizer, lambda some: score_groups(some, self.score))

    def _with_values(
        self, batch: Batch, groups: list[EpisodeGroup], sampling: SamplingParams, samples: int, step: int
    ) -> tuple[Batch, ScoringResult]:
        if self.environment is not SingleTurn:
            raise ConfigError(
                "PrefixValue starts again in the midst of an answer, which an environment cannot: take the prompt-and-answer "
                "tasks, or an advantage without it, such as GroupMean()"
            )
        return add_prefix_values(
            batch, groups, lambda s: score_groups(self.play(s, samples, sampling), self.score), step
        )

    def _branched(
        self, batch: Batch, groups: Sequence[EpisodeGroup], vine: Vine, sampling: SamplingParams, step: int
    ) -> tuple[Batch, list[EpisodeGroup], ScoringResult]:
        if self.environment is not SingleTurn:
            raise ConfigError(
                "Vine starts again in the midst of an answer, which an environment cannot: take the prompt-and-answer tasks, or "
                "algorithm trpo"
            )
        play = lambda starts, n: self.play(starts, n, sampling)  # noqa: E731
        return sample_vine(batch, groups, vine, play, lambda some: score_groups(some, self.score), step)

    def evaluate(
        self,
        examples: Sequence[Example],
        samples_per_prompt: int,
        sampling: SamplingParams,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> EvaluationResult:
        """`samples` episodes of each held-out example. The same random numbers every time, so that two evaluations differ by
        the weights."""
        found, judged = list[EpisodeGroup](), ScoringResult()
        for first in range(0, len(examples), EVAL_CHUNK):
            some = enumerate(examples[first : first + EVAL_CHUNK], first)
            starts = [self._start(i, example, sampling, EVALUATE, 0) for i, example in some]
            with self.lock:
                groups, said = self._judged(starts, samples_per_prompt, sampling)
            found, judged = [*found, *groups], judged | said
            progress(len(found), len(examples))
        voted = find_answer_extractor(self.pool.rewards if self.pool else ())
        return summarise_evaluation(found, judged.messages, voted)
