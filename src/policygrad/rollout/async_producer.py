"""Asynchronous rollouts: while a step's weights are updated, later rollouts are sampled with the weights before the update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.trajectory import EpisodeGroup, RolloutRequest
from policygrad.utils.async_runner import with_torch_threads
from policygrad.utils.spans import span

CollectFn = Callable[[RolloutRequest], Rollout]
STOP_TIMEOUT = 1.0  # seconds to wait for the thread of a cancelled rollout


@dataclass(frozen=True, eq=False)
class RolloutQueue:
    """The finished rollouts of the steps from `step` on, and where the rollout after them begins."""

    step: int
    rollouts: tuple[Rollout, ...]
    position: int
    leftover_groups: tuple[EpisodeGroup, ...]
    num_sampled_tokens: int = 0  # tokens sampled for all steps up to the last queued one

    @property
    def next_request(self) -> RolloutRequest:
        """The request for the rollout after the queued ones."""
        return RolloutRequest(self.step + len(self.rollouts), self.position, self.leftover_groups)

    def append(self, rollout: Rollout) -> RolloutQueue:
        """Return the queue with one more rollout."""
        tokens = self.num_sampled_tokens + rollout.num_sampled_tokens
        return RolloutQueue(self.step, (*self.rollouts, rollout), rollout.position, rollout.leftover_groups, tokens)

    def pop(self) -> tuple[Rollout, RolloutQueue]:
        """Return the oldest rollout and the queue without it."""
        return self.rollouts[0], replace(self, step=self.step + 1, rollouts=self.rollouts[1:])


class RolloutProducer:
    """Collects rollouts one after the other, in the calling thread or in a background thread during training.

    A rollout for a later step starts only after `produce_during` has requested it, so none is older than allowed and none is
    discarded for its age; while enough are queued, nothing is sampled. None is started beyond the run's last step.
    """

    def __init__(self, queue: RolloutQueue, is_finished: Callable[[RolloutQueue], bool] = lambda queue: False) -> None:
        """is_finished: True if the run ends with the last queued rollout."""
        self.queue, self._is_finished = queue, is_finished
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._collect: CollectFn | None = None
        self._target = 0
        self._error: BaseException | None = None
        self._busy = 0.0
        self._since: float | None = None

    @property
    def busy_seconds(self) -> float:
        """Seconds spent collecting rollouts so far."""
        with self._changed:
            return self._busy + (0.0 if self._since is None else time.perf_counter() - self._since)

    def take(self, count: int, collect: CollectFn) -> Rollout:
        """Return the oldest rollout; without a background thread, first collect until `count` are queued."""
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
        """Collect in a background thread, during the block and after it, until `count` rollouts are queued.

        If the block raises an error, the rollout being collected is finished first; KeyboardInterrupt does not wait.
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
        """Wait until the requested rollouts are queued; raise the error of one that failed."""
        self._join()
        self._raise()

    def stop(self, cancel: Callable[[], None]) -> None:
        """Stop collecting. cancel: aborts the rollout being sampled."""
        self._target = 0
        if (thread := self._thread) is not None:
            cancel()
            thread.join(STOP_TIMEOUT)

    def _join(self) -> None:
        if (thread := self._thread) is not None:
            thread.join()

    def _raise(self) -> None:
        if (error := self._error) is not None:
            self._error = None
            raise error

    def _work(self) -> None:
        """Run the background thread."""
        try:
            while self._should_continue():
                assert self._collect is not None
                self._produce_one(self._collect)
        except BaseException as error:  # raised in the thread that takes the next rollout
            self._error = error
        finally:
            with self._changed:
                if self._thread is threading.current_thread():  # `produce_during` may have started another one
                    self._thread = None
                self._changed.notify_all()

    def _should_continue(self) -> bool:
        with self._changed:
            more = self._is_short(self._target)
            if not more:
                self._thread = None  # from here on `produce_during` starts a new one
            return more

    def _is_short(self, count: int) -> bool:
        """Return True if fewer rollouts are queued and the run has a step for another one."""
        return len(self.queue.rollouts) < count and not self._is_finished(self.queue)

    def _produce_one(self, collect: CollectFn) -> None:
        with self._changed:
            request, self._since = self.queue.next_request, time.perf_counter()
        try:
            with span("rollout", step=request.step):
                rollout = collect(request)
        finally:
            with self._changed:
                assert self._since is not None
                self._busy, self._since = self._busy + time.perf_counter() - self._since, None
        with self._changed:
            self.queue = self.queue.append(rollout)
            self._changed.notify_all()
