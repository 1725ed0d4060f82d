"""Reasoning steps: from where a text's steps end to the tokens at which they end, and from there to the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.rewards.types import ScoredSteps


@dataclass(frozen=True)
class Marks:
    """The steps of one completion, by token."""

    ends: tuple[int, ...]
    """Index of each step's last token, rising; the last sampled token is always one."""
    scores: tuple[float, ...]
    """Of each step; 0 where nothing scored it."""


def token_at(decode: Callable[[Tensor], str], tokens: Tensor, text: str, end: int) -> int:
    """The first token with which the decoded text reaches `end` characters; ids are decoded, never made from text.

    A character of several tokens is there with its last one. What is followed by white space only ends with the last token,
    since the end token that closes an answer is no step of its own.
    """
    if end >= len(text.rstrip()):
        return len(tokens) - 1
    low, high = 1, len(tokens)  # tokens needed
    while low < high:
        middle = (low + high) // 2
        if decode(tokens[:middle])[:end] == text[:end]:
            high = middle
        else:
            low = middle + 1
    return low - 1


def mark(decode: Callable[[Tensor], str], tokens: Tensor, text: str, steps: ScoredSteps) -> Marks:
    """Steps by characters as steps by tokens; the scores of steps that end with the same token are added up."""
    scores = {len(tokens) - 1: 0.0}
    for end, score in steps:
        at = token_at(decode, tokens, text, end)
        scores[at] = scores.get(at, 0.0) + score
    ends = tuple(sorted(scores))
    return Marks(ends, tuple(scores[end] for end in ends))


def with_steps(batch: Batch, marks: Sequence[Marks | None], *, scored: bool) -> Batch:
    """`step_end`, and with `scored` the steps' scores as `token_reward`; None = a completion without steps (it failed)."""
    step_end = torch.zeros_like(batch.mask)
    reward = torch.zeros(batch.mask.shape, dtype=batch.reward.dtype)
    for row, found in enumerate(marks):
        if found is not None:
            ends = torch.tensor(found.ends, dtype=torch.int64)
            step_end[row, ends] = True
            reward[row, ends] = torch.tensor(found.scores, dtype=batch.reward.dtype)
    batch = replace(batch, step_end=step_end & batch.mask)
    return replace(batch, token_reward=reward) if scored else batch
