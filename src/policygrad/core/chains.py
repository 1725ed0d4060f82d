"""What each link of an advantage chain makes of Ψ, and which links can follow it.

A chain begins with the reward to go. A baseline subtracts from the reward, so that it can stand only where Ψ is still the reward;
a scale made of rewards divides what has the reward's unit; and a number for each completion can be taken only where Ψ is one.
What has a number for each turn or token keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from policygrad.core.base import Advantage

Stage = Literal["reward", "centred", "turns", "score", "tokens"]
"""What Ψ is between two links."""
STAGES: dict[Stage, str] = {
    "reward": "the reward to go",
    "centred": "the reward less a baseline",
    "turns": "the reward to go from each turn",
    "score": "a number for each completion that is not in the reward's unit",
    "tokens": "a number of its own for each token",
}
ANY: frozenset[Stage] = frozenset(STAGES)
TO_GO: frozenset[Stage] = frozenset({"reward", "turns"})
REWARD_UNIT: frozenset[Stage] = TO_GO | {"centred"}
PER_COMPLETION: frozenset[Stage] = ANY - {"turns", "tokens"}
_TAKES = {
    TO_GO: STAGES["reward"],
    REWARD_UNIT: "a reward, with or without a baseline",
    PER_COMPLETION: "one number for each completion",
    ANY: "anything",
}
"""What a link takes, in words; else what may be, one after the other."""


def find_chain_conflicts(links: Sequence[Advantage]) -> Iterator[str]:
    """Yield which links cannot follow those before them, each with a remedy."""
    if late := [link for link in links[1:] if link.starts_chain]:
        yield (
            f"{type(late[0]).__name__} starts from the rewards and would ignore the links before it: put it first in advantage"
        )
        return
    if (misfit := _find_misfit(links)) is None:
        return
    i, stage = misfit
    before, after = type(links[i - 1]).__name__, type(links[i]).__name__
    swapped = [*links[: i - 1], links[i], links[i - 1]]
    fits_swapped = not links[i - 1].starts_chain and _find_misfit(swapped) is None
    remedy = f"put {after} before {before}" if fits_swapped else "keep one of the two"
    if stage == "tokens" and links[i].gives == "score":
        remedy += ", or scale by Whiten(),"
    yield f"{after} takes {describe_taken(links[i].takes)}, and after {before} Ψ is {STAGES[stage]}: {remedy} in advantage"


def describe_taken(stages: frozenset[Stage]) -> str:
    """Say what a link takes, for messages and tables."""
    named = stages - {"turns"} if stages >= TO_GO else stages
    return _TAKES.get(stages) or " or ".join(STAGES[stage] for stage in STAGES if stage in named)


def _find_misfit(links: Sequence[Advantage]) -> tuple[int, Stage] | None:
    """Return the place of the first link that cannot take what Ψ is there, and what it is."""
    stage: Stage = "reward"
    for i, link in enumerate(links):
        if stage not in link.takes:
            return i, stage
        stage = _pass_on(stage, link.gives or stage)
    return None


def _pass_on(before: Stage, given: Stage) -> Stage:
    """Return what Ψ is after a link that gives `given`: never one number for each completion where it was more before."""
    if before == "turns" and given == "centred":
        return "turns"
    return "tokens" if before in {"turns", "tokens"} and given in PER_COMPLETION else given
