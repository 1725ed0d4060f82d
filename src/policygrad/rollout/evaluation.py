"""Evaluation results: mean@k, the unbiased pass@k, and maj@k (the score of the most frequent answer)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from policygrad.errors import ConfigError
from policygrad.rewards.builtin import AnswerExtractor
from policygrad.rollout.trajectory import EpisodeGroup, Trajectory

EVAL_CHUNK = 64  # examples evaluated between two progress reports


@dataclass(frozen=True)
class EvalSample:
    """One completion of an evaluation problem."""

    text: str
    reward: float | None  # None = scoring failed
    rewards: tuple[tuple[str, float | None], ...] = ()  # (name, unweighted value) of each reward
    answer: str | None = None  # the extracted answer, for majority votes; None = no answer
    tokens: int = 0  # number of sampled tokens
    truncated: bool = False

    @property
    def score(self) -> float:
        """The reward; 0 if scoring failed."""
        return 0.0 if self.reward is None else self.reward


@dataclass(frozen=True)
class EvaluationResult:
    """k samples for each of n problems. A completion without a reward counts as 0 and in `num_failed`."""

    problems: tuple[tuple[EvalSample, ...], ...]
    prompts: tuple[Any, ...]  # the task's prompt of each problem
    messages: tuple[str, ...] = ()  # reward failures, one message per kind

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
        """True if any completion has a reward."""
        return self.num_failed < len(self._samples)

    @property
    def mean(self) -> float:
        """mean@k: the average score over problems and samples."""
        return _mean([sample.score for sample in self._samples])

    @property
    def mean_per_problem(self) -> tuple[float, ...]:
        """Each problem's mean@k."""
        return tuple(map(_mean, self.scores))

    @property
    def majority(self) -> float:
        """maj@k: the mean of `majority_per_problem`."""
        return _mean(self.majority_per_problem)

    @property
    def majority_per_problem(self) -> tuple[float, ...]:
        """Each problem's maj@k: the mean score of the answer that most of its k samples give, averaged over ties.

        Completions without an answer have no vote; 0 if none has an answer. Source: Wang et al. 2023 (self-consistency,
        arXiv:2203.11171), sec. 2, unweighted.
        """
        values = []
        for row in self.problems:
            scores_by_answer: dict[str, list[float]] = {}
            for sample in row:
                if sample.answer is not None:
                    scores_by_answer.setdefault(sample.answer, []).append(sample.score)
            most = max(map(len, scores_by_answer.values()), default=0)
            values.append(_mean([_mean(scores) for scores in scores_by_answer.values() if len(scores) == most]))
        return tuple(values)

    @property
    def is_binary(self) -> bool:
        """True if every score is 0 or 1, so that the mean is an accuracy."""
        return all(sample.score in (0.0, 1.0) for sample in self._samples)

    def pass_at(self, k: int, threshold: float = 1.0) -> float:
        """The unbiased pass@k: the mean of `pass_at_per_problem`."""
        return _mean(self.pass_at_per_problem(k, threshold))

    def pass_at_per_problem(self, k: int, threshold: float = 1.0) -> tuple[float, ...]:
        """Each problem's 1 − C(n−c, k)/C(n, k) with c of n samples at or above threshold (Chen et al. 2021, eq. 1).

        Raises:
            ConfigError: k is larger than the number of samples per problem.
        """
        values = []
        for row in self.scores:
            n, c = len(row), sum(s >= threshold for s in row)
            if not 1 <= k <= n:
                raise ConfigError(f"pass@{k} needs at least {k} samples per problem, but there are {n}")
            values.append(1 - comb(n - c, k) / comb(n, k))
        return tuple(values)

    def standard_error(self) -> float:
        """Standard error of the mean over problems (the samples of one problem are not independent)."""
        return standard_error(self.mean_per_problem)

    def reward_per_problem(self, name: str) -> tuple[float, ...]:
        """Each problem's mean of one reward function, without its weight; a completion where it failed counts as 0."""
        return tuple(_mean([dict(sample.rewards).get(name) or 0.0 for sample in row]) for row in self.problems)


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of values of independent problems; 0 for a single one."""
    centre, n = _mean(values), len(values)
    return float((sum((value - centre) ** 2 for value in values) / (n - 1) / n) ** 0.5) if n > 1 else 0.0


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return Σ wᵢ·xᵢ / Σ wᵢ over problems, and its standard error, clustered by problem.

    The error is that of a ratio: of the mean of wᵢ·(xᵢ − ratio) / w̄ (Cochran 1977, Sampling Techniques, eq. 6.13).
    """
    total = sum(weights)
    if not total:
        return 0.0, 0.0
    ratio = sum(w * x for w, x in zip(weights, values, strict=True)) / total
    average = total / len(weights)
    return ratio, standard_error([w * (x - ratio) / average for w, x in zip(weights, values, strict=True)])


def summarise_evaluation(
    groups: Sequence[EpisodeGroup], messages: tuple[str, ...], extract_answer: AnswerExtractor
) -> EvaluationResult:
    """Summarise scored episodes. extract_answer: returns the answer that a text gives, if any."""

    def summarise(t: Trajectory, group: EpisodeGroup) -> EvalSample:
        parts = tuple((name, value) for (name, _), value in zip(group.reward_weights, t.reward_parts, strict=True))
        return EvalSample(t.text, t.reward, parts, extract_answer(t.text), t.num_sampled_tokens, t.truncated)

    problems = tuple(tuple(summarise(t, group) for t in group.trajectories) for group in groups)
    return EvaluationResult(problems, tuple(group.spec.example.prompt for group in groups), messages)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
