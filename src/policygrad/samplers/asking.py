"""How questions are asked at the same time: all or none, with somebody looking in, and given up where nobody is there any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from policygrad.samplers.base import Generation

T = TypeVar("T")


async def attended(work: Coroutine[Any, Any, T], pulse: Callable[[], Awaitable[None]], seconds: float) -> T:
    """What `work` comes to. As long as it takes, `pulse` is asked every so many seconds, and its error ends it; 0 = never."""
    if not seconds:
        return await work
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=seconds))[0]:
            await pulse()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # one that failed while this was cancelled, too


@asynccontextmanager
async def repeating(seconds: float, look: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
    """Inside, `look` is awaited again and again, so many seconds after it is done; None = not at all. What it raises is raised at
    the end."""
    if look is None:
        yield
        return

    async def looks() -> None:
        while True:
            await asyncio.sleep(seconds)
            await look()

    task = asyncio.ensure_future(looks())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def together(work: Sequence[Any]) -> list[Generation]:
    """All results; the first error ends the others."""
    tasks = [asyncio.ensure_future(some) for some in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
