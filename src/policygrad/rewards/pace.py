"""How long a reward takes, as far as it has been measured."""

from __future__ import annotations

from collections import defaultdict

_KEPT = 0.5
"""What the scorings so far count for, beside the next one: a reward may become quicker or slower as answers change."""


class Pace:
    """Seconds that a call of each function takes, by number: a mean over calls in which older scorings count less and less."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._calls: defaultdict[int, float] = defaultdict(float)

    def took(self, function: int, seconds: float) -> None:
        """One call."""
        self._seconds[function] += seconds
        self._calls[function] += 1

    def scored(self) -> None:
        """A scoring is over."""
        for count in (self._seconds, self._calls):
            count.update({function: value * _KEPT for function, value in count.items()})

    def __getitem__(self, function: int) -> float:
        """Seconds; 0 where nothing is known."""
        return self._seconds[function] / self._calls[function] if function in self._calls else 0.0
