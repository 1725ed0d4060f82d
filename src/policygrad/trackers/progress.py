"""What a run sets out to do, how far it is, and how long the rest will take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from policygrad.trackers.words import count


@dataclass(frozen=True)
class Outline:
    """A run, for those who have not seen it yet: it ends with its last step, or with its token budget if that is first."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    steps: int = 1
    """The last one's number."""
    first_step: int = 1
    """The first that this process does."""
    history: Sequence[tuple[int, float]] = ()
    """(step, reward) of those before it."""
    tokens: int | None = None
    """Sampled tokens after which the run ends; None = no such budget."""
    sampled: int = 0
    """Tokens sampled before the first step."""


class Course:
    """How far a run is on its way, in steps and in sampled tokens."""

    def __init__(self, outline: Outline) -> None:
        self.outline, self.step = outline, outline.first_step - 1
        self.sampled: float = outline.sampled

    def advance(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step number `step` is done."""
        self.step = step
        self.sampled += metrics.get("tokens/sampled", 0)

    @property
    def share(self) -> float:
        """Done, from 0 to 1: of the steps or of the tokens, whichever is nearer its end."""
        of_tokens = self.sampled / self.outline.tokens if self.outline.tokens else 0.0
        return min(1.0, max(self.step / max(1, self.outline.steps), of_tokens))

    @property
    def over(self) -> bool:
        """Whether there is no next step."""
        return self.share >= 1

    @property
    def left(self) -> float:
        """Steps to come, at the tokens per step so far."""
        steps = float(self.outline.steps - self.step)
        per_step = (self.sampled - self.outline.sampled) / max(1, self.step - self.outline.first_step + 1)
        if self.outline.tokens and per_step:
            steps = min(steps, (self.outline.tokens - self.sampled) / per_step)
        return max(0.0, steps)

    @property
    def words(self) -> str:
        """`12/200`, and the tokens where they are counted: `12/200  2.1k/21k tokens`."""
        total = self.outline.steps
        steps = f"{self.step:>{len(str(total))}}/{total}"
        return f"{steps}  {count(self.sampled)}/{count(self.outline.tokens)} tokens" if self.outline.tokens else steps


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
