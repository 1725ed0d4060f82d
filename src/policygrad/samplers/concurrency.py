"""How many requests a server is given at a time: as many as its queue and its cache bear, by what it says of them.

What waits in a server's own queue could wait here, where another server may take it, and weights need not wait for it. A cache
that is full makes a server put answers back and compute them anew.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from policygrad.errors import EngineError
from policygrad.samplers.http import AwayError
from policygrad.samplers.servers import Servers

FIRST, MOST = 16, 4096
"""Requests that a server is given at first, and at most."""
ROOM, FULL = 0.85, 0.95
"""Shares of its cache: below the first it is given more, above the second fewer."""
LOOKS = 1.0
"""Seconds between two looks at what it says."""


@dataclass(frozen=True)
class Load:
    """What a server says of itself."""

    waiting: float
    """Requests in its queue."""
    cache: float
    """Share of its cache of keys and values that is in use."""


@dataclass(frozen=True)
class Gauges:
    """The names of both in the text that Prometheus reads."""

    waiting: str
    cache: str

    def __call__(self, text: object) -> Load | None:
        """None where one of them is missing."""
        waiting, cache = (
            (values(text, name) for name in (self.waiting, self.cache)) if isinstance(text, str) else ([], [])
        )
        return Load(sum(waiting), max(cache)) if waiting and cache else None


def values(text: str, name: str) -> list[float]:
    """Of all samples of a gauge, one per engine behind the address: `name{label="x"} 0.5` a line."""
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return [float(line.rpartition("}")[2].removeprefix(name).split()[0]) for line in found]


def resized(limit: int, asked: int, load: Load) -> int:
    """Requests at a time from now on. asked: those that it owes an answer."""
    if load.waiting >= 1:
        return max(1, limit - math.ceil(load.waiting))
    if load.cache > FULL:
        return max(1, limit - max(1, limit // 10))
    if asked >= limit and load.cache < ROOM:
        return min(MOST, limit + max(1, limit // 4))
    return limit


@dataclass(frozen=True)
class Loads:
    """Asks servers for theirs. ask: what an address answers."""

    ask: Callable[[str], Awaitable[Any]]
    gauges: Gauges | None

    async def of(self, url: str) -> Load | None:
        """None = it says nothing of use."""
        try:
            said = await self.ask(f"{url}/metrics")
        except EngineError:
            return None
        return None if self.gauges is None else self.gauges(said)

    async def check(self, url: str) -> None:
        """Raises EngineError where it says nothing of use."""
        if await self.of(url) is None:
            raise EngineError(
                f"{url}/metrics does not say how long its queue is and how full its cache, by which --sampler.parallel 0 goes: "
                "start it as `policygrad engine` says, or give it a number"
            )

    async def resize(self, servers: Servers) -> None:
        """Each is asked more or less at a time from now on."""
        for server in servers.all:
            if server.ready:
                with suppress(AwayError):  # what it owes will show that
                    if (load := await self.of(server.url)) is not None:
                        await servers.resize(server, resized(server.limit, server.load, load))
