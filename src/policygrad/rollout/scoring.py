"""Score episodes with reward functions, per completion and per reasoning step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import stdev
from typing import Any

from torch import Tensor

from policygrad.core.metrics import Mean, Metrics, Sum, list_means, merge
from policygrad.rewards.base import ProcessScores, RewardScores
from policygrad.rewards.workers.pool import RewardScorer
from policygrad.rollout.environment_calls import first_of_each_kind
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec, locate_steps, prompts_and_columns, reward_inputs
from policygrad.samplers.base import Request, Sampler, SupportsStreaming
from policygrad.samplers.stop_texts import find_stop

ScoreFn = Callable[[Sequence[Any], Sequence[str], Mapping[str, Sequence[Any]]], RewardScores]
"""(prompts, completions, columns) -> one reward per completion."""
ScoreStepsFn = Callable[[Sequence[Any], Sequence[str], Mapping[str, Sequence[Any]]], ProcessScores]
"""(prompts, completions, columns) -> the scored reasoning steps of each completion."""
ScoreGroups = Callable[[list[EpisodeGroup]], tuple[list[EpisodeGroup], "ScoringResult"]]
"""Scores episodes by the run's reward functions."""
_STEP_REWARD = (
    "return Step(reward=…) from step(), or from on_truncated() for an episode that is cut off between turns, or set "
    "reward functions"
)
ENVIRONMENT_REWARD = "environment"  # name of the environment's own reward among the rewards


@dataclass(frozen=True)
class ScoringResult:
    """Metrics of the rewards, and their failures with one message per kind."""

    metrics: Metrics = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    failed: int = 0  # episodes without a reward

    def __or__(self, other: ScoringResult) -> ScoringResult:
        messages = tuple(dict.fromkeys((*self.messages, *other.messages)))
        return ScoringResult(merge(self.metrics, other.metrics), messages, self.failed + other.failed)

    def failures_only(self, metrics: Metrics, note: str = "") -> ScoringResult:
        """Return `metrics` with the failure metrics of this result, for samples that are not part of the batch."""
        failures = {name: metric for name, metric in self.metrics.items() if name.startswith("rewards/failed_")}
        return ScoringResult(merge(metrics, failures), (*self.messages, *((note,) if note else ())))


def score_groups(groups: list[EpisodeGroup], score: ScoreFn | None) -> tuple[list[EpisodeGroup], ScoringResult]:
    """Return the groups with every episode's reward: the environment's plus that of the reward functions."""
    rows = [t for g in groups for t in g.trajectories]
    environment = [t.reward for t in rows]
    failures = first_of_each_kind((*(t.failure for t in rows if t.failure), *(note for t in rows for note in t.notes)))
    if score is None:
        messages = list(failures)
        unscored = next((t for t in rows if t.reward is None and not t.failure), None)
        if unscored is not None:
            messages.append(f"an episode got no reward from its environment: {unscored.reward_remedy or _STEP_REWARD}")
        changes: list[dict[str, Any]] = [{"reward_parts": (reward,)} for reward in environment]
        groups = _replace_trajectories(groups, changes, ((ENVIRONMENT_REWARD, 1.0),))
        return groups, ScoringResult(messages=tuple(messages), failed=environment.count(None))
    prompts, completions, columns = reward_inputs(groups)
    scored = [i for i, t in enumerate(rows) if not t.failure]  # the others get None
    scores = RewardScores([None] * len(rows), {})
    if scored and len(scored) == len(rows):  # none: as of a step without demonstrations, whose columns nobody has
        scores = score(prompts, completions, columns)
    elif scored:

        def select(values: Sequence[Any]) -> list[Any]:
            return [values[i] for i in scored]

        def scatter(values: Sequence[Any], missing: Any = None) -> list[Any]:
            by_row = dict(zip(scored, values, strict=True))
            return [by_row.get(i, missing) for i in range(len(rows))]

        scores = score(select(prompts), select(completions), {name: select(x) for name, x in columns.items()})
        parts = {name: scatter(x) for name, x in scores.parts.items()}
        feedback = scatter(scores.feedback, "") if scores.feedback else []
        scores = replace(scores, total=scatter(scores.total), parts=parts, feedback=feedback)
    pairs = zip(scores.total, environment, strict=True)
    total: list[float | None] = [s if s is None or e is None else s + e for s, e in pairs]
    metrics = failure_metrics(scores) | list_means({f"rewards/logged/{name}": x for name, x in scores.logged.items()})
    if len(scores.parts) > 1:  # the mean of each reward, and its standard deviation within groups, as for `reward_std`
        for name, part in scores.parts.items():
            present = [x for x in part if x is not None]
            metrics[f"rewards/{name}"] = Mean(sum(present), float(len(present)))
        for name, part in scores.parts.items():
            unread = iter(part)
            by_group = [[x for x in (next(unread) for _ in g.trajectories) if x is not None] for g in groups]
            if count := sum(map(len, by_group)):
                deviation = sum(len(x) * stdev(x) for x in by_group if len(x) > 1)
                metrics[f"rewards/{name}/std"] = Mean(deviation, float(count))
    # without named parts the total is the one reward; weighted, the columns add up to the episodes' rewards
    named = scores.parts or {"reward": scores.total}
    weights = [(name, scores.weights.get(name, 1.0)) for name in named]
    values: list[Sequence[float | None]] = list(named.values())
    if any(reward is not None for reward in environment):
        weights, values = [*weights, (ENVIRONMENT_REWARD, 1.0)], [*values, environment]
    written = scores.feedback or [""] * len(rows)
    feedback = ["\n".join(filter(None, (row.feedback, text))) for row, text in zip(rows, written, strict=True)]
    by_row = zip(total, zip(*values, strict=True), feedback, strict=True)
    changes = [{"reward": r, "reward_parts": x, "feedback": text} for r, x, text in by_row]
    groups = _replace_trajectories(groups, changes, tuple(weights))
    return groups, ScoringResult(metrics, (*failures, *scores.messages), total.count(None))


