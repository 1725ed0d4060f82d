"""Rollouts drawn before their step: while the weights of a step are updated, a later one is sampled with those of before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.trajectory import Group
from policygrad.utils.async_runner import computing

Collect = Callable[[int, int, Sequence[Group]], Rollout]
"""(step, the task's next example, groups that the rollout before has left) -> the step's rollout."""
_ENDING = 1.0
"""Seconds that a thread is waited for whose work nobody wants any more."""


@dataclass(frozen=True, eq=False)
class Ahead:
    """The rollouts of the steps from `step` on, and where the one after them begins."""

    step: int
    rollouts: tuple[Rollout, ...]
    position: int
    carried: tuple[Group, ...]
    tokens: int = 0
    """Sampled for all steps up to the last of them."""

    @property
    def next(self) -> tuple[int, int, tuple[Group, ...]]:
        """What the one after them is collected from."""
        return self.step + len(self.rollouts), self.position, self.carried

    def and_then(self, rollout: Rollout) -> Ahead:
        """With the one after them."""
        tokens = self.tokens + rollout.sampled
        return Ahead(self.step, (*self.rollouts, rollout), rollout.position, rollout.surplus, tokens)

    def taken(self) -> tuple[Rollout, Ahead]:
        """(this step's, those of the steps after it)."""
        first, *rest = self.rollouts
        return first, Ahead(self.step + 1, tuple(rest), self.position, self.carried, self.tokens)


class Producer:
    """Collects rollouts one after the other: here, or in a thread while a step is trained on. `finished` are those that are whole.

    One that a later step is drawn for begins no sooner than `beside` has been told of it, so that it is at most as many steps old
    as were asked for: none is ever dropped for its age, and where enough wait, nothing is drawn. None is begun for which there is
    no step: between the last one being taken and `beside` saying that no more are wanted, a thread may look for work.
    """

    def __init__(self, finished: Ahead, over: Callable[[Ahead], bool] = lambda finished: False) -> None:
        """over: whether the run ends with the last of these, so that none comes after it."""
        self.finished, self._over = finished, over
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._collect: Collect | None = None
        self._wanted = 0
        self._error: BaseException | None = None
        self._busy = 0.0
        self._since: float | None = None

    @property
    def busy(self) -> float:
        """Seconds in which rollouts were collected, so far."""
        with self._changed:
            return self._busy + (0.0 if self._since is None else time.perf_counter() - self._since)

    def take(self, count: int, collect: Collect) -> Rollout:
        """This step's rollout: the oldest. Where no thread is at it, what is missing of `count` is collected here."""
        with self._changed:
            while self._thread is not None and not self.finished.rollouts and self._error is None:
                self._changed.wait()
        self._raise()
        if self._thread is None:
            while not self.finished.rollouts or self._lacks(count):
                self._next(collect)
        with self._changed:
            rollout, self.finished = self.finished.taken()
            return rollout

    @contextmanager
    def beside(self, count: int, collect: Collect) -> Iterator[None]:
        """While what is inside is done, and after it, a thread collects until `count` rollouts are finished.

        An error inside waits for the one that is in the making; Ctrl-C does not.
        """
        with self._changed:
            self._wanted, self._collect = count, collect
            if self._thread is None and self._lacks(count):
                self._thread = threading.Thread(target=computing(self._work), daemon=True, name="rollout")
                self._thread.start()
        try:
            yield
        except Exception:
            self._wanted = 0
            self._join()
            raise

    def settle(self) -> None:
        """Returns when as many are finished as were wanted; raises what has gone wrong with one."""
        self._join()
        self._raise()

    def end(self, cancel: Callable[[], None]) -> None:
        """Nothing more is wanted. cancel: ends what is being drawn."""
        self._wanted = 0
        if (thread := self._thread) is not None:
            cancel()
            thread.join(_ENDING)

    def _join(self) -> None:
        if (thread := self._thread) is not None:
            thread.join()

    def _raise(self) -> None:
        if (error := self._error) is not None:
            self._error = None
            raise error

    def _work(self) -> None:
        """What the thread does."""
        try:
            while self._goes_on():
                assert self._collect is not None
                self._next(self._collect)
        except BaseException as error:  # told to whoever takes the next one
            self._error = error
        finally:
            with self._changed:
                if self._thread is threading.current_thread():  # `beside` may have begun another one
                    self._thread = None
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        with self._changed:
            more = self._lacks(self._wanted)
            if not more:
                self._thread = None  # from here on `beside` begins another one
            return more

    def _lacks(self, count: int) -> bool:
        """Whether there are fewer than these, and a step for another one."""
        return len(self.finished.rollouts) < count and not self._over(self.finished)

    def _next(self, collect: Collect) -> None:
        """One more is collected, from where the last one ended."""
        with self._changed:
            asked, self._since = self.finished.next, time.perf_counter()
        try:
            rollout = collect(*asked)
        finally:
            with self._changed:
                assert self._since is not None
                self._busy, self._since = self._busy + time.perf_counter() - self._since, None
        with self._changed:
            self.finished = self.finished.and_then(rollout)
            self._changed.notify_all()
