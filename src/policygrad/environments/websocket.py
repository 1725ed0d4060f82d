"""WebSockets that answer a server's pings while this process computes; the one file that imports websockets.

A server asks every so many seconds whether somebody is there (uvicorn every 20, and hangs up after 20 more), and sampling here may
hold up the loop that episodes are played in for longer. So connections live in a loop and a thread of their own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

from policygrad.errors import ConfigError, install_command

T = TypeVar("T")
LARGEST = 16 << 20
"""Bytes of a message."""


class WebSocket:
    """A connection, for any loop. What is lost is a ConnectionError."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @classmethod
    async def connect(cls, address: str, seconds: float) -> WebSocket:
        """ws(s)://…; proxies of the environment are not asked: servers stand beside the learner.

        Raises:
            ConnectionError: nobody there, or nobody who speaks WebSocket; OSError, TimeoutError.
        """
        client = websockets().asyncio.client
        return cls(await _there(_opened(client, address, seconds)))

    async def send(self, message: str) -> None:
        await _there(self._inner.send(message))

    async def recv(self) -> Any:
        """The next message, text or bytes."""
        return await _there(self._inner.recv())

    async def close(self) -> None:
        await _there(self._inner.close())


async def _opened(client: Any, address: str, seconds: float) -> Any:
    return await client.connect(address, open_timeout=seconds, max_size=LARGEST, proxy=None)


async def _there(work: Coroutine[Any, Any, T]) -> T:
    """What `work` comes to in the connections' loop."""
    try:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))
    except websockets().exceptions.WebSocketException as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The connections' loop, which runs as long as the process does."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="websockets").start()
    return loop


def websockets() -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import websockets.asyncio.client
        import websockets.exceptions
    except ImportError as error:
        raise ConfigError(
            f"openenv:… needs websockets, which is not installed: {install_command('openenv')}"
        ) from error
    return websockets
