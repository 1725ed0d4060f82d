"""Held-out accuracy: mean@k, the unbiased pass@k, and maj@k, the worth of the most frequent answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from policygrad.errors import ConfigError
from policygrad.rewards.builtin import AnswerExtractor
from policygrad.rollout.trajectory import EpisodeGroup, Trajectory


@dataclass(frozen=True)
class EvalSample:
    """One completion of a held-out problem."""

    text: str
    reward: float | None
    """None = it could not be judged."""
    rewards: tuple[tuple[str, float | None], ...] = ()
    """What each reward says, before its weight."""
    answer: str | None = None
    """By which it votes."""
    tokens: int = 0
    """Sampled."""
    truncated: bool = False

    @property
    def score(self) -> float:
        """Its reward; without one it counts as 0."""
        return 0.0 if self.reward is None else self.reward


@dataclass(frozen=True)
class EvaluationResult:
    """k samples for each of n problems; a completion without a reward counts as 0 and is in `failed`."""

    problems: tuple[tuple[EvalSample, ...], ...]
    prompts: tuple[Any, ...]
    """Of the problems, as the task gives them."""
    messages: tuple[str, ...] = ()
    """What went wrong with rewards, once per kind."""

    @property
    def scores(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(sample.score for sample in row) for row in self.problems)

    @property
    def texts(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(sample.text for sample in row) for row in self.problems)

    @property
    def num_failed(self) -> int:
        return sum(sample.reward is None for sample in self._samples)

    @property
    def num_truncated(self) -> int:
        return sum(sample.truncated for sample in self._samples)

    @property
    def num_tokens(self) -> int:
        return sum(sample.tokens for sample in self._samples)

    @property
    def _samples(self) -> list[EvalSample]:
        return [sample for row in self.problems for sample in row]

    @property
    def has_scores(self) -> bool:
        """Whether any completion has a reward."""
        return self.num_failed < len(self._samples)

    @property
    def mean(self) -> float:
        """mean@k: the average score over problems and samples."""
        flat = [sample.score for sample in self._samples]
        return sum(flat) / len(flat) if flat else 0.0

    @property
    def mean_per_problem(self) -> tuple[float, ...]:
        """Each problem's mean@k."""
        return tuple(sum(row) / len(row) for row in self.scores)

    @property
    def majority(self) -> float:
        """maj@k, the mean of `majorities`."""
        return _mean(self.majority_per_problem)

    @property
    def majority_per_problem(self) -> tuple[float, ...]:
        """Each problem's maj@k: what the answer that most of its k samples give is worth, the mean over answers that tie.

        A completion that gives no answer has no vote; where none gives one, 0. Source: Wang et al. 2023 (self-consistency,
        arXiv:2203.11171), sec. 2, unweighted.
        """
        return tuple(map(_most_frequent, self.problems))

    @property
    def is_binary(self) -> bool:
        """Whether every score is 0 or 1, so that the mean is an accuracy."""
        return all(sample.score in (0.0, 1.0) for sample in self._samples)

    def pass_at(self, k: int, threshold: float = 1.0) -> float:
        """The unbiased pass@k, the mean of `passes`.

        Raises:
            ConfigError: k larger than the samples per problem.
        """
        return _mean(self.pass_at_per_problem(k, threshold))

    def pass_at_per_problem(self, k: int, threshold: float = 1.0) -> tuple[float, ...]:
        """Each problem's 1 − C(n−c, k)/C(n, k) with c of n samples at or above threshold (Chen et al. 2021, eq. 1).

        Raises:
            ConfigError: k larger than the samples per problem.
        """
        values = []
        for row in self.scores:
            n, c = len(row), sum(s >= threshold for s in row)
            if not 1 <= k <= n:
                raise ConfigError(f"pass@{k} needs at least {k} samples per problem, there are {n}")
            values.append(1 - comb(n - c, k) / comb(n, k))
        return tuple(values)

    def standard_error(self) -> float:
        """Of the mean, over problems (the samples of one problem are not independent)."""
        means = self.mean_per_problem
        n = len(means)
        if n < 2:
            return 0.0
        centre = sum(means) / n
        return float((sum((m - centre) ** 2 for m in means) / (n - 1) / n) ** 0.5)


def summarise_evaluation(
    groups: Sequence[EpisodeGroup], messages: tuple[str, ...], extract_answer: AnswerExtractor
) -> EvaluationResult:
    """What judged episodes of held-out problems come to. voted: the answer that a text gives."""
    problems = tuple(tuple(_sample(t, group, extract_answer) for t in group.trajectories) for group in groups)
    return EvaluationResult(problems, tuple(group.spec.example.prompt for group in groups), messages)


def _sample(t: Trajectory, group: EpisodeGroup, voted: Callable[[str], str | None]) -> EvalSample:
    parts = tuple((name, value) for (name, _), value in zip(group.reward_weights, t.reward_parts, strict=True))
    return EvalSample(t.text, t.reward, parts, voted(t.text), t.num_sampled_tokens, t.truncated)


def _most_frequent(row: Sequence[EvalSample]) -> float:
    scores_by_answer: dict[str, list[float]] = {}
    for sample in row:
        if sample.answer is not None:
            scores_by_answer.setdefault(sample.answer, []).append(sample.score)
    most = max(map(len, scores_by_answer.values()), default=0)
    return _mean([_mean(scores) for scores in scores_by_answer.values() if len(scores) == most])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
