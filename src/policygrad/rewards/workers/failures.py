"""When rewards that fail end the run: a function that never answers, and steps in which most samples have no reward."""

from collections import Counter
from collections.abc import Sequence

from policygrad.errors import RewardError
from policygrad.rewards.workers.messages import SampleResult

MIN_LOST_CALLS = 4  # lost calls before a function is given up, with one worker or two
_TOLD = 3  # messages in an error
_OF_REWARDS = ("reward ", "no reward", "no steps", "the environment")  # how messages about rewards begin


class UnresponsiveFunctionDetector:
    """Counts, per function, the calls that overran or killed their worker while none has ever given a reward.

    A call costs its whole budget, so that a rollout of them is hours of silence: `limit` of them end it. None = never.
    """

    def __init__(self, names: Sequence[str], limit: int | None) -> None:
        self._names, self._limit = names, limit
        self._lost: Counter[int] = Counter()
        self._proven: set[int] = set()

    def record_results(self, function: int, judgements: Sequence[SampleResult]) -> None:
        """The function was called, and this is what it said."""
        if function not in self._proven and any(judgement.reason is None for judgement in judgements):
            self._proven.add(function)

    def has_succeeded(self, function: int) -> bool:
        """Whether it has given a reward."""
        return function in self._proven

    def record_lost(self, function: int, said: str) -> None:
        """A call of the function was lost. Raises RewardError when it is one too many."""
        if function in self._proven:
            return
        self._lost[function] += 1
        if self._limit is not None and self._lost[function] >= self._limit:
            raise RewardError(
                f"reward {self._names[function]!r} has not given a single reward yet, and {self._limit} calls of it were lost; the "
                f"last one {said}. Try it by hand on one completion, or give it a larger budget, @reward(budget=...)"
            )


class FailedStepTracker:
    """Counts the steps in a row of which more than `share` of the samples have no reward; `patience` of them are too many, and so
    is a first step without any, or a first evaluation before one with some. patience 0 = never. Every process counts anew."""

    def __init__(self, share: float, patience: int) -> None:
        self._share, self._patience = share, patience
        self._row: list[float] = []
        self._messages: dict[str, None] = {}
        self._first = {"step", "evaluation"}

    def record_step(self, failed: float, messages: Sequence[str]) -> str | None:
        """A step is done, `failed` of its samples have no reward; why the run is to end, None = it goes on."""
        if failed <= self._share:
            self._row, self._messages = [], {}
            self._first.clear()
            return None
        self._row.append(failed)
        self._keep(messages)
        if found := self._none("step", failed >= 1):
            return found
        if not self._patience or len(self._row) < self._patience:
            return None
        shares = ", ".join(f"{x:.0%}" for x in self._row)
        row = "the last step" if len(self._row) == 1 else f"the last {len(self._row)} steps, all in a row"
        return self._words(f"more than {self._share:.0%} of the samples have no reward in {row} ({shares})")

    def record_evaluation(self, failed: bool, messages: Sequence[str]) -> str | None:
        """An evaluation is done; failed: nothing could be scored."""
        if failed:
            self._keep(messages)
        return self._none("evaluation", failed)

    def _none(self, what: str, failed: bool) -> str | None:
        first = what in self._first
        self._first.discard(what)
        return (
            self._words(f"no sample of the first {what} has a reward") if first and failed and self._patience else None
        )

    def _keep(self, messages: Sequence[str]) -> None:
        self._messages |= dict.fromkeys(text for text in messages if text.startswith(_OF_REWARDS))

    def _words(self, said: str) -> str:
        messages = list(self._messages)
        rest = f"; and {len(messages) - _TOLD} more" if len(messages) > _TOLD else ""
        return said + (": " + "; ".join(messages[:_TOLD]) + rest) * bool(messages)
