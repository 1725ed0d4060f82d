"""Rollouts drawn before their step: while the weights of a step are updated, a later one is sampled with those of before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.trajectory import EpisodeGroup
from policygrad.utils.async_runner import with_torch_threads

CollectFn = Callable[[int, int, Sequence[EpisodeGroup]], Rollout]
"""(step, the task's next example, groups that the rollout before has left) -> the step's rollout."""
_ENDING = 1.0
"""Seconds that a thread is waited for whose work nobody wants any more."""


@dataclass(frozen=True, eq=False)
class RolloutQueue:
    """The rollouts of the steps from `step` on, and where the one after them begins."""

    step: int
    rollouts: tuple[Rollout, ...]
    position: int
    leftover_groups: tuple[EpisodeGroup, ...]
    num_sampled_tokens: int = 0
    """Sampled for all steps up to the last of them."""

    @property
    def next_request(self) -> tuple[int, int, tuple[EpisodeGroup, ...]]:
        """What the one after them is collected from."""
        return self.step + len(self.rollouts), self.position, self.leftover_groups

    def append(self, rollout: Rollout) -> RolloutQueue:
        """With the one after them."""
        tokens = self.num_sampled_tokens + rollout.num_sampled_tokens
        return RolloutQueue(self.step, (*self.rollouts, rollout), rollout.position, rollout.leftover_groups, tokens)

    def pop(self) -> tuple[Rollout, RolloutQueue]:
        """(this step's, those of the steps after it)."""
        first, *remaining = self.rollouts
        return first, RolloutQueue(
            self.step + 1, tuple(remaining), self.position, self.leftover_groups, self.num_sampled_tokens
        )


class RolloutProducer:
    """Collects rollouts one after the other: here, or in a thread while a step is trained on. `finished` are those that are whole.

    One that a later step is drawn for begins no sooner than `beside` has been told of it, so that it is at most as many steps old
    as were asked for: none is ever dropped for its age, and where enough wait, nothing is drawn. None is begun for which there is
    no step: between the last one being taken and `beside` saying that no more are wanted, a thread may look for work.
    """

    def __init__(self, queue: RolloutQueue, is_finished: Callable[[RolloutQueue], bool] = lambda queue: False) -> None:
        """over: whether the run ends with the last of these, so that none comes after it."""
        self.queue, self._over = queue, is_finished
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._collect: CollectFn | None = None
        self._target = 0
        self._error: BaseException | None = None
        self._busy = 0.0
        self._since: float | None = None

    @property
    def busy_seconds(self) -> float:
        """Seconds in which rollouts were collected, so far."""
        with self._changed:
            return self._busy + (0.0 if self._since is None else time.perf_counter() - self._since)

    def take(self, count: int, collect: CollectFn) -> Rollout:
        """This step's rollout: the oldest. Where no thread is at it, what is missing of `count` is collected here."""
        with self._changed:
            while self._thread is not None and not self.queue.rollouts and self._error is None:
                self._changed.wait()
        self._raise()
        if self._thread is None:
            while not self.queue.rollouts or self._is_short(count):
                self._produce_one(collect)
        with self._changed:
            rollout, self.queue = self.queue.pop()
            return rollout

    @contextmanager
    def produce_during(self, count: int, collect: CollectFn) -> Iterator[None]:
        """While what is inside is done, and after it, a thread collects until `count` rollouts are finished.

        An error inside waits for the one that is in the making; Ctrl-C does not.
        """
        with self._changed:
            self._target, self._collect = count, collect
            if self._thread is None and self._is_short(count):
                self._thread = threading.Thread(target=with_torch_threads(self._work), daemon=True, name="rollout")
                self._thread.start()
        try:
            yield
        except Exception:
            self._target = 0
            self._join()
            raise

    def wait_idle(self) -> None:
        """Returns when as many are finished as were wanted; raises what has gone wrong with one."""
        self._join()
        self._raise()

    def stop(self, cancel: Callable[[], None]) -> None:
        """Nothing more is wanted. cancel: ends what is being drawn."""
        self._target = 0
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
            while self._should_continue():
                assert self._collect is not None
                self._produce_one(self._collect)
        except BaseException as error:  # told to whoever takes the next one
            self._error = error
        finally:
            with self._changed:
                if self._thread is threading.current_thread():  # `beside` may have begun another one
                    self._thread = None
                self._changed.notify_all()

    def _should_continue(self) -> bool:
        with self._changed:
            more = self._is_short(self._target)
            if not more:
                self._thread = None  # from here on `beside` begins another one
            return more

    def _is_short(self, count: int) -> bool:
        """Whether there are fewer than these, and a step for another one."""
        return len(self.queue.rollouts) < count and not self._over(self.queue)

    def _produce_one(self, collect: CollectFn) -> None:
        """One more is collected, from where the last one ended."""
        with self._changed:
            request, self._since = self.queue.next_request, time.perf_counter()
        try:
            rollout = collect(*request)
        finally:
            with self._changed:
                assert self._since is not None
                self._busy, self._since = self._busy + time.perf_counter() - self._since, None
        with self._changed:
            self.queue = self.queue.append(rollout)
            self._changed.notify_all()
