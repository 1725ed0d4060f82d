"""Questions to servers over HTTP: one pool of connections, one budget of seconds per answer, and what counts as being away."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from policygrad.errors import EngineError, install_command

_AWAY = (408, 425, 429)
"""Answers that mean later, beside those from 500 on."""
_SHOWN = 400
"""Letters of what a server says that a message repeats."""


class ServerUnavailableError(Exception):
    """The server did not answer, or not now: ask again, or another one. Never reaches a user."""


class HttpClient:
    """A pool of connections to all servers. Proxies of the environment are not asked: engines stand beside the learner."""

    def __init__(self, timeout: float, transport: Any = None) -> None:
        """timeout: seconds for an answer. transport: httpx's, another than the network.

        Raises:
            EngineError: the package httpx is missing.
        """
        try:
            import httpx
        except ImportError as error:
            raise EngineError(f"servers are asked through httpx: {install_command('engines')}") from error
        self._error = httpx.RequestError
        self._timeout = timeout
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=min(timeout, 5.0)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
            transport=transport,
        )

    async def post(self, url: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """What the server answers, read as JSON; text where it is none. timeout: seconds, another than usual.

        Raises:
            ServerUnavailableError: no connection, no answer in time, or the server says later.
            EngineError: the server refuses, with what it says.
        """
        return await self._ask("POST", url, body, timeout)

    async def get(self, url: str, timeout: float | None = None) -> Any:
        """As `post`."""
        return await self._ask("GET", url, None, timeout)

    async def check_alive(self, url: str, timeout: float) -> None:
        """Returns when the server has answered, whatever it has.

        Raises:
            ServerUnavailableError: as `post`.
        """
        with suppress(EngineError):
            await self.get(url, timeout)

    async def _ask(self, method: str, url: str, body: dict[str, Any] | None, timeout: float | None) -> Any:
        seconds = timeout or self._timeout
        try:
            async with asyncio.timeout(seconds):  # for all of it: httpx's own is for each piece that comes
                answer = await self._client.request(method, url, json=body)
        except self._error as error:
            raise ServerUnavailableError(f"{type(error).__name__} {error}".strip()) from error
        except TimeoutError as error:
            raise ServerUnavailableError(f"no answer within {seconds:g} seconds") from error
        if answer.status_code in _AWAY or answer.status_code >= 500:
            raise ServerUnavailableError(f"{answer.status_code} {answer.text[:_SHOWN]}".strip())
        if answer.status_code >= 300:
            raise EngineError(f"{url} answers {answer.status_code}: {answer.text[:_SHOWN]}")
        try:
            return answer.json()
        except ValueError:
            return answer.text

    async def close(self) -> None:
        """Ends all connections."""
        await self._client.aclose()
