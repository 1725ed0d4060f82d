"""Failing rewards that end a run: a function that never returns, and steps in which most samples have no reward."""

from collections import Counter
from collections.abc import Sequence

from policygrad.errors import RewardError
from policygrad.rewards.workers.messages import SampleResult

MIN_LOST_CALLS = 4  # before a function is given up, with one worker or two
_MAX_MESSAGES = 3  # in an error
_REWARD_MESSAGES = ("reward ", "no reward", "no steps", "the environment", "an episode got no reward")
"""How messages about rewards begin."""


class UnresponsiveFunctionDetector:
    """Counts, per function, the calls that timed out or killed their worker before it has ever returned a reward.

    Each such call costs its full timeout, so that a rollout of them would take hours: `limit` of them end it. None = never.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._lost: Counter[str] = Counter()  # by the function's name
        self._succeeded: set[str] = set()

    def record_results(self, name: str, results: Sequence[SampleResult]) -> None:
        if any(result.reason is None for result in results):
            self._succeeded.add(name)

    def has_succeeded(self, name: str) -> bool:
        """Return whether the function has ever returned a reward."""
        return name in self._succeeded

    def record_lost(self, name: str, what: str) -> None:
        """Count a call that timed out or crashed. Raises RewardError at the limit."""
        if name in self._succeeded:
            return
        self._lost[name] += 1
        if self._limit is not None and self._lost[name] >= self._limit:
            raise RewardError(
                f"reward {name!r} has not returned a single reward, and {self._limit} calls of it were lost; the last one {what}. "
                "Call it by hand on one completion, or raise its timeout with @reward(timeout=...)"
            )


class FailedStepTracker:
    """Decides when failing rewards end a run: each method returns the reason to stop, or None.

    A step fails when more than `max_fraction` of its samples have no reward. `max_steps` failed steps in a row end the run, and so
    does a first step, or a first evaluation before any reward, in which no sample has one. max_steps 0 = never. A resumed run
    starts counting at zero.
    """

    def __init__(self, max_fraction: float, max_steps: int) -> None:
        self._max_fraction, self._max_steps = max_fraction, max_steps
        self._failed: list[float] = []  # failed fractions of the steps so far, in a row
        self._messages: dict[str, None] = {}
        self._first = {"step", "evaluation"}

    def record_step(self, failed: float, messages: Sequence[str]) -> str | None:
        """Record a step; failed: the fraction of its samples without a reward."""
        if failed <= self._max_fraction:
            self._failed, self._messages = [], {}
            self._first.clear()
            return None
        self._failed.append(failed)
        self._add_messages(messages)
        if reason := self._check_first("step", failed >= 1):
            return reason
        if not self._max_steps or len(self._failed) < self._max_steps:
            return None
        shares = ", ".join(f"{x:.0%}" for x in self._failed)
        steps = "the last step" if len(self._failed) == 1 else f"the last {len(self._failed)} steps, all in a row"
        return self._format(f"more than {self._max_fraction:.0%} of the samples have no reward in {steps} ({shares})")

    def record_evaluation(self, failed: bool, messages: Sequence[str]) -> str | None:
        """Record an evaluation; failed: no sample of it has a reward."""
        if failed:
            self._add_messages(messages)
        return self._check_first("evaluation", failed)

    def _check_first(self, what: str, failed: bool) -> str | None:
        first = what in self._first
        self._first.discard(what)
        if first and failed and self._max_steps:
            return self._format(f"no sample of the first {what} has a reward")
        return None

    def _add_messages(self, messages: Sequence[str]) -> None:
        self._messages |= dict.fromkeys(text for text in messages if text.startswith(_REWARD_MESSAGES))

    def _format(self, reason: str) -> str:
        messages = list(self._messages)
        more = f"; and {len(messages) - _MAX_MESSAGES} more" if len(messages) > _MAX_MESSAGES else ""
        return reason + (": " + "; ".join(messages[:_MAX_MESSAGES]) + more) * bool(messages)
