"""Several servers as one: each request goes to the least busy server. When a server becomes unavailable, its requests move to the
others, and it is prepared again in the background.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from policygrad.errors import EngineError
from policygrad.samplers.engines.http import ServerStartingError, ServerUnavailableError
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.utils.spans import span

T = TypeVar("T")
MAX_ATTEMPTS = 10
"""Attempts per request: if a server came back each time, the request itself is what fails. Also the consecutive rejections after
which a server that was ready before is given up."""
MAX_INVALID_REPLIES = 3  # invalid replies, or refusals, per request
WAIT_REPORT_SECONDS = 4.0  # a wait for servers is reported from then on
_FIRST_RETRY, _LAST_RETRY = 0.02, 2.0
"""Seconds between attempts to prepare a server: doubled each time, from the first to the last."""
_MAX_SHOWN = 100  # characters of each server's error in a progress report


@dataclass(eq=False)
class EngineServer:
    """One server and its state."""

    url: str
    limit: int = 0  # maximum concurrent requests
    pending: int = 0  # requests sent and not answered
    ready: bool = False  # True if it is reachable and serves the current weights
    ready_count: int = 0
    """How often it became ready. Later rejections may be a passing fault; one at first contact is a configuration error."""
    rejections: int = 0  # consecutive times that it was reached and failed the checks
    last_error: str = ""  # reason of the last failure; empty if it has not failed since it was ready
    given_up: bool = False  # True if it was unavailable for too long, or rejected too often
    draining: bool = False
    """True if open requests must finish before it is prepared, because it is to load new weights."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)  # prepares it


