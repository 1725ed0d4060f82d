"""The proxy's connections: how many are open, and how long one may be open without a request."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from policygrad.errors import import_optional

MAX_CONNECTIONS = 512
"""Connections at once, or half of the files that this process may open if those are fewer."""
HEAD_SECONDS = 30.0
"""Seconds in which a connection's first request, or a next one that has begun, must have all its headers."""
MAX_HEAD = 64 * 2**10
"""Bytes of a request's headers."""
ACCEPT_AT_ONCE = 128


def make_server(app: Any, *, max_connections: int | None = None, head_seconds: float = HEAD_SECONDS) -> Any:
    """Return a uvicorn server.

    A connection beyond the limit takes the place of the oldest one without a request, and is closed if there is none.
    """
    uvicorn = import_optional("uvicorn", "a proxy for programs", "proxy")
    from uvicorn.protocols.http.h11_impl import H11Protocol

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = max_connections or max(8, min(MAX_CONNECTIONS, files // 2 if files > 0 else MAX_CONNECTIONS))
    opened: dict[Any, None] = {}  # the oldest first

    class Connection(H11Protocol):  # not httptools', which reads headers without end
        watch: asyncio.TimerHandle | None = None

        @property
        def is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            opened[self] = None
            self._watch()
            if len(opened) > limit:
                next((other for other in opened if other.is_idle and other is not self), self).abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            opened.pop(self, None)
            if self.watch is not None:
                self.watch.cancel()
            super().connection_lost(exc)

        def abort(self) -> None:
            opened.pop(self, None)
            self.transport.abort()

        def _watch(self) -> None:
            """Close the connection in a while, unless a request arrives."""
            if self.watch is not None and not self.is_idle:
                self.watch.cancel()
                self.watch = None
            elif self.watch is None and self.is_idle:
                self.watch = self.loop.call_later(head_seconds, self.abort)

    config = uvicorn.Config(
        app,
        http=Connection,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        backlog=ACCEPT_AT_ONCE,
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)
