"""Pages behind a key: a small HTTP server for one person, or for those who are given its address."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from policygrad.errors import ConfigError

MAX_BODY = 4 * 2**20  # bytes of a request
KEY_HINT = "the token is missing or wrong: open the printed address"
NO_PAGE = "not found: open the printed address"


@dataclass(frozen=True)
class Response:
    """What a request is answered with."""

    text: str
    kind: str = "text/plain"
    status: HTTPStatus = HTTPStatus.OK


class PageServer(ThreadingHTTPServer):
    """Serves `/?token=…`, and whatever else `routes` name; requests without the token are refused."""

    daemon_threads = True

    def __init__(self, host: str, port: int, routes: dict[tuple[str, str], Callable[[bytes], Response]]) -> None:
        """
        Args:
            routes: By method and path, GET / for example, what answers a request, given its body.
        """
        self.token, self.routes = secrets.token_urlsafe(24), routes
        super().__init__((host, port), _Handler)

    @classmethod
    def create(cls, host: str, port: int, *args: Any) -> Self:
        """Create a server that listens. Raises ConfigError if the address cannot be used."""
        try:
            return cls(host, port, *args)
        except OSError as error:
            where = f"{host}:{port}"
            raise ConfigError(
                f"cannot listen at {where}: {error.strerror}; choose another --port, or omit it"
            ) from error
        except (ValueError, TypeError) as error:  # a NUL, or characters that are invalid in host names
            raise ConfigError(
                f"--host {host!r} is not a host name or address ({error}): omit it for this machine only"
            ) from error

    @property
    def url(self) -> str:
        """The address to open."""
        host, port = self.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}/?token={self.token}"

    def respond(self, method: str, target: str, body: bytes) -> Response:
        """Answer a request."""
        url = urlsplit(target)
        given = parse_qs(url.query).get("token", [""])[0]
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            return Response(KEY_HINT, status=HTTPStatus.FORBIDDEN)
        answer = self.routes.get((method, url.path))
        return Response(NO_PAGE, status=HTTPStatus.NOT_FOUND) if answer is None else answer(body)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "policygrad", ""
    timeout = 60  # seconds that a client may be silent

    def do_GET(self) -> None:
        self._send(self.server.respond("GET", self.path, b""))

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            text = f"a request has a Content-Length of at most {MAX_BODY} bytes"
            self._send(Response(text, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE))
            return
        self._send(self.server.respond("POST", self.path, self.rfile.read(int(length))))

    def _send(self, response: Response) -> None:
        body = response.text.encode(errors="backslashreplace")
        self.send_response(response.status)
        headers = {"Content-Type": f"{response.kind}; charset=utf-8", "Content-Length": str(len(body))}
        headers |= {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses have the token."""
