"""From what every function said of every completion to the scores of a rollout."""

from collections import Counter
from collections.abc import Sequence

from policygrad.rewards.calls import LARGEST, Judgement, quote
from policygrad.rewards.types import ProcessScores, Reward, RewardScores, ScoredSteps


def summarise(rewards: Sequence[Reward], table: list[list[Judgement]], completions: Sequence[str]) -> RewardScores:
    """Weighted sums, counts by reason, and the first message (in the order of samples) of each distinct failure."""
    failures: Counter[str] = Counter()
    messages: dict[tuple[int, str, str], str] = {}
    total: list[float | None] = []
    for place, completion in enumerate(completions):
        judgements = [row[place] for row in table]
        for number, judgement in enumerate(judgements):
            if judgement.reason:
                failures[judgement.reason] += 1
                key = (number, judgement.reason, judgement.kind)
                messages.setdefault(key, judgement.message)
        values = [r.weight * o.value for r, o in zip(rewards, judgements, strict=True) if o.value is not None]
        failed = any(judgement.reason for judgement in judgements)
        if rewards and not values and not failed:
            failures["none"] += 1
            messages.setdefault(
                (-1, "none", ""), f"no reward: all functions returned None (completion {quote(completion)})"
            )
        whole = sum(values) if values and not failed else None
        if whole is not None and abs(whole) > LARGEST:
            failures["inf"] += 1
            messages.setdefault((-1, "inf", ""), f"no reward: the weighted sum {whole:g} is beyond ±{LARGEST:g}")
            whole = None
        total.append(whole)
    parts = {reward.name: [o.value for o in row] for reward, row in zip(rewards, table, strict=True)}
    weights = {reward.name: reward.weight for reward in rewards}
    return RewardScores(total, parts, dict(failures), list(messages.values()), weights)


def gather(rewards: Sequence[Reward], table: list[list[Judgement]]) -> ProcessScores:
    """The steps of all process rewards together; what fails for one of them has none."""
    failures: Counter[str] = Counter()
    messages: dict[tuple[int, str, str], str] = {}
    steps: list[ScoredSteps | None] = []
    for judgements in zip(*table, strict=True):
        for number, judgement in enumerate(judgements):
            if judgement.reason:
                failures[judgement.reason] += 1
                messages.setdefault((number, judgement.reason, judgement.kind), judgement.message)
        weighted = [
            (end, reward.weight * score)
            for reward, judgement in zip(rewards, judgements, strict=True)
            for end, score in judgement.steps
        ]
        failed = any(judgement.reason for judgement in judgements)
        if not failed and (large := [score for _, score in weighted if abs(score) > LARGEST]):
            failures["inf"] += 1
            messages.setdefault((-1, "inf", ""), f"no steps: the weighted score {large[0]:g} is beyond ±{LARGEST:g}")
            failed = True
        steps.append(None if failed else tuple(sorted(weighted, key=lambda step: step[0])))
    parts = {
        reward.name: [score for judgement in row for _, score in judgement.steps]
        for reward, row in zip(rewards, table, strict=True)
    }
    return ProcessScores(steps, parts, dict(failures), list(messages.values()))
