"""What an HTTP server of this library accepts: how long, how large, how many at once, and from which pages.

uvicorn limits neither the time nor the size of headers (httptools), nor the bytes of bodies, and keeps connections that send
nothing. A server takes both parts: a protocol for what happens before a request is one, and a wrapper of the application.

    limits = HttpLimits.for_this_machine()
    uvicorn.Config(limit_app(app, limits, hosts), **limits.server_options())
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import resource
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]

SPARE_DESCRIPTORS = 256
"""Of files, sockets and pipes that are not connections."""
HOLD = "policygrad.hold"
"""In the scope of a request: a function that counts further bytes, as those of an unpacked body. It raises HttpRefusal."""
LISTEN_BACKLOG = 2048
"""Connections that wait in the kernel: those above it try again a second later."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class HttpRefusal(Exception):
    """An answer with a status of HTTP and a sentence. A handler that awaits a body lets it pass, or answers with it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ListeningSocket(socket.socket):
    """A socket on which many connections may wait, however few of them asyncio accepts at once: it takes one number for both."""

    def listen(self, backlog: int = LISTEN_BACKLOG, /) -> None:
        super().listen(max(backlog, LISTEN_BACKLOG))


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one server."""

    header_seconds: float = 15.0
    """From the start of a connection, or of a request on it, to the end of the request's headers."""
    body_seconds: float = 30.0
    """Between two parts of a body."""
    header_bytes: int = 64 * 2**10
    body_bytes: int = 64 * 2**20
    """Of one request."""
    total_body_bytes: int = 2**30
    """Of all requests that are being answered."""
    connections: int = 1024
    backlog: int = 256
    """Connections that are accepted at once (`ListeningSocket`)."""
    stop_seconds: int = 5
    """For requests that are being answered when the server is told to end."""

    @classmethod
    def for_this_machine(cls, **options: Any) -> HttpLimits:
        """Return limits with as many connections as there may be descriptors, whose soft limit is raised to the hard one."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = 16384 if hard == resource.RLIM_INFINITY else min(hard, 16384)
        if soft != resource.RLIM_INFINITY and soft < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
        free = 16384 if soft == resource.RLIM_INFINITY else min(soft, 16384)
        free -= min(SPARE_DESCRIPTORS, free // 2)
        # asyncio accepts as many at once as may wait, and again while those of three turns before are not looked at, or not closed
        backlog = min(1024, max(1, free // 16))
        return cls(**{"connections": max(1, free - 5 * backlog), "backlog": backlog, **options})

    def server_options(self) -> dict[str, Any]:
        """Return the arguments of `uvicorn.Config`."""
        return {
            "http": make_protocol(self),
            "ws": "none",
            "backlog": self.backlog,
            "timeout_graceful_shutdown": self.stop_seconds,
            "h11_max_incomplete_event_size": self.header_bytes,
        }


def make_protocol(limits: HttpLimits) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with limits on connections and headers."""
    base: Any
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as base
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as base
    return type("LimitedProtocol", (LimitedConnection, base), {"limits": limits})


