"""Calls of environments: each has a time limit, is reported while it is waited for, and where it fails costs its episode alone."""

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

from policygrad.environments.base import (
    DEFAULT_TIMEOUT,
    Environment,
    EnvironmentFactory,
    MalformedError,
    SingleTurn,
    make_environment,
)
from policygrad.errors import EngineError, PolicygradError
from policygrad.models.control_tokens import replace_surrogates
from policygrad.rewards.workers.failures import MIN_LOST_CALLS
from policygrad.rewards.workers.messages import describe_error
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

REPORT_AFTER_SECONDS = 4.0
"""Seconds after which a call that is waited for is reported."""
REPORT_INTERVAL = 1.0
"""Seconds between two reports."""
CLOSE_TIMEOUT = 5.0
"""Seconds in which all open episodes together are closed when a rollout is stopped or fails."""


INTERRUPT_SIGNAL = getattr(signal, "SIGURG", None)
"""Interrupts what blocks the event loop: a signal that does nothing where nobody handles it. None = a system without it."""


class EnvironmentFailedError(Exception):
    """Why an environment has lost its episode."""


class EnvironmentCalls:
    """Context in which the environments of one rollout are called.

    A thread reports which call is waited for. Where the event loop runs in the main thread, it also interrupts code that blocks the
    loop for longer than the timeout, by a signal: a coroutine that awaits nothing cannot be cancelled.

    Args:
        timeout: seconds that one call may take.
        phase: is told which call is waited for.
        patient: a method that is never over in time does not end the rollout.
    """

    def __init__(
        self,
        timeout: float = DEFAULT_TIMEOUT,
        progress: ProgressCallback = ignore_progress,
        *,
        tolerate_timeouts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout, self._phase, self._patient, self._clock = timeout, progress, tolerate_timeouts, clock
        self._open: dict[int, tuple[float, str]] = {}
        """Calls under way by number: since when, and of what."""
        self._numbers, self._done = count(), 0
        self._lost: Counter[str] = Counter()
        self._proven = set[str]()
        """Methods that were over in time."""
        self._reported = False
        self._over = threading.Event()
        self._reporter: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._moved = clock()
        """When the loop last went on, or a call began."""
        self._signals = SignalHandlers(self._interrupt, () if INTERRUPT_SIGNAL is None else (INTERRUPT_SIGNAL,))
        self._interrupting = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._reporter is None:
            return
        self._over.set()
        self._reporter.join()
        self._signals.__exit__(kind, error, at)
        if self._reported:
            self._phase("", 0, 0)

    async def call(self, environment: object, name: str, method: str, where: str, *args: Any) -> Any:
        """Return what a method of an environment returns.

        Args:
            name: of the environment, for messages. where: of the episode, for messages.

        Raises:
            EnvironmentFailedError: it raised, or was not over in time.
            EngineError: a method that is not async; an Observation or a Step that cannot be meant.
            PolicygradError: its own, such as a server that is not there.
        """
        what, number = f"{name}.{method}", next(self._numbers)
        self._moved = self._clock()
        self._open[number] = self._moved, what
        if self._reporter is None and not isinstance(environment, SingleTurn):
            self._begin()
        try:
            result = getattr(environment, method)(*args)
            if not inspect.isawaitable(result):
                raise EngineError(f"{what} is not async: write `async def {method}`")
            waits = getattr(environment, "waits", True)
            result = await (await_with_timeout(self.timeout, result) if waits else contain_exit(result))
            self._proven.add(what)
            return result
        except OverdueError:
            self._count(what)
            late = f"was not over within {self.timeout:g} s (--environment.timeout)"
            raise _failed(what, late, where) from None
        except MalformedError as error:
            raise EngineError(f"{what}: {error} ({where})") from error
        except PolicygradError:
            raise
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise _failed(what, describe_error(error), where) from error  # its own
        except Exception as error:
            raise _failed(what, describe_error(error), where) from error
        finally:
            del self._open[number]
            self._done += 1

    def create_environment(
        self, factory: EnvironmentFactory, example: Example, seed: int, name: str, where: str
    ) -> Environment:
        """Return the environment of one episode.

        Raises:
            EnvironmentFailedError: what makes it raised.
            EngineError: it is none.
        """
        try:
            environment = make_environment(factory, example, seed)
        except PolicygradError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            raise _failed(name, describe_error(error), where) from error
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):
                raise EngineError(
                    f"{type(environment).__name__} has no method {method!r}, which an environment has: write `async def {method}`"
                )
        return environment

    def report_waiting(self) -> None:
        """Report the call that is waited for longest, where that takes long."""
        waiting = list(self._open.values())
        since, what = min(waiting, default=(self._clock(), ""))
        if what and self._clock() - since >= REPORT_AFTER_SECONDS:
            text = f"waiting for {what} (each call has up to {self.timeout:g} s, --environment.timeout)"
            self._phase(text, self._done, self._done + len(waiting))
            self._reported = True

    def _begin(self) -> None:
        """From the first call on, of an environment that may take long."""
        self._loop = asyncio.get_running_loop()
        self._signals.__enter__()
        self._reporter = threading.Thread(target=self._follow, daemon=True, name="environment calls")
        self._reporter.start()

    def _follow(self) -> None:
        """What the thread does."""
        assert self._loop is not None
        while not self._over.wait(REPORT_INTERVAL):
            self.report_waiting()
            if INTERRUPT_SIGNAL is not None and self._open and self._clock() - self._moved > self.timeout:
                self._interrupting = True
                self._signals.send(INTERRUPT_SIGNAL)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._move)

    def _move(self) -> None:
        self._moved = self._clock()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        asked, self._interrupting = self._interrupting, False
        if asked and is_inside_contained(frame):
            self._moved = self._clock()  # what comes next has all its time
            raise BlockedError

    def _count(self, what: str) -> None:
        """A call was not over in time. Raises EngineError where none of these has ever been, and that was one too many."""
        if what in self._proven:
            return
        self._lost[what] += 1
        if self._lost[what] >= MIN_LOST_CALLS and not self._patient:
            raise EngineError(
                f"the environment's {what} was not over a single time within {self.timeout:g} s, in {MIN_LOST_CALLS} calls: try it by "
                "hand on one example, or give it longer, --environment.timeout SECONDS"
            )


def _failed(what: str, why: str, where: str) -> EnvironmentFailedError:
    return EnvironmentFailedError(str(replace_surrogates(f"the environment's {what} {why} (completion of {where})")))


def first_of_each_kind(messages: Iterable[str]) -> tuple[str, ...]:
    """The first of each kind: of one call and one exception."""
    first: dict[str, str] = {}
    for message in messages:
        first.setdefault(message.partition(": ")[0], message)
    return tuple(first.values())
