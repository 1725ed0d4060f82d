"""What episodes are worth: reward functions over texts, by completion and by reasoning step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import stdev
from typing import Any

from torch import Tensor

from policygrad.core.metrics import Mean, Metrics, Sum, merge
from policygrad.rewards.base import ProcessScores, RewardScores
from policygrad.rewards.workers.pool import RewardScorer
from policygrad.rollout.environment_calls import first_of_each_kind
from policygrad.rollout.trajectory import (
    EpisodeGroup,
    EpisodeSpec,
    StepMarks,
    locate_steps,
    prompts_and_columns,
    reward_inputs,
)
from policygrad.samplers.base import Request, Sampler, SupportsStreaming

ScoreFn = Callable[[Sequence[Any], Sequence[str], Mapping[str, Sequence[Any]]], RewardScores]
ENVIRONMENT_REWARD = "environment"
"""The name of what an environment's own turns give, among the rewards."""
ScoreStepsFn = Callable[[Sequence[Any], Sequence[str], Mapping[str, Sequence[Any]]], ProcessScores]


@dataclass(frozen=True)
class ScoringResult:
    """What was measured of rewards, and what went wrong with them, once per kind."""

    metrics: Metrics = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    failed: int = 0
    """Episodes without a reward."""

    def __or__(self, other: ScoringResult) -> ScoringResult:
        messages = tuple(dict.fromkeys((*self.messages, *other.messages)))
        return ScoringResult(merge(self.metrics, other.metrics), messages, self.failed + other.failed)


def score_groups(groups: list[EpisodeGroup], score: ScoreFn | None) -> tuple[list[EpisodeGroup], ScoringResult]:
    """The groups with every episode's reward: what its environment said, plus what the reward functions say of its text."""
    own = [t.reward for g in groups for t in g.trajectories]
    lost = first_of_each_kind(t.failure for g in groups for t in g.trajectories if t.failure)
    if score is None:
        failed = own.count(None)
        silent = any(t.reward is None and not t.failure for g in groups for t in g.trajectories)
        said = (
            "the environment gave no reward to an episode: let a step() of it return Step(reward=…), or cut() one where it is "
            "broken off between turns, or name reward functions"
        )
        judged = ScoringResult(failed=failed, messages=(*lost, *((said,) if silent else ())))
        return _with(groups, [{"reward_parts": (reward,)} for reward in own], ((ENVIRONMENT_REWARD, 1.0),)), judged
    scores = _scored(groups, score)
    total: list[float | None] = [s if s is None or e is None else s + e for s, e in zip(scores.total, own, strict=True)]
    known = {name: [x for x in part if x is not None] for name, part in scores.parts.items()}
    parts: Metrics = {f"rewards/{name}": Mean(sum(x), float(len(x))) for name, x in known.items() if len(known) > 1}
    parts |= _spreads(groups, scores) if len(known) > 1 else {}
    messages = (*lost, *scores.messages)
    judged = ScoringResult(merge(failure_metrics(scores), parts), messages, sum(x is None for x in total))
    names, columns = _columns(scores, own)
    changes = [{"reward": r, "reward_parts": said} for r, said in zip(total, zip(*columns, strict=True), strict=True)]
    return _with(groups, changes, names), judged


def _scored(groups: list[EpisodeGroup], score: ScoreFn) -> RewardScores:
    """What the reward functions say; of an episode that its environment has lost, nothing."""
    prompts, texts, columns = reward_inputs(groups)
    places = [i for i, t in enumerate(t for g in groups for t in g.trajectories) if not t.failure]
    if len(places) == len(texts):
        return score(prompts, texts, columns)
    if not places:
        return RewardScores([None] * len(texts), {})

    def chosen(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in places]

    def spread(values: Sequence[float | None]) -> list[float | None]:
        found: list[float | None] = [None] * len(texts)
        for place, value in zip(places, values, strict=True):
            found[place] = value
        return found

    scores = score(chosen(prompts), chosen(texts), {name: chosen(column) for name, column in columns.items()})
    return replace(scores, total=spread(scores.total), parts={name: spread(x) for name, x in scores.parts.items()})


def _spreads(groups: list[EpisodeGroup], scores: RewardScores) -> Metrics:
    """Each reward's standard deviation within its group, a mean over the episodes it has a number for, like `reward_std`."""
    found: Metrics = {}
    for name, part in scores.parts.items():
        rest = iter(part)
        known = [[x for x in (next(rest) for _ in g.trajectories) if x is not None] for g in groups]
        total = sum(len(x) * stdev(x) for x in known if len(x) > 1)
        if count := sum(map(len, known)):
            found[f"rewards/{name}/std"] = Mean(total, float(count))
    return found


