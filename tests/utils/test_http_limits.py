"""What a server of HTTP accepts: connections, headers and bodies have limits, and pages in a browser are no clients."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from policygrad.utils.http_limits import (
    HttpLimits,
    HttpRefusal,
    explain_foreign_request,
    host_names,
    is_loopback,
    limit_app,
)

uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve`")
HOSTS = host_names("127.0.0.1")


class Echo:
    """Answers with the number of bytes that it was sent, and knows when a part of a body has come."""

    def __init__(self) -> None:
        self.has_part = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        try:
            while more:
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)
                self.has_part.set()
            status, text = 200, str(size)
        except HttpRefusal as error:
            status, text = error.status, str(error)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})


@contextmanager
def serving(limits: HttpLimits, app: Any) -> Iterator[int]:
    """Serve an application in a thread; gives the port."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        limit_app(app, limits, HOSTS), lifespan="off", log_level="critical", **limits.server_options()
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def connect(port: int, data: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(data)
    return client


def head(size: int = 0, **headers: str) -> bytes:
    fields = {"Host": "localhost", "Content-Length": str(size), **headers}
    return ("POST / HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items()) + "\r\n").encode()


def read(client: socket.socket) -> tuple[int, str]:
    """Return (status, body) of an answer; (0, "") if the connection was closed without one."""
    found = b""
    while b"\r\n\r\n" not in found:
        if not (part := client.recv(2**16)):
            return 0, ""
        found += part
    lines, _, body = found.partition(b"\r\n\r\n")
    while b"0\r\n\r\n" not in body and b"}" not in body and (part := client.recv(2**16)):
        body += part
    return int(lines.split()[1]), body.decode()


def test_connections_that_send_no_request_are_ended() -> None:
    """At once, after half of the headers, byte by byte, and after an answer."""
    with serving(HttpLimits(header_seconds=2.0), Echo()) as port:
        again = connect(port, head())
        assert read(again)[0] == 200
        clients = [connect(port), connect(port, b"POST / HT"), connect(port, head()[:-2]), again]
        again.sendall(b"GET / HT")
        assert [read(client)[0] for client in clients] == [0, 408, 408, 408]
        for client in clients:
            client.close()


def test_headers_are_bounded() -> None:
    """In one line, in many, in the address, and after the body."""
    with serving(HttpLimits(header_bytes=4096, body_bytes=10_000), Echo()) as port:
        for sent in (
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10_000,
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 2000,
            b"GET /" + b"x" * 10_000,
        ):
            with connect(port, sent) as client:
                assert read(client) == (431, '{"error": "the headers are larger than 4096 bytes"}')
        chunked = head(**{"Transfer-Encoding": "chunked"}).replace(b"Content-Length: 0\r\n", b"")
        with connect(port, chunked + b"1\r\nx\r\n0\r\n" + b"A: b\r\n" * 10_000) as client:
            assert client.recv(1) == b""


def test_a_new_client_takes_the_place_of_an_idle_connection() -> None:
    with serving(HttpLimits(connections=3), Echo()) as port:
        idle = [connect(port) for _ in range(8)]
        for _ in range(4):
            with connect(port, head()) as client:
                assert read(client)[0] == 200
        for client in idle:
            client.close()


def test_connections_that_are_all_busy_are_kept() -> None:
    app = Echo()
    with serving(HttpLimits(connections=1), app) as port, connect(port, head(4)) as first:
        first.sendall(b"ab")
        app.has_part.wait()
        with connect(port) as second:
            assert read(second)[0] == 503
        first.sendall(b"cd")
        assert "4" in read(first)[1]


def test_a_body_comes_in_time() -> None:
    with serving(HttpLimits(body_seconds=0.1), Echo()) as port, connect(port, head(1000) + b"x" * 900) as client:
        status, text = read(client)
        assert (status, "no part of the request came" in text) == (408, True)


def test_bodies_are_bounded_alone_and_together() -> None:
    app = Echo()
    with serving(HttpLimits(body_bytes=1000, total_body_bytes=1500), app) as port:
        with connect(port, head(1001) + b"x" * 1001) as client:
            status, text = read(client)
            assert (status, "larger than 1,000 bytes" in text) == (413, True)
        app.has_part.clear()
        with connect(port, head(1000) + b"x" * 900) as slow:
            app.has_part.wait()
            with connect(port, head(1000) + b"x" * 1000) as client:
                status, text = read(client)
                assert (status, "try again" in text) == (503, True)
            slow.sendall(b"x" * 100)
            assert read(slow)[0] == 200
        with connect(port, head(1000) + b"x" * 1000) as client:  # what was refused is held no more
            assert read(client)[0] == 200


def test_pages_in_a_browser_are_no_clients() -> None:
    def explain(hosts: Any = HOSTS, **headers: str) -> str:
        return explain_foreign_request([(k.encode(), v.encode()) for k, v in headers.items()], hosts)

    for host in ("localhost", "127.0.0.1:8010", "LOCALHOST:8010", "[::1]:80"):
        assert not explain(host=host)
        assert not explain(host=host, origin=f"http://{host}")
    for host in ("evil.example", "evil.example:8010", "", "127.0.0.1.evil.example", "localhost:x"):
        assert "not a name of this server" in explain(host=host)
        assert "not a name of this server" in explain(host=host, origin=f"http://{host}")
    for origin in ("http://evil.example", "null", "http://localhost:9999", "file://"):
        assert "pages of" in explain(host="localhost:8010", origin=origin)
        assert "pages of" in explain(None, host="trainer:8010", origin=origin)
    assert not explain(None, host="trainer:8010")
    assert not explain(host_names("10.0.0.5"), host="10.0.0.5:80")
    assert [is_loopback(h) for h in ("localhost", "127.0.0.9", "::1", "0.0.0.0", "trainer")] == [True] * 3 + [False] * 2
    with serving(HttpLimits(), Echo()) as port:
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            with connect(port, head(**headers)) as client:
                assert read(client)[0] == 403
