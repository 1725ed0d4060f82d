"""Demonstrations: answers that others wrote, as trajectories that join the group of their prompt.

The task's column `demonstration` holds one for an example, or None: text, which is tokenised once, or an object
{"text": …} or {"tokens": [ids]}, which may say what wrote it thought of its tokens, {"logp": [nats]}, one number for each,
the end token's included. Without `logp` it is 0: whoever wrote it is held to be sure of every token (π_φ = 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policygrad.core.metrics import Mean, Metrics, Sum, merge
from policygrad.errors import DataError
from policygrad.rollout.episodes import Encoder
from policygrad.rollout.scoring import ScoringResult
from policygrad.rollout.trajectory import EpisodeGroup, Segment, Trajectory
from policygrad.tasks.base import Example

DEMONSTRATION_COLUMN = "demonstration"
DEMONSTRATION_HINT = (
    "give the task a column 'demonstration' with an answer as a policy would write it, as in "
    '{"prompt": "1+1=", "answer": "2", "demonstration": "2"}, or take an algorithm without demonstrations, such as grpo'
)
Judge = Callable[[list[EpisodeGroup]], tuple[list[EpisodeGroup], ScoringResult]]


@dataclass(frozen=True, eq=False)
class Demonstration:
    """A demonstration as it stands in the column."""

    text: str | None
    tokens: tuple[int, ...] | None
    logp: tuple[float, ...] | None


def check_demonstrations(rows: Sequence[Example], encoder: Encoder, max_tokens: int) -> None:
    """Raises DataError for the first of a task's rows whose demonstration cannot be read, or is longer than an episode may be."""
    lengths = []
    for example in rows:
        where = f"{example.source or 'a row'}: column {DEMONSTRATION_COLUMN!r}"
        if (found := parse_demonstration(example, where)) is not None:
            prompt = encoder.encode(example.prompt, max_tokens, example.source)
            lengths.append((where, len(_ids(found, example, prompt, encoder, where))))
    if long := [(where, n) for where, n in lengths if n > max_tokens]:
        where, n = long[0]
        raise DataError(
            f"{where} has {n} tokens, more than the {max_tokens} that an answer may have ({len(long)} of {len(lengths)} "
            f"demonstrations are too long): set --max-tokens {max(n for _, n in long)}, which is enough for all, or drop those rows"
        )


def add_demonstrations(
    groups: list[EpisodeGroup], encoder: Encoder, judge: Judge
) -> tuple[list[EpisodeGroup], ScoringResult]:
    """The groups, each with the demonstration of its example behind its episodes; judged like them.

    What is measured of episodes is of those the policy sampled; of these there are demonstrations/reward, /mean_length,
    /count, and /too_long: those left out because an episode may not be as long. A task that makes its examples cannot be asked
    for that beforehand, as rows are (`check_demonstrations`).

    Raises:
        DataError: no example of these has the column; what cannot be read as a demonstration.
    """
    if all(DEMONSTRATION_COLUMN not in group.spec.example.columns for group in groups):
        raise DataError(
            f"{groups[0].spec.location} has no column {DEMONSTRATION_COLUMN!r}, nor has any of its step: {DEMONSTRATION_HINT}"
        )
    found = [_trajectory(group, encoder) for group in groups]
    long = [t is not None and len(t.tokens) > g.spec.max_tokens for g, t in zip(groups, found, strict=True)]
    shown = [None if out else t for t, out in zip(found, long, strict=True)]
    judged, said = judge([replace(g, trajectories=(t,)) for g, t in zip(groups, shown, strict=True) if t is not None])
    rest = iter(judged)
    whole = [
        group if t is None else replace(group, trajectories=(*group.trajectories, *next(rest).trajectories))
        for group, t in zip(groups, shown, strict=True)
    ]
    failed: Metrics = {name: m for name, m in said.metrics.items() if name.startswith("rewards/failed_")}
    told = (
        f"demonstrations of more than {groups[0].spec.max_tokens} tokens are left out, as no answer may be as long; "
        "demonstrations/too_long counts them, --max-tokens raises it"
    )
    return whole, ScoringResult(merge(failed, _measure(judged, sum(long))), (*said.messages, *((told,) * any(long))))