class ServerPool:
    """Distributes requests over servers."""

    def __init__(
        self,
        urls: Sequence[str],
        prepare: Callable[[EngineServer], Awaitable[None]],
        max_concurrency: int,
        recovery_timeout: float,
        on_progress: ProgressCallback = ignore_progress,
        timeout_option: str = "--sampler.recovery-timeout",
    ) -> None:
        """
        Args:
            prepare: Makes a server ready. Raises ServerUnavailableError to be called again later, and EngineError if the server
                fails the checks.
            max_concurrency: Initial limit of concurrent requests per server.
            recovery_timeout: Seconds after which an unavailable server is given up.
            on_progress: Called while no server is available.
            timeout_option: The option that sets `recovery_timeout`, for messages.
        """
        self.timeout_option = timeout_option
        self.all = [EngineServer(url.rstrip("/"), max_concurrency) for url in urls]
        self.prepare, self.recovery_timeout, self.on_progress = prepare, recovery_timeout, on_progress
        self.num_retries = 0  # requests that were sent again, to another server or to the same one later
        lock = asyncio.Lock()
        self._slot_free, self._continuation_slot_free = asyncio.Condition(lock), asyncio.Condition(lock)
        """Requests wait on these for a free slot. Continuations have a condition of their own, because they go first."""
        self._state_changed = asyncio.Condition(lock)
        """Waits for the state of servers, separate from the conditions above so that it never takes a request's turn."""
        self._waiting_continuations = 0
        self._error: Exception | None = None
        self._unavailable_since: float | None = None  # monotonic time since which no server is ready; None if one is
        self._reported = False

    async def call(self, send: Callable[[EngineServer], Awaitable[T]], is_continuation: bool = False) -> T:
        """Send a request and return the reply. A server whose reply is invalid is prepared again, like one that is unavailable.

        Args:
            is_continuation: The request continues a completion, and goes before those that start one, so that a long completion
                does not wait at every chunk.

        Raises:
            EngineError: All servers are given up, or several attempts at the request failed.
        """
        num_attempts = num_invalid = 0
        while True:
            server = await self._acquire(is_continuation)
            ready_count = server.ready_count
            try:
                with span("request", **{"server.address": server.url}):
                    return await send(server)
            except (ServerUnavailableError, EngineError) as error:
                is_invalid = isinstance(error, EngineError)
                num_attempts, num_invalid = num_attempts + 1, num_invalid + is_invalid
                if num_invalid == MAX_INVALID_REPLIES:
                    raise
                if num_attempts >= MAX_ATTEMPTS and not is_invalid:
                    raise EngineError(
                        f"a request failed {MAX_ATTEMPTS} times, the last time at {server.url}: {error}"
                    ) from error
                self.num_retries += 1
                if server.ready_count == ready_count:  # otherwise it became ready again, and the error is an old one
                    server.ready, server.last_error = False, str(error)
                if not server.ready:
                    self._recover(server)
            finally:
                async with self._slot_free:
                    server.pending -= 1
                    self._state_changed.notify_all()
                    if server.ready:  # one slot is free, for one of perhaps thousands of requests
                        (self._continuation_slot_free if self._waiting_continuations else self._slot_free).notify()
                    else:
                        self._notify_all()  # for the task that waits for the server to drain

    async def ready(self) -> None:
        """Prepare every server anew. Return once each is ready, or unavailable while another one is ready."""
        for server in self.all:  # all of them before the first await: nothing else may be sent to them
            server.ready, server.given_up, server.last_error = False, False, ""
            server.rejections, server.draining = 0, True
        await self.close()  # tasks that prepare servers for the previous weights
        self._error = None
        for server in self.all:
            self._recover(server)

        def is_settled() -> bool:
            any_ready = any(server.ready for server in self.all)
            settled = all(s.ready or s.given_up or (any_ready and s.last_error) for s in self.all)
            return self._error is not None or settled

        async with self._state_changed:
            await self._state_changed.wait_for(is_settled)
            self._raise_if_failed()

    async def close(self) -> None:
        """Cancel the tasks that prepare servers."""
        tasks = [server.task for server in self.all if server.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._end_wait()

    async def adjust_limits(self, read_load: Callable[[str], Awaitable[ServerLoad]]) -> None:
        """Adjust the maximum concurrent requests of every ready server to its load."""
        for server in self.all:
            if server.ready:
                with suppress(ServerUnavailableError, EngineError):  # its open requests will notice
                    load = await read_load(server.url)
                    async with self._slot_free:
                        server.limit = adjust_concurrency(server.limit, server.pending, load)
                        self._notify_all()

    @property
    def _free(self) -> list[EngineServer]:
        return [server for server in self.all if server.ready and server.pending < server.limit]

    async def _acquire(self, is_continuation: bool) -> EngineServer:
        """Wait for the ready server with the fewest open requests, and take a slot on it."""
        async with self._slot_free:
            self._waiting_continuations += is_continuation
            try:
                while True:
                    self._raise_if_failed()
                    free = self._free
                    if free and (is_continuation or not self._waiting_continuations):
                        server = min(free, key=lambda s: s.pending)
                        server.pending += 1
                        return server
                    for server in self.all:
                        if not server.ready:
                            self._recover(server)
                    await (self._continuation_slot_free if is_continuation else self._slot_free).wait()
            finally:
                self._waiting_continuations -= is_continuation
                if is_continuation:  # more slots may be free, whose notifications all went to continuations
                    self._slot_free.notify(sum(server.limit - server.pending for server in self._free))

    def _notify_all(self) -> None:
        for condition in (self._slot_free, self._continuation_slot_free, self._state_changed):
            condition.notify_all()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error
        if all(server.given_up for server in self.all):
            reasons = "; ".join(f"{server.url}: {server.last_error}" for server in self.all)
            self._end_wait()
            rejected = f", or was rejected {MAX_ATTEMPTS} times" * any(server.rejections for server in self.all)
            raise EngineError(
                f"no server has answered for {self.recovery_timeout:g} seconds{rejected} ({reasons}). See its log, start it again "
                f"and continue with --resume, or allow more time: {self.timeout_option} SECONDS"
            )

    def _recover(self, server: EngineServer) -> None:
        """Start to prepare a server, unless that is under way or the server was given up."""
        if not (server.ready or server.given_up) and (server.task is None or server.task.done()):
            server.task = asyncio.get_running_loop().create_task(self._prepare_until_ready(server))

    async def _prepare_until_ready(self, server: EngineServer) -> None:
        if server.draining:
            async with self._state_changed:
                await self._state_changed.wait_for(lambda: server.pending == 0)
            server.draining = False
        deadline, delay = time.monotonic() + self.recovery_timeout, _FIRST_RETRY
        while not server.ready:
            starting: ServerStartingError | None = None
            try:
                await self.prepare(server)
                server.ready, server.last_error, server.rejections = True, "", 0
                server.ready_count += 1
                self._end_wait()
            except ServerUnavailableError as error:
                server.last_error, server.rejections = str(error) or type(error).__name__, 0
                if isinstance(error, ServerStartingError):
                    starting, deadline = error, time.monotonic() + self.recovery_timeout
            except EngineError as error:
                server.last_error, server.rejections = str(error), server.rejections + 1
                if not server.ready_count:
                    self._error = error
            except Exception as error:  # a bug must reach the caller too
                self._error = error
            timed_out = starting is None and time.monotonic() + delay > deadline
            server.given_up = not server.ready and (timed_out or server.rejections == MAX_ATTEMPTS)
            async with self._slot_free:
                self._notify_all()
            if server.ready or server.given_up or self._error is not None:
                return
            if not any(other.ready for other in self.all):
                # report the wait once it takes longer than loading new weights
                now = time.monotonic()
                self._unavailable_since = now if self._unavailable_since is None else self._unavailable_since
                if starting is not None:
                    self._reported = True
                    self.on_progress(str(starting), int(starting.seconds), int(starting.timeout))
                elif now - self._unavailable_since >= WAIT_REPORT_SECONDS:
                    self._reported = True
                    reasons = "; ".join(f"{s.url}: {s.last_error[:_MAX_SHOWN]}" for s in self.all if s.last_error)
                    self.on_progress(
                        f"waiting for a server, each for up to {self.recovery_timeout:g} s ({reasons})", 0, 0
                    )
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY)

    def _end_wait(self) -> None:
        self._unavailable_since = None
        if self._reported:
            self._reported = False
            self.on_progress("", 0, 0)


