"""Several servers as one: each question goes to the one with the fewest; one that is away loses its questions to the others, and
is taken back when it has been made ready again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from policygrad.errors import EngineError
from policygrad.rewards.workers.pool import REPORT_AFTER_SECONDS
from policygrad.samplers.engines.http import ServerUnavailableError
from policygrad.utils.progress import ProgressCallback, ignore_progress

T = TypeVar("T")
MAX_ATTEMPTS = 10
"""Times that one question is asked: servers that came back each time were there, and it is the question that they fail at. And
times in a row that a server which has been ready is refused, before it is given up."""
MAX_INVALID_REPLIES = 3
"""Times that one question is answered with what cannot be used, or refused."""
_FIRST, _MOST = 0.02, 2.0
"""Seconds between two attempts: twice as long each time, from the first to the second."""
_SHOWN = 100
"""Letters of each server's reason while it is waited for."""


@dataclass(eq=False)
class EngineServer:
    """One address, and how it stands."""

    url: str
    limit: int = 0
    """Questions that it is asked at a time."""
    pending: int = 0
    """Questions that wait for its answer."""
    ready: bool = False
    """Whether it is reached, and answers with the weights of now."""
    ready_count: int = 0
    """That it was made ready. One that has been is refused for a fault that may pass; at first contact it is a mistake."""
    rejections: int = 0
    """Times in a row that it was reached, and was not what it should be."""
    last_error: str = ""
    """Why it could not be reached, or was refused, the last time; empty = neither."""
    given_up: bool = False
    """Whether it was away for longer than it may, or was refused too often."""
    draining: bool = False
    """Whether it answers what it was asked before it is made ready: it is to be given other weights."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    """What makes it ready."""


class ServerPool:
    """Asks; `prepare(server)` makes one ready, or raises ServerUnavailableError where that has to be tried again, and EngineError where it is
    not what it should be. tell: is told when all are away."""

    def __init__(
        self,
        urls: Sequence[str],
        prepare: Callable[[EngineServer], Awaitable[None]],
        max_concurrency: int,
        recovery_timeout: float,
        on_progress: ProgressCallback = ignore_progress,
    ) -> None:
        self.all = [EngineServer(url.rstrip("/"), max_concurrency) for url in urls]
        self.prepare, self.recovery_timeout, self.on_progress = prepare, recovery_timeout, on_progress
        self.num_retries = 0
        """Questions that another server, or the same one later, was asked again."""
        lock = asyncio.Lock()
        self._changed, self._goes_on = asyncio.Condition(lock), asyncio.Condition(lock)
        """What questions wait for; the second, those whose answers are begun, which go before others."""
        self._settles = asyncio.Condition(lock)
        """What waits for servers, not for a place on one: it takes no question's turn."""
        self._begun = 0
        """Of those that wait."""
        self._error: Exception | None = None
        self._alone: float | None = None
        """Since when no server is ready, by the clock; None = some is."""
        self._told = False

    async def call(self, ask: Callable[[EngineServer], Awaitable[T]], is_continuation: bool = False) -> T:
        """What a server answers. One whose answer cannot be used is made ready again, as one that gives none. begun: it goes on
        with an answer, and before those that have none yet: a long one is not kept waiting at every piece.

        Raises:
            EngineError: all of them are lost, or the question is not answered as it has to be, whoever is asked.
        """
        garbage = 0
        for attempt in count(1):
            server = await self._next(is_continuation)
            times = server.ready_count
            try:
                return await ask(server)
            except ServerUnavailableError as error:
                if attempt == MAX_ATTEMPTS:
                    raise EngineError(
                        f"one question was asked {MAX_ATTEMPTS} times, the last time {server.url}: {error}"
                    ) from error
                self._failed(server, times, error)
            except EngineError as error:
                garbage += 1
                if garbage == MAX_INVALID_REPLIES:
                    raise
                self._failed(server, times, error)
            finally:
                async with self._changed:
                    server.pending -= 1
                    self._settles.notify_all()
                    if server.ready:  # one place is free, for one of perhaps thousands
                        (self._goes_on if self._begun else self._changed).notify()
                    else:
                        self._wake()  # for what has waited for its last answer
        raise AssertionError

    async def ready(self) -> None:
        """Prepares every server anew; returns when each is ready, or away while others are ready."""
        for server in self.all:  # before anything else is asked of them
            server.ready, server.given_up, server.last_error, server.rejections, server.draining = (
                False,
                False,
                "",
                0,
                True,
            )
        await self.close()  # what makes a server ready for the weights of before
        self._error = None
        for server in self.all:
            self._recover(server)
        async with self._settles:
            await self._settles.wait_for(self._settled)
            self._raise()

    async def close(self) -> None:
        """Ends what is being prepared."""
        tasks = [server.task for server in self.all if server.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._over()

    def _failed(self, server: EngineServer, times: int, error: Exception) -> None:
        """times: `Server.ready_count` when it was asked; it may have been made ready since, which this is no word about."""
        self.num_retries += 1
        if server.ready_count == times:
            server.ready, server.last_error = False, str(error)
        if not server.ready:
            self._recover(server)

    def _settled(self) -> bool:
        some = any(server.ready for server in self.all)
        known = all(server.ready or server.given_up or (some and server.last_error) for server in self.all)
        return self._error is not None or known

    @property
    def _free(self) -> list[EngineServer]:
        return [server for server in self.all if server.ready and server.pending < server.limit]

    async def _next(self, begun: bool) -> EngineServer:
        """The ready server with the fewest questions, one more of which is counted."""
        async with self._changed:
            self._begun += begun
            try:
                while True:
                    self._raise()
                    free = self._free
                    if free and (begun or not self._begun):
                        server = min(free, key=lambda s: s.pending)
                        server.pending += 1
                        return server
                    for server in self.all:
                        if not server.ready:
                            self._recover(server)
                    await (self._goes_on if begun else self._changed).wait()
            finally:
                self._begun -= begun
                if begun:  # there may be room for others too, whose call has been this one's
                    self._changed.notify(sum(server.limit - server.pending for server in self._free))

    def _wake(self) -> None:
        """Whoever waits looks again."""
        for waiting in (self._changed, self._goes_on, self._settles):
            waiting.notify_all()

    async def set_limit(self, server: EngineServer, limit: int) -> None:
        """It is asked so many questions at a time from now on."""
        if limit != server.limit:
            async with self._changed:
                server.limit = limit
                self._wake()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if all(server.given_up for server in self.all):
            told = "; ".join(f"{server.url}: {server.last_error}" for server in self.all)
            self._over()
            often = f", or was refused {MAX_ATTEMPTS} times" * any(server.rejections for server in self.all)
            raise EngineError(
                f"no server has answered for {self.recovery_timeout:g} seconds{often} ({told}): see what it says, start it again and go on "
                "with --resume, or give it longer, --sampler.recovery-timeout SECONDS"
            )

    def _recover(self, server: EngineServer) -> None:
        """Has a server made ready, unless that is going on or was given up."""
        if not (server.ready or server.given_up) and (server.task is None or server.task.done()):
            server.task = asyncio.get_running_loop().create_task(self._until_ready(server))

    async def _until_ready(self, server: EngineServer) -> None:
        if server.draining:
            async with self._settles:
                await self._settles.wait_for(lambda: server.pending == 0)
            server.draining = False
        deadline, wait = time.monotonic() + self.recovery_timeout, _FIRST
        while not server.ready:
            try:
                await self.prepare(server)
                server.ready, server.last_error, server.rejections = True, "", 0
                server.ready_count += 1
                self._over()
            except ServerUnavailableError as error:
                server.last_error, server.rejections = str(error) or type(error).__name__, 0
            except EngineError as error:
                server.last_error, server.rejections = str(error), server.rejections + 1
                if not server.ready_count:
                    self._error = error
            except Exception as error:  # a bug, too, has to reach whoever waits
                self._error = error
            server.given_up = not server.ready and (
                time.monotonic() + wait > deadline or server.rejections == MAX_ATTEMPTS
            )
            async with self._changed:
                self._wake()
            if server.ready or server.given_up or self._error is not None:
                return
            self._waiting()
            await asyncio.sleep(wait)
            wait = min(2 * wait, _MOST)

    def _waiting(self) -> None:
        """Says what is waited for, once it takes longer than a server that is given new weights."""
        if any(server.ready for server in self.all):
            return
        now = time.monotonic()
        self._alone = now if self._alone is None else self._alone
        if now - self._alone >= REPORT_AFTER_SECONDS:
            self._told = True
            whom = "; ".join(f"{server.url}: {server.last_error[:_SHOWN]}" for server in self.all if server.last_error)
            self.on_progress(f"waiting for a server, each for up to {self.recovery_timeout:g} s ({whom})", 0, 0)

    def _over(self) -> None:
        """One is ready, or nobody waits any more."""
        self._alone = None
        if self._told:
            self._told = False
            self.on_progress("", 0, 0)


# How many requests a server is given at a time: as many as its queue and its cache bear, by what it says of them.
#
# What waits in a server's own queue could wait here, where another server may take it, and weights need not wait for it. A cache
# that is full makes a server put answers back and compute them anew.

INITIAL_CONCURRENCY, MAX_CONCURRENCY = 16, 4096
"""Requests that a server is given at first, and at most."""
LOW_CACHE_USE, HIGH_CACHE_USE = 0.85, 0.95
"""Shares of its cache: below the first it is given more, above the second fewer."""
LOAD_POLL_SECONDS = 1.0
"""Seconds between two looks at what it says."""


@dataclass(frozen=True)
class ServerLoad:
    """What a server says of itself."""

    waiting: float
    """Requests in its queue."""
    cache_use: float
    """Share of its cache of keys and values that is in use."""


@dataclass(frozen=True)
class PrometheusGauges:
    """The names of both in the text that Prometheus reads."""

    waiting: str
    cache_use: str

    def __call__(self, text: object) -> ServerLoad | None:
        """None where one of them is missing."""
        waiting, cache = (
            (parse_gauge(text, name) for name in (self.waiting, self.cache_use)) if isinstance(text, str) else ([], [])
        )
        return ServerLoad(sum(waiting), max(cache)) if waiting and cache else None


def parse_gauge(text: str, name: str) -> list[float]:
    """Of all samples of a gauge, one per engine behind the address: `name{label="x"} 0.5` a line."""
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return [float(line.rpartition("}")[2].removeprefix(name).split()[0]) for line in found]


def adjust_concurrency(limit: int, pending: int, load: ServerLoad) -> int:
    """Requests at a time from now on. asked: those that it owes an answer."""
    if load.waiting >= 1:
        return max(1, limit - math.ceil(load.waiting))
    if load.cache_use > HIGH_CACHE_USE:
        return max(1, limit - max(1, limit // 10))
    if pending >= limit and load.cache_use < LOW_CACHE_USE:
        return min(MAX_CONCURRENCY, limit + max(1, limit // 4))
    return limit


@dataclass(frozen=True)
class LoadMonitor:
    """Asks servers for theirs. ask: what an address answers."""

    ask: Callable[[str], Awaitable[Any]]
    gauges: PrometheusGauges | None

    async def get_load(self, url: str) -> ServerLoad | None:
        """None = it says nothing of use."""
        try:
            said = await self.ask(f"{url}/metrics")
        except EngineError:
            return None
        return None if self.gauges is None else self.gauges(said)

    async def require_load(self, url: str) -> None:
        """Raises EngineError where it says nothing of use."""
        if await self.get_load(url) is None:
            raise EngineError(
                f"{url}/metrics does not say how long its queue is and how full its cache, by which --sampler.max-concurrency 0 goes: "
                "start it as `policygrad engine` says, or give it a number"
            )

    async def adjust_limits(self, servers: ServerPool) -> None:
        """Each is asked more or less at a time from now on."""
        for server in servers.all:
            if server.ready:
                with suppress(ServerUnavailableError):  # what it owes will show that
                    if (load := await self.get_load(server.url)) is not None:
                        await servers.set_limit(server, adjust_concurrency(server.limit, server.pending, load))
