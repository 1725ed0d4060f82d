"""Demonstrations: given answers that join the group of their prompt as trajectories.

The task's column `demonstration` holds None or one demonstration: text, or an object {"text": …} or {"tokens": [ids]}, optionally
with the log-probabilities of its author, {"logp": [nats]}, one per token including the end token. Without `logp` they are 0: the
author is taken to be certain of every token (π_φ = 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from policygrad.core.metrics import Metrics, Sum, list_means
from policygrad.errors import DataError
from policygrad.models.tokenizer import Tokenizer
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.providers import Collected, FieldProvider, ProviderContext, Stage
from policygrad.rollout.scoring import ScoreGroups, ScoringResult
from policygrad.rollout.trajectory import EpisodeGroup, Segment, Trajectory
from policygrad.tasks.base import Example

DEMONSTRATION_COLUMN = "demonstration"
DEMONSTRATION_HINT = (
    "give the task a column 'demonstration' with an answer in the form the policy writes, as in "
    '{"prompt": "1+1=", "answer": "2", "demonstration": "2"}, or use an algorithm without demonstrations, such as grpo'
)


class Demonstrations(FieldProvider):
    """Adds the examples' demonstrations as rows."""

    stage: ClassVar[Stage] = Stage.EPISODES
    single_answers: ClassVar[tuple[str, str]] = (
        "Demonstrations are complete answers",
        "an algorithm without them, such as grpo",
    )

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        groups, result = add_demonstrations(collected.groups, context.tokenizer, context.score)
        return collected.with_result(batch_groups(groups, context.needs), result, groups)


@dataclass(frozen=True, eq=False)
class Demonstration:
    """The content of the column: text or tokens, and possibly log-probabilities."""

    text: str | None
    tokens: tuple[int, ...] | None
    logp: tuple[float, ...] | None


def check_demonstrations(rows: Sequence[Example], encoder: Tokenizer, max_tokens: int) -> None:
    """Raises DataError for the first row whose demonstration is invalid or longer than `max_tokens`."""
    lengths = []
    for example in rows:
        where = f"{example.source or 'a row'}: column {DEMONSTRATION_COLUMN!r}"
        if (demonstration := parse_demonstration(example, where)) is not None:
            prompt_ids = encoder.encode(example.prompt, max_tokens, example.source, example.tools).ids
            lengths.append((where, len(_encode(demonstration, example, prompt_ids, encoder, where))))
    if long := [(where, n) for where, n in lengths if n > max_tokens]:
        where, n = long[0]
        raise DataError(
            f"{where} has {n} tokens, but an answer may have at most {max_tokens} ({len(long)} of {len(lengths)} demonstrations "
            f"are too long): set --max-tokens {max(n for _, n in long)}, which is enough for all, or remove those rows"
        )


