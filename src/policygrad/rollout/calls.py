"""Calls of environments: each within a time limit, reported while it is waited for, and costing its episode alone where it fails."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count
from types import TracebackType
from typing import Any, Self

from policygrad.environments.base import Environment, EnvironmentFactory, MalformedError, made
from policygrad.environments.single_turn import SingleTurn
from policygrad.errors import EngineError, PolicygradError
from policygrad.models.control_tokens import encodable
from policygrad.rewards.calls import describe
from policygrad.rewards.waits import Phase, nobody
from policygrad.tasks.types import Example
from policygrad.waiting import OverdueError, within

TIMEOUT = 300.0
"""Seconds that one call of an environment may take, by default."""
SILENCE = 4.0
"""Seconds after which a call that is waited for is reported."""
EVERY = 1.0
"""Seconds between two reports."""
CLOSING = 5.0
"""Seconds in which all open episodes together are closed when a rollout is stopped or fails."""


class FailedError(Exception):
    """Why an environment has lost its episode."""


class Calls:
    """Context in which the environments of one rollout are called.

    Args:
        timeout: seconds that one call may take.
        phase: is told which call is waited for; a thread tells it, so that it also hears of code that blocks the event loop.
    """

    def __init__(
        self, timeout: float = TIMEOUT, phase: Phase = nobody, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout, self._phase, self._clock = timeout, phase, clock
        self._open: dict[int, tuple[float, str]] = {}
        """Calls under way by number: since when, and of what."""
        self._numbers, self._done = count(), 0
        self._reported = False
        self._over = threading.Event()
        self._reporter: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._reporter is not None:
            self._reporter.join()
        if self._reported:
            self._phase("", 0, 0)

    async def call(self, environment: object, name: str, method: str, where: str, *args: Any) -> Any:
        """Return what a method of an environment returns.

        Args:
            name: of the environment, for messages. where: of the episode, for messages.

        Raises:
            FailedError: it raised, or was not over in time.
            EngineError: a method that is not async; an Observation or a Step that cannot be meant.
            PolicygradError: its own, such as a server that is not there.
        """
        number = next(self._numbers)
        self._open[number] = self._clock(), f"{name}.{method}"
        if self._reporter is None and not isinstance(environment, SingleTurn):
            self._reporter = threading.Thread(target=self._report, daemon=True, name="environment calls")
            self._reporter.start()
        try:
            result = getattr(environment, method)(*args)
            if not inspect.isawaitable(result):
                raise EngineError(f"{name}.{method} is not async: write `async def {method}`")
            return await (within(self.timeout, result) if getattr(environment, "waits", True) else result)
        except OverdueError:
            late = f"was not over within {self.timeout:g} s (--environment.timeout)"
            raise _failed(f"{name}.{method}", late, where) from None
        except MalformedError as error:
            raise EngineError(f"{name}.{method}: {error} ({where})") from error
        except PolicygradError:
            raise
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise _failed(f"{name}.{method}", describe(error), where) from error  # its own
        except (Exception, SystemExit) as error:
            raise _failed(f"{name}.{method}", describe(error), where) from error
        finally:
            del self._open[number]
            self._done += 1

    def make(self, factory: EnvironmentFactory, example: Example, seed: int, name: str, where: str) -> Environment:
        """Return the environment of one episode.

        Raises:
            FailedError: what makes it raised.
            EngineError: it is none.
        """
        try:
            environment = made(factory, example, seed)
        except PolicygradError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            raise _failed(name, describe(error), where) from error
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):
                raise EngineError(
                    f"{type(environment).__name__} has no method {method!r}, which an environment has: write `async def {method}`"
                )
        return environment

    def look(self) -> None:
        """Report the call that is waited for longest, where that takes long."""
        waiting = list(self._open.values())
        since, what = min(waiting, default=(self._clock(), ""))
        if what and self._clock() - since >= SILENCE:
            text = f"waiting for {what} (each call has up to {self.timeout:g} s, --environment.timeout)"
            self._phase(text, self._done, self._done + len(waiting))
            self._reported = True

    def _report(self) -> None:
        while not self._over.wait(EVERY):
            self.look()


def _failed(what: str, why: str, where: str) -> FailedError:
    return FailedError(str(encodable(f"the environment's {what} {why} (completion of {where})")))


def kinds(messages: Iterable[str]) -> tuple[str, ...]:
    """The first of each kind: of one call and one exception."""
    first: dict[str, str] = {}
    for message in messages:
        first.setdefault(message.partition(": ")[0], message)
    return tuple(first.values())
