"""Serve the page of running runs, protected by a token; by default on this machine only."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from policygrad.errors import ConfigError, RunError
from policygrad.report.data import CONFIG_FILES, read_run
from policygrad.report.page import render_report
from policygrad.trackers.jsonl import COMPLETIONS, METRICS, NOTES

DEFAULT_HOST = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """Serves the page at `/?token=…` and its hash at `/stamp?token=…`; rejects all other requests.

    The page is rendered again when a file of one of the folders changes.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], host: str, port: int) -> None:
        self.folders, self.token = folders, secrets.token_urlsafe(24)
        self._stamp, self._text, self._lock = "", "", Lock()
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The address to open."""
        host, port = self.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}/?token={self.token}"

    def stamp(self) -> str:
        """Return a hash that changes when a file of a run changes."""
        names = (*CONFIG_FILES.values(), METRICS, COMPLETIONS, NOTES, "result.json")
        return sha256(repr([_state(folder / name) for folder in self.folders for name in names]).encode()).hexdigest()

    def text(self) -> str:
        """Return the current page. Raises RunError if a folder no longer has a run."""
        with self._lock:  # render once for several browsers
            now = self.stamp()
            if now != self._stamp:
                self._text = render_report([read_run(folder, empty=True) for folder in self.folders], live=True)
                self._stamp = now
            return self._text


def _state(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version, sys_version = "policygrad", ""
    kinds: ClassVar[dict[str, str]] = {"/": "text/html", "/stamp": "text/plain"}

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        given = parse_qs(url.query).get("token", [""])[0]
        if not secrets.compare_digest(given.encode(), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "the token is missing or wrong: open the printed address")
        elif url.path not in self.kinds:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "not found: open the printed address")
        else:
            try:
                text = self.server.text() if url.path == "/" else self.server.stamp()
                self._send(HTTPStatus.OK, self.kinds[url.path], text)
            except RunError as error:
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        headers |= {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: there is a request every two seconds, and each has the token."""


def create_server(folders: Sequence[Path], host: str = DEFAULT_HOST, port: int = 0) -> ReportServer:
    """Create a server that listens and responds once `serve_forever` is called. port: 0 = a free one.

    Raises:
        RunError: A folder has no run.
        ConfigError: The address cannot be used.
    """
    for folder in folders:
        read_run(folder, empty=True)
    try:
        return ReportServer(folders, host, port)
    except OSError as error:
        where = f"{host}:{port}"
        raise ConfigError(f"cannot listen at {where}: {error.strerror}; choose another --port, or omit it") from error
    except (ValueError, TypeError) as error:  # a NUL, or characters that are invalid in host names
        raise ConfigError(
            f"--host {host!r} is not a host name or address ({error}): omit it for {DEFAULT_HOST}, this machine only"
        ) from error
