"""How far a run is, and how long the rest will take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from policygrad.trackers.base import RunInfo
from policygrad.trackers.words import count


class RunProgress:
    """How far a run is on its way, in steps and in sampled tokens."""

    def __init__(self, info: RunInfo) -> None:
        self.info, self.step = info, info.first_step - 1
        self.sampled: float = info.sampled

    def advance(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step number `step` is done."""
        self.step = step
        self.sampled += metrics.get("tokens/sampled", 0)

    @property
    def share(self) -> float:
        """Done, from 0 to 1: of the steps or of the tokens, whichever is nearer its end."""
        of_tokens = self.sampled / self.info.tokens if self.info.tokens else 0.0
        return min(1.0, max(self.step / max(1, self.info.steps), of_tokens))

    @property
    def over(self) -> bool:
        """Whether there is no next step."""
        return self.share >= 1

    @property
    def left(self) -> float:
        """Steps to come, at the tokens per step so far."""
        steps = float(self.info.steps - self.step)
        per_step = (self.sampled - self.info.sampled) / max(1, self.step - self.info.first_step + 1)
        if self.info.tokens and per_step:
            steps = min(steps, (self.info.tokens - self.sampled) / per_step)
        return max(0.0, steps)

    @property
    def words(self) -> str:
        """`12/200`, and the tokens where they are counted: `12/200  2.1k/21k tokens`."""
        total = self.info.steps
        steps = f"{self.step:>{len(str(total))}}/{total}"
        if not self.info.tokens:
            return steps
        return f"{steps}  {count(self.sampled)}/{count(self.info.tokens)} {self.info.budget_unit}"


class Pace:
    """Seconds from step to step: the mean over the last 20. The first does not count once there is another."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._times: deque[float] = deque(maxlen=20)
        self._warm = False

    def begin(self) -> None:
        """What came before the first step, such as an evaluation, is over."""
        if not self._times:
            self._last = self._clock()

    def end(self) -> None:
        """A step is done."""
        now = self._clock()
        if not self._warm and self._times:  # the first step compiles and allocates
            self._times.clear()
            self._warm = True
        self._times.append(now - self._last)
        self._last = now

    def left(self, steps: float) -> float | None:
        """Seconds for so many more steps; None before the first."""
        return steps * sum(self._times) / len(self._times) if self._times else None