def _columns(
    scores: RewardScores, own: Sequence[float | None]
) -> tuple[tuple[tuple[str, float], ...], list[Sequence[float | None]]]:
    """((name, weight) of each reward, its numbers in the order of the episodes): weighted they add up to the episodes' rewards."""
    parts = scores.parts or {"reward": scores.total}  # one who scores and tells no parts has one
    names = [(name, scores.weights.get(name, 1.0)) for name in parts]
    columns: list[Sequence[float | None]] = list(parts.values())
    if any(reward is not None for reward in own):
        names, columns = [*names, (ENVIRONMENT_REWARD, 1.0)], [*columns, own]
    return tuple(names), columns


def zero_rewards(
    prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> RewardScores:
    """0 for every completion, where nobody reads a reward."""
    return RewardScores([0.0] * len(completions), {})


def score_reasoning_steps(
    groups: list[EpisodeGroup], score: ScoreStepsFn | None, decode: Callable[[Any], str], *, use_scores: bool
) -> tuple[list[EpisodeGroup], ScoringResult]:
    """The groups with the reasoning steps of every episode; one whose steps failed has no reward either.

    worth: what steps are worth is read, not only where they end.
    """
    if score is None:
        return groups, ScoringResult()
    scores = score(*reward_inputs(groups))
    rows = [t for g in groups for t in g.trajectories]
    marks = [
        None if found is None else t.map_step_marks(locate_steps(decode, t.visible_tokens, t.text, found))
        for t, found in zip(rows, scores.steps, strict=True)
    ]
    means: Metrics = {
        f"rewards/{name}": Mean(sum(x), float(len(x))) for name, x in scores.parts.items() if x and use_scores
    }
    sizes = [len(found.ends) for found in marks if found is not None]
    count: Metrics = {"steps/mean": Mean(float(sum(sizes)), float(len(sizes)))} if sizes else {}
    changes: list[dict[str, Any]] = [{"reward": None} if found is None else {"step_marks": found} for found in marks]
    return _with(groups, changes), ScoringResult(merge(failure_metrics(scores), means, count), tuple(scores.messages))


def failure_metrics(scores: RewardScores | ProcessScores) -> Metrics:
    """How many samples a reward function failed on, by reason."""
    return {f"rewards/failed_{why}": Sum(float(n)) for why, n in scores.failures.items()}


def collect_step_marks(groups: Sequence[EpisodeGroup]) -> list[StepMarks | None]:
    """Per episode; None where its steps failed, or nobody looks."""
    return [t.step_marks for g in groups for t in g.trajectories]


def _with(
    groups: list[EpisodeGroup],
    changes: Sequence[Mapping[str, Any]],
    rewards: tuple[tuple[str, float], ...] | None = None,
) -> list[EpisodeGroup]:
    """The groups with every trajectory changed, in order, and with the names and weights of their rewards."""
    rest = iter(changes)
    changed = [replace(g, trajectories=tuple(replace(t, **next(rest)) for t in g.trajectories)) for g in groups]
    return changed if rewards is None else [replace(g, reward_weights=rewards) for g in changed]


# Answers are judged while others are still drawn, where that hides enough. What they come to is what it is without.


@contextmanager
def score_while_sampling(
    pool: RewardScorer | None, sampler: Sampler, starts: Sequence[EpisodeSpec], n: int, decode: Callable[[Any], str]
) -> Iterator[ScoreFn | None]:
    """Inside n answers to each start are played, each of them the one turn of its episode, and judged by what is yielded.
    None = it would not be faster, or cannot be."""
    keys = [(*start.key, sample) for start in starts for sample in range(n)]
    if pool is None or not isinstance(sampler, SupportsStreaming) or not pool.is_overlap_worthwhile(len(keys)):
        yield None
        return
    prompts, columns = prompts_and_columns([start.example for start in starts for _ in range(n)])
    places = {key: place for place, key in enumerate(keys)}
    with pool.score_incrementally(prompts, columns) as begun:

        def look(over: Sequence[tuple[Request, Tensor]]) -> None:
            begun.add_completions(
                {places[request.key]: decode(tokens) for request, tokens in over if request.key in places}
            )

        with sampler.on_completion(look):
            yield partial(pool.score, incremental=begun)