class LimitedConnection(asyncio.Protocol):
    """Ends connections that are too many, send no request in time, or send more than a request may have: in front of one of
    uvicorn's protocols, whose attributes it reads."""

    limits: ClassVar[HttpLimits]
    transport: Any
    connections: Any
    cycle: Any
    loop: Any

    started: asyncio.TimerHandle | None = None
    """Ends the connection if the headers of a request are not there in time."""
    num_bytes = 0
    """Received since the last answer."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            open_connections = [x for x in self.connections if x is not self and not x.transport.is_closing()]
            idle = [x for x in open_connections if not x.is_busy]
            if idle and len(open_connections) >= self.limits.connections:
                min(idle, key=lambda x: x.cycle is not None).transport.close()  # best one that never asked for anything
            elif len(open_connections) >= self.limits.connections:
                self.refuse(503, f"{self.limits.connections} connections are open: try again")
                return
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self.num_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.is_busy:
            self._stop_timer()
            if self.num_bytes > self.limits.body_bytes + 2 * self.limits.header_bytes:
                # whoever reads the body has refused it by now; this is for what follows, and for trailers
                self.transport.close()
        elif self.num_bytes > self.limits.header_bytes and not self.is_drained:
            self.refuse(431, f"the headers are larger than {self.limits.header_bytes} bytes")
        elif self.started is None:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.num_bytes = 0
        super().on_response_complete()  # type: ignore[misc]  # of uvicorn's

    @property
    def is_busy(self) -> bool:
        """True while a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_drained(self) -> bool:
        """True while the rest of a request follows that was answered already, such as a body that is too large."""
        return self.cycle is not None and self.cycle.more_body

    def refuse(self, status: int, text: str) -> None:
        """Answer on the bare connection, and close it."""
        body = json.dumps({"error": text}).encode()
        head = f"HTTP/1.1 {status} Refused\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def _expect_request(self) -> None:
        self.started = self.loop.call_later(self.limits.header_seconds, self._expire)

    def _expire(self) -> None:
        self.started = None
        if self.is_busy or self.transport.is_closing():
            return
        if self.num_bytes and not self.is_drained:
            self.refuse(408, f"no request within {self.limits.header_seconds:g} seconds")
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self.started is not None:
            self.started.cancel()
            self.started = None


def limit_app(app: Any, limits: HttpLimits, hosts: Collection[str] | None) -> AsgiApp:
    """Return an ASGI application that answers allowed requests with another one, whose bodies come in time and are bounded.

    Args:
        hosts: Names by which clients may call the server, in lower case and without a port; None = any, where clients need keys.
    """
    total = 0

    async def limited(scope: Message, receive: Receive, send: Send) -> None:
        nonlocal total
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        if reason := explain_foreign_request(scope["headers"], hosts):
            await _answer(send, 403, reason)
            return
        size, has_started, is_complete = 0, False, False

        async def receive_limited() -> Message:
            nonlocal is_complete
            if is_complete:  # what follows is that the client has gone
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), limits.body_seconds)
            except TimeoutError:
                raise HttpRefusal(408, f"no part of the request came for {limits.body_seconds:g} seconds") from None
            hold(len(message.get("body", b"")))
            is_complete = not message.get("more_body", False)
            return message

        def hold(count: int) -> None:
            nonlocal total, size
            if size + count > limits.body_bytes:
                raise HttpRefusal(413, f"the request is larger than {limits.body_bytes:,} bytes: send less at a time")
            if total + count > limits.total_body_bytes:
                raise HttpRefusal(
                    503,
                    f"requests of {total:,} bytes are being read, and {limits.total_body_bytes:,} are the most: try again",
                )
            total, size = total + count, size + count

        async def send_noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await app({**scope, HOLD: hold}, receive_limited, send_noted)
        except HttpRefusal as error:
            if not has_started:
                await _answer(send, error.status, str(error))
        finally:
            total -= size

    return limited


async def _answer(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def explain_foreign_request(headers: Collection[tuple[bytes, bytes]], hosts: Collection[str] | None) -> str:
    """Return why a request is not from a client of this server, but from a page in a browser; "" if it may be from one.

    A page of another site may send requests here, with its address as Origin. One whose name leads here after it was loaded (DNS
    rebinding) may even read the answers, but with its name as Host.
    """
    values = {name: value.decode("latin-1") for name, value in headers}
    host = values.get(b"host", "").lower()
    if hosts is not None and _without_port(host) not in hosts:
        return (
            f"the host {host!r} is not a name of this server, which answers to {', '.join(sorted(hosts))} where no keys are "
            "needed: use one of these, or start it with keys"
        )
    origin = values.get(b"origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host:
        return f"requests of pages of {origin} are not answered"
    return ""


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_names(host: str) -> frozenset[str]:
    """Return the names by which clients of this machine call a server that listens at an address of it."""
    name = f"[{host}]" if ":" in host else host
    return frozenset({*LOOPBACK_NAMES, name.lower()})