# Adaptive concurrency: the limit of a server follows its own queue length and cache use.
#
# A request that waits in a server's queue could wait here instead, where another server may take it and a weight update need not
# wait for it. A server whose cache is full evicts completions and computes them again.

INITIAL_CONCURRENCY, MAX_CONCURRENCY = 16, 4096  # first and largest limit of concurrent requests
LOW_CACHE_USE, HIGH_CACHE_USE = 0.85, 0.95  # the limit rises below the first and falls above the second
LOAD_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class ServerLoad:
    """What a server reports about its load."""

    waiting: float  # requests in its queue
    cache_use: float  # used fraction of its key-value cache


@dataclass(frozen=True)
class PrometheusGauges:
    """Names of the load metrics in Prometheus' text format."""

    waiting: str
    cache_use: str

    def __call__(self, text: object) -> ServerLoad | None:
        """Return the load, or None if a metric is missing."""
        if not isinstance(text, str):
            return None
        waiting, cache_use = parse_gauge(text, self.waiting), parse_gauge(text, self.cache_use)
        return ServerLoad(sum(waiting), max(cache_use)) if waiting and cache_use else None


def parse_gauge(text: str, name: str) -> list[float]:
    """Return all samples of a gauge, one per engine behind the address: lines such as `name{label="x"} 0.5`."""
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return [float(line.rpartition("}")[2].removeprefix(name).split()[0]) for line in samples]


def adjust_concurrency(limit: int, pending: int, load: ServerLoad) -> int:
    """Return the new limit of concurrent requests of a server with `pending` open requests."""
    if load.waiting >= 1:
        return max(1, limit - math.ceil(load.waiting))
    if load.cache_use > HIGH_CACHE_USE:
        return max(1, limit - max(1, limit // 10))
    if pending >= limit and load.cache_use < LOW_CACHE_USE:
        return min(MAX_CONCURRENCY, limit + max(1, limit // 4))
    return limit


@dataclass(frozen=True)
class LoadMonitor:
    """Reads the load of servers."""

    get: Callable[[str], Awaitable[Any]]  # returns the reply of a URL
    gauges: PrometheusGauges | None

    async def read(self, url: str) -> ServerLoad:
        """Return a server's load. Raises EngineError if it does not report it."""
        with suppress(EngineError):
            text = await self.get(f"{url}/metrics")
            if self.gauges is not None and (load := self.gauges(text)) is not None:
                return load
        raise EngineError(
            f"{url}/metrics does not report queue length and cache use, which --sampler.max-concurrency 0 needs. Start the "
            "server as `policygrad engine` does, or give --sampler.max-concurrency a number"
        )
