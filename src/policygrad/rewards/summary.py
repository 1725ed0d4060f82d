"""From what every function said of every completion to the scores of a rollout."""

from collections import Counter
from collections.abc import Sequence

from policygrad.rewards.calls import LARGEST, Outcome, quote
from policygrad.rewards.types import Reward, Scores, Steps, StepScores


def summarise(rewards: Sequence[Reward], table: list[list[Outcome]], completions: Sequence[str]) -> Scores:
    """Weighted sums, counts by reason, and the first message (in the order of samples) of each distinct failure."""
    failures: Counter[str] = Counter()
    messages: dict[tuple[int, str, str], str] = {}
    total: list[float | None] = []
    for place, completion in enumerate(completions):
        outcomes = [row[place] for row in table]
        for number, outcome in enumerate(outcomes):
            if outcome.reason:
                failures[outcome.reason] += 1
                key = (number, outcome.reason, outcome.kind)
                messages.setdefault(key, outcome.message)
        values = [r.weight * o.value for r, o in zip(rewards, outcomes, strict=True) if o.value is not None]
        failed = any(outcome.reason for outcome in outcomes)
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
    return Scores(total, parts, dict(failures), list(messages.values()))


def gather(rewards: Sequence[Reward], table: list[list[Outcome]]) -> StepScores:
    """The steps of all process rewards together; what fails for one of them has none."""
    failures: Counter[str] = Counter()
    messages: dict[tuple[int, str, str], str] = {}
    steps: list[Steps | None] = []
    for outcomes in zip(*table, strict=True):
        for number, outcome in enumerate(outcomes):
            if outcome.reason:
                failures[outcome.reason] += 1
                messages.setdefault((number, outcome.reason, outcome.kind), outcome.message)
        weighted = [
            (end, reward.weight * score)
            for reward, outcome in zip(rewards, outcomes, strict=True)
            for end, score in outcome.steps
        ]
        failed = any(outcome.reason for outcome in outcomes)
        if not failed and (large := [score for _, score in weighted if abs(score) > LARGEST]):
            failures["inf"] += 1
            messages.setdefault((-1, "inf", ""), f"no steps: the weighted score {large[0]:g} is beyond ±{LARGEST:g}")
            failed = True
        steps.append(None if failed else tuple(sorted(weighted, key=lambda step: step[0])))
    parts = {
        reward.name: [score for outcome in row for _, score in outcome.steps]
        for reward, row in zip(rewards, table, strict=True)
    }
    return StepScores(steps, parts, dict(failures), list(messages.values()))
