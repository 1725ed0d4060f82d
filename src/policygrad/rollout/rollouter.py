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
from policygrad.environments.base import TIMEOUT
from policygrad.errors import ConfigError
from policygrad.rewards.builtin import voted_by
from policygrad.rewards.workers.pool import Pool
from policygrad.rollout.batching import ALL_SOLVED, measure, to_batch, upcoming, used, with_turns
from policygrad.rollout.demonstrations import joined
from policygrad.rollout.dynamic_sampling import Evaluate, Round, fill, filled, flat
from policygrad.rollout.environment_calls import Calls
from policygrad.rollout.episodes import Encoder, play
from policygrad.rollout.evaluation import EvaluationResult, evaluated
from policygrad.rollout.extra_samples import branched, with_baseline, with_values
from policygrad.rollout.scoring import Judged, Score, ScoreSteps, judge, judge_steps, marks_of, meanwhile
from policygrad.rollout.trajectory import EVALUATE, TRAIN, Group, Start, with_steps
from policygrad.samplers.base import InFlight, Sampler, Sampling
from policygrad.tasks.base import Example, placed
from policygrad.utils.async_runner import Waiter
from policygrad.utils.progress import Phase, nobody
from policygrad.weight_sync.base import Published

PORTION = 64
"""Held-out examples at a time, so that progress shows."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """A step's episodes, judged; what stands in text is for people and logs, the batch is what trains."""

    batch: Batch
    groups: tuple[Group, ...]
    """Row by row those of the batch."""
    position: int
    """The task's next example."""
    metrics: Metrics
    messages: tuple[str, ...] = ()
    """What went wrong with rewards, once per kind, and what dynamic sampling could not fill."""
    surplus: tuple[Group, ...] = ()
    """Groups that the step has no room for, to begin the next one with."""

    @property
    def prompts(self) -> tuple[Any, ...]:
        """Per episode, as the task gave it."""
        return tuple(g.start.example.prompt for g in self.groups for _ in g.trajectories)

    @property
    def texts(self) -> tuple[str, ...]:
        """Per episode."""
        return tuple(t.text for g in self.groups for t in g.trajectories)

    @property
    def sampled(self) -> int:
        """Tokens drawn for it, of whatever became of them."""
        return int(self.metrics["tokens/sampled"].value)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Per episode, tokens sampled; `batch.lengths` is 0 where a reward failed or a filter masked."""
        return tuple(t.sampled for g in self.groups for t in g.trajectories)


@dataclass(frozen=True, eq=False)
class Rollouter:
    """Plays episodes about a task's examples and judges them. `examples(i)` is the task's i-th training example."""

    examples: Callable[[int], Example]
    tokenizer: Encoder
    sampler: Sampler
    score: Score | None
    """The reward functions; None = the environment's own rewards are all there is."""
    seed: int = 0
    score_steps: ScoreSteps | None = None
    """Where reasoning steps end and what they are worth; None = nobody looks at them."""
    environment: EnvironmentFactory = SingleTurn
    wait: Waiter = field(default_factory=Waiter)
    pool: Pool | None = None
    """Whose `score` it is, so that what is over can be judged while others are drawn; None = all is judged at the end."""
    timeout: float = TIMEOUT
    """Seconds that one call of an environment may take."""
    phase: Phase = nobody
    """Is told which call of an environment is waited for."""
    patient: bool = False
    """A method of an environment that is never over in time does not end the rollout."""
    turn: threading.RLock = field(default_factory=threading.RLock)
    """Whoever collects while another thread may evaluate holds it: sampler and pool are told of one batch of episodes at a time."""

    def update(self, weights: Published) -> Metrics:
        """From now on episodes are played with these weights; what it cost to get them there."""
        return self.wait(self.sampler.update(weights)) or {}

    @property
    def in_flight(self) -> bool:
        """Whether `update` may be called while another thread collects: what is drawn from then on is drawn with these weights."""
        return isinstance(self.sampler, InFlight) and self.sampler.in_flight

    def cancel(self) -> None:
        """Ends what other threads are drawing, with an error there."""
        self.wait.cancel()

    def play(self, starts: Sequence[Start], n: int, sampling: Sampling) -> list[Group]:
        """n episodes from each start, not judged yet."""
        calls = Calls(self.timeout, self.phase, patient=self.patient)
        episodes = play(
            starts, n, sampling, sampler=self.sampler, encoder=self.tokenizer, environment=self.environment, calls=calls
        )
        return self.wait(episodes)

    def collect(
        self,
        algorithm: Algorithm,
        sampling: Sampling,
        *,
        prompts: int,
        samples: int,
        step: int = 1,
        position: int = 0,
        carried: Sequence[Group] = (),
        evaluate: Evaluate | None = None,
    ) -> Rollout:
        """A step's worth of groups: `prompts` × `samples` episodes, from the task's example `position` on.

        A filter that refills (dynamic sampling) sets groups aside and takes further prompts, at most its `rounds` times the
        step's; what is missing then is filled with groups set aside at weight 0, the others are reweighted, and that is
        reported. carried: what the step before has left (`Rollout.surplus`), where the filter carries. evaluate: a learner's,
        for what filters read.
        """
        refilling = next((part for part in algorithm.filters if part.refill), None)
        worth = "token_reward" in algorithm.declared or "step_end" not in algorithm.declared

        resting = frozenset[int]().union(*(part.resting for part in algorithm.filters))
        level = next((part.level for part in algorithm.filters if part.level is not None), 0)

        def sample(count: int, position: int) -> tuple[Round, Judged, int]:
            chosen, again = upcoming(lambda i: self.examples(placed(i, level)), count, position, resting)
            starts = [self._start(placed(i, level), example, sampling, TRAIN, step) for i, example in chosen]
            groups, said = self._judged(starts, samples, sampling)
            groups, of_steps = judge_steps(groups, self.score_steps, self.tokenizer.decode, worth=worth)
            batch = to_batch(groups)
            said |= Judged(messages=(ALL_SOLVED,) * again)
            return Round(groups, batch, flat(groups, batch, refilling, evaluate)), said | of_steps, chosen[-1][0] + 1

        found = fill(sample, prompts, position, refilling, carried)
        kept, rounds, judged = found.kept, found.rounds, found.judged
        whole = len(rounds) == 1 and len(rounds[0].groups) == len(kept) and not (found.carried or found.missing)
        if "demonstration" in algorithm.declared:
            kept, of_shown = self._with_demonstrations(kept)
            judged |= of_shown
        whole = whole and not {"demonstration", "rewards", "level"} & algorithm.declared
        batch = rounds[0].batch if whole else to_batch(kept, algorithm.declared)
        if (
            self.score_steps is not None
        ):  # filters look at the outcome's score: they see where steps end, not their worth
            batch = with_steps(batch, marks_of(kept), scored=False)
        batch = algorithm.filtered(filled(batch, algorithm.filter_needs, evaluate), refilled=True)
        if self.score_steps is not None:
            batch = with_steps(batch, marks_of(kept), scored=worth)
        if "anchor" in algorithm.declared:  # filters look at whole episodes' rewards
            batch = with_turns(batch, kept, scored="token_reward" in algorithm.declared)
        batch, kept, cost = self._sampled_further(algorithm, batch, kept, sampling, step)
        judged |= cost
        measured = measure([(r.groups, r.batch) for r in rounds])
        metrics = merge(measured, judged.metrics, found.metrics, used(sum(len(r.batch.mask) for r in rounds), batch))
        return Rollout(batch, tuple(kept), found.position, metrics, judged.messages, found.surplus)

    def _judged(self, starts: Sequence[Start], n: int, sampling: Sampling) -> tuple[list[Group], Judged]:
        pool = self.pool if self.environment is SingleTurn else None
        with meanwhile(pool, self.sampler, starts, n, self.tokenizer.decode) as score:
            return judge(self.play(starts, n, sampling), score or self.score)

    def _start(self, index: int, example: Example, sampling: Sampling, stream: int, step: int) -> Start:
        return Start(example, (self.seed, stream, step, index), sampling.max_tokens)

    def _sampled_further(
        self, algorithm: Algorithm, batch: Batch, groups: list[Group], sampling: Sampling, step: int
    ) -> tuple[Batch, list[Group], Judged]:
        """(the batch, its groups, what it cost) after what parts have sampled beside the episodes, or in their place."""
        judged = Judged()
        for link in algorithm.psi:
            if link.samples_values:
                batch, cost = self._with_values(batch, groups, sampling, link.samples, step)
                judged |= cost
        if "baseline" in algorithm.declared:
            batch, cost = with_baseline(batch, groups, lambda s: self._greedy(s, sampling))
            judged |= cost
        for vine in (link for link in algorithm.psi if isinstance(link, Vine)):
            batch, groups, cost = self._branched(batch, groups, vine, sampling, step)
            judged |= cost
        return batch, groups, judged

    def _greedy(self, starts: list[Start], sampling: Sampling) -> tuple[list[Group], Judged]:
        """One episode from each start, of the most probable token at every step."""
        return judge(self.play(starts, 1, replace(sampling, temperature=0.0)), self.score)

    def _with_demonstrations(self, groups: list[Group]) -> tuple[list[Group], Judged]:
        if self.environment is not SingleTurn:
            raise ConfigError(
                "a demonstration is an answer, and an episode of an environment has turns: take a task of prompts and answers, or "
                "an algorithm without demonstrations, such as grpo"
            )
        return joined(groups, self.tokenizer, lambda some: judge(some, self.score))

    def _with_values(
        self, batch: Batch, groups: list[Group], sampling: Sampling, samples: int, step: int
    ) -> tuple[Batch, Judged]:
        if self.environment is not SingleTurn:
            raise ConfigError(
                "PrefixValue starts again in the midst of an answer, which an environment cannot: take the prompt-and-answer "
                "tasks, or an advantage without it, such as GroupMean()"
            )
        return with_values(batch, groups, lambda s: judge(self.play(s, samples, sampling), self.score), step)

    def _branched(
        self, batch: Batch, groups: Sequence[Group], vine: Vine, sampling: Sampling, step: int
    ) -> tuple[Batch, list[Group], Judged]:
        if self.environment is not SingleTurn:
            raise ConfigError(
                "Vine starts again in the midst of an answer, which an environment cannot: take the prompt-and-answer tasks, or "
                "algorithm trpo"
            )
        play = lambda starts, n: self.play(starts, n, sampling)  # noqa: E731
        return branched(batch, groups, vine, play, lambda some: judge(some, self.score), step)

    def evaluate(
        self,
        examples: Sequence[Example],
        samples: int,
        sampling: Sampling,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> EvaluationResult:
        """`samples` episodes of each held-out example. The same random numbers every time, so that two evaluations differ by
        the weights."""
        found, judged = list[Group](), Judged()
        for first in range(0, len(examples), PORTION):
            some = enumerate(examples[first : first + PORTION], first)
            starts = [self._start(i, example, sampling, EVALUATE, 0) for i, example in some]
            with self.turn:
                groups, said = self._judged(starts, samples, sampling)
            found, judged = [*found, *groups], judged | said
            progress(len(found), len(examples))
        voted = voted_by(self.pool.rewards if self.pool else ())
        return evaluated(found, judged.messages, voted)
