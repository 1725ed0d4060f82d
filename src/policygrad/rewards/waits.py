"""Says what rewards are waited for, once it takes longer than people expect."""

import time
from collections.abc import Callable, Sequence

from policygrad.rewards.slots import Slot

Phase = Callable[[str, int, int], None]
"""Told what happens now, and how far it is: answers so far, of how many. "" = it is over."""
SILENCE = 4.0  # seconds
_EVERY = 1.0  # seconds from word to word


def nobody(text: str, done: int, total: int) -> None:
    """Told, and says nothing."""


class Waits:
    """Follows one scoring of `total` answers. `due`: when to look again, by the clock. silence: seconds, None = SILENCE."""

    def __init__(
        self,
        tell: Phase,
        names: Sequence[str],
        budgets: Sequence[float],
        total: int,
        silence: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell, self._names, self._budgets, self._total, self._clock = tell, names, budgets, total, clock
        self._answers, self._told = 0, False
        self.due = clock() + (SILENCE if silence is None else silence)

    def answered(self, count: int) -> None:
        self._answers += count

    def look(self, busy: Sequence[Slot]) -> None:
        """Says what is waited for longest, if it is time to."""
        if self._clock() < self.due or not busy:
            return
        slot = min(busy, key=lambda slot: slot.deadline)
        function = slot.called
        if function is None:
            text = f"waiting for a reward worker to load {slot.start.names}"
        else:
            text = f"waiting for reward {self._names[function]!r} (each call has up to {self._budgets[function]:g} s)"
        self._tell(text, self._answers, self._total)
        self._told, self.due = True, self._clock() + _EVERY

    def over(self) -> None:
        """All answers are there, or nobody waits for them any more."""
        if self._told:
            self._tell("", 0, 0)
