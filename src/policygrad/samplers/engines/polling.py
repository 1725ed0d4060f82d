"""Look at a server from time to time while its replies are awaited: once for all that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def repeat_during(work: Coroutine[Any, Any, T], action: Callable[[], Awaitable[None]], interval: float) -> T:
    """Await `work`, and call `action` every `interval` seconds until it is done; an error of `action` cancels it. 0 = never."""
    return await SharedPoll(action, interval).during(work)


class SharedPoll:
    """Calls an action every few seconds while anything is awaited by `during`, once for all of it; an error of the action cancels
    them all. What waits at the same time waits in one event loop."""

    def __init__(self, action: Callable[[], Awaitable[None]], interval: float) -> None:
        """
        Args:
            interval: Seconds from one call's end to the next; 0 = never.
        """
        self.action, self.interval = action, interval
        self._waiting = 0
        self._repeating: asyncio.Task[NoReturn] | None = None

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`."""
        if not self.interval:
            return await work
        task = asyncio.ensure_future(work)
        if self._repeating is None or self._repeating.done():
            self._repeating = asyncio.ensure_future(self._repeat())
        repeating = self._repeating
        self._waiting += 1
        try:
            await asyncio.wait([task, repeating], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else repeating.result()
        finally:
            self._waiting -= 1
            task.cancel()
            ending: list[asyncio.Future[Any]] = [task]
            if not self._waiting and self._repeating is not None:
                self._repeating.cancel()
                ending.append(self._repeating)
                self._repeating = None  # what begins before it has ended needs one of its own
            # also an error raised while it was being cancelled
            await asyncio.gather(*ending, return_exceptions=True)

    async def _repeat(self) -> NoReturn:
        while True:
            await asyncio.sleep(self.interval)
            await self.action()