def parse_demonstration(example: Example, where: str) -> Demonstration | None:
    """The demonstration of an example. Raises DataError for what is none."""
    value = example.columns.get(DEMONSTRATION_COLUMN)
    if value is None:
        return None
    if isinstance(value, str):
        return Demonstration(value, None, None)
    if not isinstance(value, Mapping) or ("text" in value) == ("tokens" in value):
        raise DataError(
            f'{where} must be text, null, or an object with either "text" or "tokens" (and "logp"), got {str(value)[:60]}'
        )
    if odd := sorted(set(value) - {"text", "tokens", "logp"}):
        raise DataError(f'{where} has {odd[0]!r}; a demonstration has "text" or "tokens", and "logp"')
    tokens, logp = _numbers(value, "tokens", int, where), _numbers(value, "logp", (int, float), where)
    if "text" in value and not isinstance(value["text"], str):
        raise DataError(f"{where}: 'text' must be text, got {type(value['text']).__name__}")
    return Demonstration(value.get("text"), tokens, logp)


def _numbers(value: Mapping[str, Any], name: str, kind: Any, where: str) -> tuple[Any, ...] | None:
    found = value.get(name)
    if found is None:
        return None
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise DataError(f"{where}: {name!r} must be a list of numbers, got {str(found)[:60]}")
    for x in found:
        if not isinstance(x, kind) or isinstance(x, bool) or (name == "logp" and not -torch.inf < x <= 0):
            what = "token ids, whole numbers" if name == "tokens" else "log-probabilities in nats, finite and at most 0"
            raise DataError(f"{where}: {name!r} must hold {what}, got {str(x)[:60]}")
    return tuple(found)


def _ids(shown: Demonstration, example: Example, prompt: Tensor, encoder: Encoder, where: str) -> list[int]:
    """Its token ids. Raises DataError for log-probabilities that are not theirs."""
    ids = list(shown.tokens or ())
    if shown.text is not None:
        ids = encoder.encode_answer(prompt, example.prompt, shown.text, where)
    if shown.logp is not None and len(shown.logp) != len(ids):
        raise DataError(
            f"{where}: {len(shown.logp)} log-probabilities for {len(ids)} tokens, the end token included: give one for each, and "
            'the ids that they belong to as "tokens"'
        )
    return ids


def _trajectory(group: EpisodeGroup, encoder: Encoder) -> Trajectory | None:
    where = f"{group.spec.location}: column {DEMONSTRATION_COLUMN!r}"
    shown = parse_demonstration(group.spec.example, where)
    if shown is None:
        return None
    ids = _ids(shown, group.spec.example, group.prompt_ids, encoder, where)
    tokens = torch.tensor(ids, dtype=torch.int64)
    logp = torch.zeros(len(ids)) if shown.logp is None else torch.tensor(shown.logp)
    text = encoder.decode(tokens) if shown.text is None else shown.text
    return Trajectory((Segment(tokens, logp),), text, False, demonstration=True)


def _measure(judged: Sequence[EpisodeGroup], too_long: int) -> Metrics:
    rows = [t for g in judged for t in g.trajectories]
    known = [t.reward for t in rows if t.reward is not None]
    found: Metrics = {"demonstrations/count": Sum(float(len(rows)))}
    if rows:
        found["demonstrations/mean_length"] = Mean(float(sum(len(t.tokens) for t in rows)), float(len(rows)))
    if known:
        found["demonstrations/reward"] = Mean(sum(known), float(len(known)))
    return found | ({"demonstrations/too_long": Sum(float(too_long))} if too_long else {})
