"""Rollouts drawn before their step: while the weights of a step are updated, a later one is sampled with those of before it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.trajectory import Group
from policygrad.waiting import computing

T = TypeVar("T")
Collect = Callable[[int, int, Sequence[Group]], Rollout]
"""(step, the task's next example, groups that the rollout before has left) -> the step's rollout."""


@dataclass(frozen=True, eq=False)
class Ahead:
    """The rollouts of the steps from `step` on, and where the one after them begins."""

    step: int
    rollouts: tuple[Rollout, ...]
    position: int
    carried: tuple[Group, ...]

    def upto(self, count: int, collect: Collect) -> Ahead:
        """With `count` rollouts at least, what is missing collected."""
        found = self
        while len(found.rollouts) < count:
            rollout = collect(found.step + len(found.rollouts), found.position, found.carried)
            found = Ahead(found.step, (*found.rollouts, rollout), rollout.position, rollout.surplus)
        return found

    def taken(self) -> tuple[Rollout, Ahead]:
        """(this step's, those of the steps after it)."""
        first, *rest = self.rollouts
        return first, Ahead(self.step + 1, tuple(rest), self.position, self.carried)


@contextmanager
def beside(work: Callable[[], T], *, here: bool) -> Iterator[Callable[[], T]]:
    """`work` is done in a thread while what is inside is; what is yielded waits for its result, or raises its error. here: it
    is done when it is waited for instead.

    An error inside waits for the thread's end; Ctrl-C does not.
    """
    if here:
        yield work
        return
    found: list[T] = []
    raised: list[BaseException] = []

    def target() -> None:
        try:
            found.append(work())
        except BaseException as error:  # told to whoever waits
            raised.append(error)

    def result() -> T:
        thread.join()
        if raised:
            raise raised[0]
        return found[0]

    thread = threading.Thread(target=computing(target), daemon=True, name="rollout")
    thread.start()
    try:
        yield result
    except Exception:
        thread.join()
        raise
