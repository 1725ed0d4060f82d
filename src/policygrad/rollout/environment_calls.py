"""Call environments with a time limit, report slow calls, and confine a failure to its episode."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from types import FrameType, TracebackType
from typing import Any, Self

from policygrad.errors import EngineError, PolicygradError
from policygrad.models.chat.control_tokens import replace_surrogates
from policygrad.rewards.workers.failures import MIN_LOST_CALLS
from policygrad.rewards.workers.messages import describe_error
from policygrad.rollout.environment import (
    DEFAULT_TIMEOUT,
    Environment,
    EnvironmentFactory,
    MalformedError,
    find_capabilities,
    make_environment,
)
from policygrad.tasks.base import Example
from policygrad.utils.async_runner import (
    BlockedError,
    OverdueError,
    await_with_timeout,
    contain_exit,
    is_inside_contained,
)
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.utils.signals import SignalHandlers
from policygrad.utils.spans import span

REPORT_AFTER_SECONDS = 4.0  # age at which a pending call is reported
REPORT_INTERVAL = 1.0  # seconds between two reports
CLOSE_TIMEOUT = 5.0  # seconds to close all open environments when a rollout is interrupted or fails

INTERRUPT_SIGNAL = getattr(signal, "SIGURG", None)
"""Interrupts code that blocks the event loop. The signal does nothing by default; None = not available on this system."""


class EnvironmentFailedError(Exception):
    """An environment's error, which ends its episode."""


class EnvironmentCalls:
    """Context manager in which the environments of one rollout are called.

    A thread reports which call is being waited for. If the event loop runs in the main thread, the thread also interrupts, by a
    signal, code that blocks the loop for longer than the timeout: a coroutine that never awaits cannot be cancelled.

    Args:
        timeout: Seconds allowed for one call.
        progress: Receives which call is being waited for.
        tolerate_timeouts: Continue the rollout even if a method times out in every call.
    """

    def __init__(
        self,
        timeout: float = DEFAULT_TIMEOUT,
        progress: ProgressCallback = ignore_progress,
        *,
        tolerate_timeouts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout, self._progress, self._clock = timeout, progress, clock
        self._tolerate_timeouts = tolerate_timeouts
        self._open: dict[int, tuple[float, str]] = {}  # pending calls by number: (start time, method)
        self._numbers, self._num_done = count(), 0
        self._timeouts: Counter[str] = Counter()
        self._completed = set[str]()  # methods that returned in time at least once
        self._reported = False
        self._stop = threading.Event()
        self._reporter: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_activity = clock()  # when the loop last ran, or a call started
        self._signals = SignalHandlers(self._interrupt, () if INTERRUPT_SIGNAL is None else (INTERRUPT_SIGNAL,))
        self._interrupting = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._reporter is None:
            return
        self._stop.set()
        self._reporter.join()
        self._signals.__exit__(kind, error, at)
        if self._reported:
            self._progress("", 0, 0)

    async def call(self, environment: object, name: str, method: str, where: str, *args: Any) -> Any:
        """Call a method of an environment and return its result.

        Args:
            name: Name of the environment, for messages.
            where: Place of the episode, for messages.

        Raises:
            EnvironmentFailedError: The method raised an error or timed out.
            EngineError: The method is not async, or made an invalid Observation or Step.
            PolicygradError: Raised by the environment itself, such as for a server that is not available.
        """
        what, number = f"{name}.{method}", next(self._numbers)
        self._last_activity = self._clock()
        self._open[number] = self._last_activity, what
        if self._reporter is None and not find_capabilities(environment).is_single_answer:
            self._loop = asyncio.get_running_loop()
            self._signals.__enter__()
            self._reporter = threading.Thread(target=self._report, daemon=True, name="environment calls")
            self._reporter.start()
        try:
            coroutine = getattr(environment, method)(*args)
            if not inspect.isawaitable(coroutine):
                raise EngineError(f"{what} is not async: write `async def {method}`")
            waits = getattr(environment, "waits", True)
            if waits:
                with span(what, where=where):
                    result = await await_with_timeout(self.timeout, coroutine)
            else:  # the span of all episodes' calls suffices
                result = await contain_exit(coroutine)
            self._completed.add(what)
            return result
        except OverdueError:  # a method that never returned in time fails the run
            if what not in self._completed:
                self._timeouts[what] += 1
                if self._timeouts[what] >= MIN_LOST_CALLS and not self._tolerate_timeouts:
                    raise EngineError(
                        f"the environment's {what} timed out in all {MIN_LOST_CALLS} calls ({self.timeout:g} s each): try it by "
                        "hand on one example, or raise --environment.timeout SECONDS"
                    ) from None
            raise _failure(what, f"timed out after {self.timeout:g} s (--environment.timeout)", where) from None
        except MalformedError as error:
            raise EngineError(f"{what}: {error} ({where})") from error
        except PolicygradError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # not raised by the environment itself
            raise _failure(what, describe_error(error), where) from error
        finally:
            del self._open[number]
            self._num_done += 1

    def create_environment(
        self, factory: EnvironmentFactory, example: Example, seed: int, name: str, where: str
    ) -> Environment:
        """Return the environment of one episode.

        Raises:
            EnvironmentFailedError: The factory raised an error.
            EngineError: The object lacks the methods of an environment.
        """
        try:
            environment = make_environment(factory, example, seed)
        except PolicygradError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            raise _failure(name, describe_error(error), where) from error
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):
                raise EngineError(
                    f"{type(environment).__name__} has no method {method!r}, which an environment needs: write "
                    f"`async def {method}`"
                )
        return environment

    def _report(self) -> None:
        """Report the oldest pending call if it is slow, and interrupt blocking ones, in a thread."""
        assert self._loop is not None
        while not self._stop.wait(REPORT_INTERVAL):
            pending = list(self._open.values())
            since, what = min(pending, default=(self._clock(), ""))
            if what and self._clock() - since >= REPORT_AFTER_SECONDS:
                text = f"waiting for {what} (each call has up to {self.timeout:g} s, --environment.timeout)"
                self._progress(text, self._num_done, self._num_done + len(pending))
                self._reported = True
            if INTERRUPT_SIGNAL is not None and self._open and self._clock() - self._last_activity > self.timeout:
                self._interrupting = True
                self._signals.send(INTERRUPT_SIGNAL)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._touch)

    def _touch(self) -> None:
        self._last_activity = self._clock()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        interrupting, self._interrupting = self._interrupting, False
        if interrupting and is_inside_contained(frame):
            self._touch()  # the next call gets its full time
            raise BlockedError


def _failure(what: str, why: str, where: str) -> EnvironmentFailedError:
    return EnvironmentFailedError(str(replace_surrogates(f"the environment's {what} {why} (completion of {where})")))


def first_of_each_kind(messages: Iterable[str]) -> tuple[str, ...]:
    """Return the first message of each kind: of one method and one exception."""
    first: dict[str, str] = {}
    for message in messages:
        first.setdefault(message.partition(": ")[0], message)
    return tuple(first.values())
