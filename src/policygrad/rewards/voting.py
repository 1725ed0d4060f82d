"""By what answers vote: the answer that a completion gives, as the reward that judges it reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policygrad.rewards.builtin import final_answer
from policygrad.rewards.types import Reward

Voted = Callable[[str], str | None]
"""From a completion to its answer, equal texts for equal answers; None = it gives none."""


def voted_by(rewards: Sequence[Reward]) -> Voted:
    """The `voted` of the first reward whose function has one; otherwise what is inside the last <answer>, or the whole text."""
    for reward in rewards:
        own: Voted | None = getattr(reward.function, "voted", None)
        if own is not None:
            return own
    return lambda text: final_answer(text) or None
