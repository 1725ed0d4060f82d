"""A reward that counts only where gates hold, and no more than it may: what others say, looked at before and after it."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from policygrad.errors import ConfigError
from policygrad.rewards.calls import Caller, Judgement, Signature, needing
from policygrad.rewards.types import Reward

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Composed:
    """The inner reward's value, not below `low` or above `high`, where every gate holds; 0 where one does not.

    A gate holds where its value is above 0, and where it does not apply (None); where it fails, the sample fails. Gates are asked
    first, and the inner function only about what passes: a judge that is paid for is not asked about text of the wrong form.
    """

    inner: Reward
    gates: tuple[Reward, ...] = ()
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        for part in self._parts:
            if part.process_reward:
                raise ConfigError(
                    f"reward {part.name!r} scores steps: gates and bounds are for what scores whole completions, and so are they"
                )

    @property
    def _parts(self) -> tuple[Reward, ...]:
        return (*self.gates, self.inner)

    @property
    def reward_options(self) -> dict[str, Any]:
        """Those of what it is made of, the widest: the whole batch where one of them wants that, and the longest budget."""
        budgets = [part.budget for part in self._parts if part.budget is not None]
        return {
            "batched": any(part.batched for part in self._parts),
            "alone": any(part.alone for part in self._parts),
            "budget": max(budgets, default=None),
        }

    @property
    def reward_network(self) -> bool:
        """Whether a part asks a server."""
        return any(getattr(part.function, "reward_network", False) for part in self._parts)

    def reward_prepare(self) -> None:
        """What each part prepares."""
        for part in self._parts:
            prepare: Callable[[], object] | None = getattr(part.function, "reward_prepare", None)
            if prepare is not None:
                prepare()

    @property
    def voted(self) -> Any:
        """The answer that the inner reward reads."""
        return getattr(self.inner.function, "voted", None)

    @property
    def __signature__(self) -> inspect.Signature:
        """The columns that its parts need."""
        return needing(name for part in self._parts for name in Signature.of(part.function).required)

    @cached_property
    def _callers(self) -> tuple[Caller, ...]:
        return tuple(Caller(part.name, part.function) for part in self._parts)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[Any]:
        """One Judgement per completion; the reason of a failure is that of the part that failed."""
        said: list[Judgement | None] = [None] * len(completions)
        for part, caller in zip(self._parts, self._callers, strict=True):
            open_ = [i for i, known in enumerate(said) if known is None]
            judgements = _ask(caller, part.batched, open_, prompts, completions, columns)
            for place, judgement in zip(open_, judgements, strict=True):
                said[place] = self._bounded(judgement) if part is self.inner else _stopped(judgement)
        return [judgement for judgement in said if judgement is not None]

    def _bounded(self, judgement: Judgement) -> Judgement:
        value = judgement.value
        return judgement if value is None else replace(judgement, value=min(max(value, self.low), self.high))


def _stopped(gate: Judgement) -> Judgement | None:
    """What is said of a completion at this gate; None = it passes."""
    if gate.reason is not None:
        return gate
    return None if gate.value is None or gate.value > 0 else Judgement(0.0)


def _ask(
    caller: Caller, batched: bool, places: Sequence[int], prompts: Sequence[Any], texts: Sequence[str], columns: Columns
) -> list[Judgement]:
    """What a function says of these places, all at once or one at a time, as it is used to."""
    calls = [places] if batched and places else [[place] for place in places]
    return [
        judgement
        for some in calls
        for judgement in caller(
            [prompts[i] for i in some],
            [texts[i] for i in some],
            {name: [values[i] for i in some] for name, values in columns.items()},
        )
    ]