def add_demonstrations(
    groups: list[EpisodeGroup], encoder: Tokenizer, score: ScoreGroups
) -> tuple[list[EpisodeGroup], ScoringResult]:
    """Append to each group the demonstration of its example, scored like the episodes.

    The metrics are demonstrations/reward, /mean_length, /count, and /too_long: the number left out because they are longer than
    an episode may be. Examples generated on the fly cannot be checked beforehand, as rows are (`check_demonstrations`).

    Raises:
        DataError: No example of the step has the column, or a demonstration is invalid.
    """
    if all(DEMONSTRATION_COLUMN not in group.spec.example.columns for group in groups):
        raise DataError(
            f"{groups[0].spec.location} and the other examples of its step have no column {DEMONSTRATION_COLUMN!r}: "
            f"{DEMONSTRATION_HINT}"
        )
    shown: list[Trajectory | None] = []
    num_long = 0
    for group in groups:
        where = f"{group.spec.location}: column {DEMONSTRATION_COLUMN!r}"
        trajectory = None
        if (demonstration := parse_demonstration(group.spec.example, where)) is not None:
            ids = _encode(demonstration, group.spec.example, group.prompt_ids, encoder, where)
            tokens = torch.tensor(ids, dtype=torch.int64)
            if len(tokens) > group.spec.max_tokens:
                num_long += 1
            else:
                logp = torch.zeros(len(tokens)) if demonstration.logp is None else torch.tensor(demonstration.logp)
                text = encoder.decode(tokens) if demonstration.text is None else demonstration.text
                trajectory = Trajectory((Segment(tokens, logp),), text, False, demonstration=True)
        shown.append(trajectory)
    pairs = list(zip(groups, shown, strict=True))
    scored, scoring = score([replace(group, trajectories=(t,)) for group, t in pairs if t is not None])
    unread = iter(scored)
    extended = [
        group if t is None else replace(group, trajectories=(*group.trajectories, *next(unread).trajectories))
        for group, t in pairs
    ]
    note = (
        f"demonstrations of more than {groups[0].spec.max_tokens} tokens are left out (demonstrations/too_long counts them): "
        "raise --max-tokens to use them"
    )
    rows = [t for g in scored for t in g.trajectories]
    rewards = [t.reward for t in rows if t.reward is not None]
    metrics: Metrics = {"demonstrations/count": Sum(float(len(rows)))}
    lengths = [len(t.tokens) for t in rows]
    metrics |= list_means({"demonstrations/mean_length": lengths, "demonstrations/reward": rewards})
    if num_long:
        metrics["demonstrations/too_long"] = Sum(float(num_long))
    return extended, scoring.failures_only(metrics, note if num_long else "")


def parse_demonstration(example: Example, where: str) -> Demonstration | None:
    """Return the demonstration of an example; None without one. Raises DataError if it is invalid."""
    value = example.columns.get(DEMONSTRATION_COLUMN)
    if value is None:
        return None
    if isinstance(value, str):
        return Demonstration(value, None, None)
    if not isinstance(value, Mapping) or ("text" in value) == ("tokens" in value):
        raise DataError(
            f'{where} must be text, null, or an object with either "text" or "tokens" (and "logp"), got {str(value)[:60]}'
        )
    if unknown := sorted(set(value) - {"text", "tokens", "logp"}):
        raise DataError(f'{where} has {unknown[0]!r}; a demonstration has "text" or "tokens", and "logp"')
    tokens, logp = _parse_numbers(value, "tokens", int, where), _parse_numbers(value, "logp", (int, float), where)
    if "text" in value and not isinstance(value["text"], str):
        raise DataError(f"{where}: 'text' must be text, got {type(value['text']).__name__}")
    return Demonstration(value.get("text"), tokens, logp)


def _parse_numbers(value: Mapping[str, Any], name: str, kind: Any, where: str) -> tuple[Any, ...] | None:
    numbers = value.get(name)
    if numbers is None:
        return None
    if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not numbers:
        raise DataError(f"{where}: {name!r} must be a list of numbers, got {str(numbers)[:60]}")
    for x in numbers:
        if not isinstance(x, kind) or isinstance(x, bool) or (name == "logp" and not -torch.inf < x <= 0):
            what = "token ids, whole numbers" if name == "tokens" else "log-probabilities in nats, finite and at most 0"
            raise DataError(f"{where}: {name!r} must hold {what}, got {str(x)[:60]}")
    return tuple(numbers)


def _encode(shown: Demonstration, example: Example, prompt_ids: Tensor, encoder: Tokenizer, where: str) -> list[int]:
    """Return the token ids. Raises DataError if the log-probabilities do not match them."""
    ids = list(shown.tokens or ())
    if shown.text is not None:
        ids = encoder.encode_answer(prompt_ids, example.prompt, shown.text, where, example.tools)
    if shown.logp is not None and len(shown.logp) != len(ids):
        raise DataError(
            f"{where}: {len(shown.logp)} log-probabilities for {len(ids)} tokens, the end token included: give one for each, and "
            'the ids as "tokens"'
        )
    return ids
