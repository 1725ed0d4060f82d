"""What episodes are worth: reward functions over texts, by completion and by reasoning step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from policygrad.core.metrics import Mean, Metrics, Sum, merge
from policygrad.rewards.types import ProcessScores, RewardScores
from policygrad.rollout.reasoning_steps import Marks, mark
from policygrad.rollout.trajectory import Group, samples_of

Score = Callable[[Sequence[Any], Sequence[str], Mapping[str, Sequence[Any]]], RewardScores]
ScoreSteps = Callable[[Sequence[Any], Sequence[str], Mapping[str, Sequence[Any]]], ProcessScores]


@dataclass(frozen=True)
class Judged:
    """What was measured of rewards, and what went wrong with them, once per kind."""

    metrics: Metrics = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    failed: int = 0
    """Episodes without a reward."""

    def __or__(self, other: Judged) -> Judged:
        messages = tuple(dict.fromkeys((*self.messages, *other.messages)))
        return Judged(merge(self.metrics, other.metrics), messages, self.failed + other.failed)


def judge(groups: list[Group], score: Score | None) -> tuple[list[Group], Judged]:
    """The groups with every episode's reward: what its environment said, plus what the reward functions say of its text."""
    if score is None:
        failed = sum(t.reward is None for g in groups for t in g.trajectories)
        said = "the environment gave no reward to an episode: let a step() of it return Step(reward=…), or name reward functions"
        return groups, Judged(failed=failed, messages=(said,) * bool(failed))
    scores = score(*samples_of(groups))
    own = [t.reward for g in groups for t in g.trajectories]
    total: list[float | None] = [s if s is None or e is None else s + e for s, e in zip(scores.total, own, strict=True)]
    known = {name: [x for x in part if x is not None] for name, part in scores.parts.items()}
    parts: Metrics = {f"rewards/{name}": Mean(sum(x), float(len(x))) for name, x in known.items() if len(known) > 1}
    judged = Judged(merge(failures(scores), parts), tuple(scores.messages), sum(x is None for x in total))
    return _with(groups, [{"reward": reward} for reward in total]), judged


def unrewarded(
    prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> RewardScores:
    """0 for every completion, where nobody reads a reward."""
    return RewardScores([0.0] * len(completions), {})


def judge_steps(
    groups: list[Group], score: ScoreSteps | None, decode: Callable[[Any], str], *, worth: bool
) -> tuple[list[Group], Judged]:
    """The groups with the reasoning steps of every episode; one whose steps failed has no reward either.

    worth: what steps are worth is read, not only where they end.
    """
    if score is None:
        return groups, Judged()
    scores = score(*samples_of(groups))
    rows = [t for g in groups for t in g.trajectories]
    marks = [
        None if found is None else mark(decode, t.tokens, t.text, found)
        for t, found in zip(rows, scores.steps, strict=True)
    ]
    means: Metrics = {f"rewards/{name}": Mean(sum(x), float(len(x))) for name, x in scores.parts.items() if x and worth}
    sizes = [len(found.ends) for found in marks if found is not None]
    count: Metrics = {"steps/mean": Mean(float(sum(sizes)), float(len(sizes)))} if sizes else {}
    changes: list[dict[str, Any]] = [{"reward": None} if found is None else {"marks": found} for found in marks]
    return _with(groups, changes), Judged(merge(failures(scores), means, count), tuple(scores.messages))


def failures(scores: RewardScores | ProcessScores) -> Metrics:
    """How many samples a reward function failed on, by reason."""
    return {f"rewards/failed_{why}": Sum(float(n)) for why, n in scores.failures.items()}


def marks_of(groups: Sequence[Group]) -> list[Marks | None]:
    """Per episode; None where its steps failed, or nobody looks."""
    return [t.marks for g in groups for t in g.trajectories]


def _with(groups: list[Group], changes: Sequence[Mapping[str, Any]]) -> list[Group]:
    """The groups with every trajectory changed, in order."""
    rest = iter(changes)
    return [replace(g, trajectories=tuple(replace(t, **next(rest)) for t in g.trajectories)) for g in groups]