def zero_rewards(
    prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> RewardScores:
    """Return 0 for every completion, for algorithms that read no reward."""
    return RewardScores([0.0] * len(completions), {})


def reads_step_scores(needs: Container[str]) -> bool:
    """Return True if the scores of reasoning steps are rewards, False if the algorithm reads only where steps end."""
    return "token_reward" in needs or "step_end" not in needs


def score_reasoning_steps(
    groups: list[EpisodeGroup], score: ScoreStepsFn | None, decode: Callable[[Any], str], *, use_scores: bool
) -> tuple[list[EpisodeGroup], ScoringResult]:
    """Return the groups with the reasoning steps of every episode. If its steps fail, an episode loses its reward too.

    use_scores: The algorithm reads the steps' scores, not only their ends.
    """
    if score is None:
        return groups, ScoringResult()
    scores = score(*reward_inputs(groups))
    rows = [t for g in groups for t in g.trajectories]
    marks = [
        None if steps is None else t.map_step_marks(locate_steps(decode, t.visible_tokens, t.text, steps))
        for t, steps in zip(rows, scores.steps, strict=True)
    ]
    metrics = failure_metrics(scores)
    if use_scores:
        metrics |= list_means({f"rewards/{name}": x for name, x in scores.parts.items()})
    metrics |= list_means({"steps/mean": [len(x.ends) for x in marks if x is not None]})
    changes: list[dict[str, Any]] = [{"reward": None} if x is None else {"step_marks": x} for x in marks]
    return _replace_trajectories(groups, changes), ScoringResult(metrics, tuple(scores.messages))


def failure_metrics(scores: RewardScores | ProcessScores) -> Metrics:
    """Count the samples on which a reward function failed, by reason."""
    return {f"rewards/failed_{reason}": Sum(float(n)) for reason, n in scores.failures.items()}


def _replace_trajectories(
    groups: list[EpisodeGroup],
    changes: Sequence[Mapping[str, Any]],
    reward_weights: tuple[tuple[str, float], ...] | None = None,
) -> list[EpisodeGroup]:
    unread = iter(changes)
    changed = [replace(g, trajectories=tuple(replace(t, **next(unread)) for t in g.trajectories)) for g in groups]
    return changed if reward_weights is None else [replace(g, reward_weights=reward_weights) for g in changed]


@contextmanager
def score_while_sampling(
    pool: RewardScorer | None,
    sampler: Sampler,
    specs: Sequence[EpisodeSpec],
    samples_per_prompt: int,
    decode: Callable[[Any], str],
    on_finished: Callable[[int], None] | None = None,
) -> Iterator[ScoreFn | None]:
    """Score finished completions while others are still being sampled, when the overlap saves time. Results are identical.

    Single-turn episodes only. Yields the function that returns all scores; None = score in the ordinary way.

    Args:
        on_finished: Called with the number of finished completions whenever there are more, if the sampler reports them.
    """
    keys = [(*spec.key, sample) for spec in specs for sample in range(samples_per_prompt)]
    if not isinstance(sampler, SupportsStreaming):
        yield None
        return
    num_finished = 0

    def count(finished: Sequence[tuple[Request, Tensor]]) -> None:
        nonlocal num_finished
        num_finished += len(finished)
        if on_finished is not None:
            on_finished(num_finished)

    if pool is None or not pool.is_overlap_worthwhile(len(keys)):
        with nullcontext() if on_finished is None else sampler.on_completion(count):
            yield None
        return
    prompts, columns = prompts_and_columns([spec.example for spec in specs for _ in range(samples_per_prompt)])
    indices = {key: i for i, key in enumerate(keys)}
    with pool.score_incrementally(prompts, columns) as scoring:

        def add(finished: Sequence[tuple[Request, Tensor]]) -> None:
            shown = ((r, tokens[: find_stop(tokens, r.sampling.stop, decode)]) for r, tokens in finished)
            scoring.add_completions({indices[r.key]: decode(tokens) for r, tokens in shown if r.key in indices})
            count(finished)

        with sampler.on_completion(add):
            yield partial(pool.score, incremental=scoring)
