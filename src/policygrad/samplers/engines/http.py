"""An HTTP client for engine servers: connections that stay open, a timeout per request, a clear line between "later" and "no"."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from policygrad.errors import EngineError, install_command

if TYPE_CHECKING:
    import httpx

_RETRY_STATUS = (408, 425, 429)  # status codes that mean "later", besides those from 500 on
_MAX_SHOWN = 400  # characters of a reply that an error message repeats


class ServerUnavailableError(Exception):
    """The server did not answer, or asked to try later: retry, or use another server. Never reaches the user."""


class ServerStartingError(ServerUnavailableError):
    """A server that was just started here does not answer yet: its time to recover has not begun."""

    def __init__(self, message: str, seconds: float, timeout: float) -> None:
        """
        Args:
            seconds: Since it was started.
            timeout: Seconds that it may take.
        """
        super().__init__(message)
        self.seconds, self.timeout = seconds, timeout


class RequestRefusedError(EngineError):
    """The server refuses a request: a status from 300 to 499 that does not mean "later"."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Connections to all servers. It ignores proxy variables of the environment, as engines run close to the learner.

    Each request has an httpx client of its own while it is open, since a client looks at all of its connections for every request.
    """

    def __init__(self, timeout: float, transport: Any = None, key: str = "") -> None:
        """
        Args:
            timeout: Seconds per request.
            transport: An httpx transport to use instead of the network.
            key: An API key, sent with each request as a bearer token and left out of every message.

        Raises:
            EngineError: httpx is not installed.
        """
        try:
            import httpx
        except ImportError as error:
            raise EngineError(f"engine servers need the package httpx: {install_command('engines')}") from error
        self._error = httpx.RequestError
        self._timeout, self._key = timeout, key
        self._make_client = partial(
            httpx.AsyncClient,
            timeout=httpx.Timeout(None, connect=min(timeout, 5.0)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trust_env=False,
            transport=transport,
            verify=httpx.create_ssl_context(trust_env=False),  # reading the certificates takes longest
        )
        self._clients, self._idle = list[httpx.AsyncClient](), list[httpx.AsyncClient]()
        """All, and those without an open request, the last one used at the end."""

    async def post(self, url: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Send a request and return the reply, parsed as JSON, or as text if it is not JSON.

        Args:
            timeout: Seconds, if different from the client's.

        Raises:
            ServerUnavailableError: No connection, no reply in time, or the server asks to try later.
            RequestRefusedError: The server refuses; the message has its reply.
        """
        return await self._request("POST", url, body, timeout)

    async def get(self, url: str, timeout: float | None = None) -> Any:
        """Send a GET request, otherwise like `post`."""
        return await self._request("GET", url, None, timeout)

    async def check_alive(self, url: str, timeout: float) -> None:
        """Return once the server has replied anything at all. Raises ServerUnavailableError like `post`."""
        with suppress(EngineError):
            await self._request("GET", url, None, timeout)

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()

    def _add_client(self) -> httpx.AsyncClient:
        self._clients.append(self._make_client())
        return self._clients[-1]

    async def _request(self, method: str, url: str, body: dict[str, Any] | None, timeout: float | None) -> Any:
        seconds = timeout or self._timeout
        client = self._idle.pop() if self._idle else self._add_client()
        try:
            async with asyncio.timeout(seconds):  # for the full reply: httpx's own timeout is per received piece
                reply = await client.request(method, url, json=body)
        except self._error as error:
            raise ServerUnavailableError(f"{type(error).__name__} {error}".strip()) from error
        except TimeoutError as error:
            raise ServerUnavailableError(f"no answer within {seconds:g} seconds") from error
        finally:
            self._idle.append(client)
        if reply.status_code >= 300:
            text = (reply.text.replace(self._key, "…") if self._key else reply.text)[:_MAX_SHOWN]
            if reply.status_code in _RETRY_STATUS or reply.status_code >= 500:
                raise ServerUnavailableError(f"{reply.status_code} {text}".strip())
            raise RequestRefusedError(f"{url} answers {reply.status_code}: {text}", reply.status_code)
        try:
            return reply.json()
        except ValueError:
            return reply.text
