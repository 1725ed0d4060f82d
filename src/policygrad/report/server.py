"""The page of runs as they go, for the browser of whoever knows the token; on this machine alone unless it is told otherwise."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from policygrad.trackers.jsonl import COMPLETIONS, METRICS

DEFAULT_HOST = "127.0.0.1"


@dataclass
class PageCache:
    """The page of these folders, made anew when a file of theirs has changed, and not before."""

    folders: tuple[Path, ...]
    _stamp: str = field(default="", init=False)
    _text: str = field(default="", init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def stamp(self) -> str:
        """Other than before when a file of a run has changed."""
        names = (*CONFIG_FILES.values(), METRICS, COMPLETIONS, "result.json")
        return sha256(repr([_state(folder / name) for folder in self.folders for name in names]).encode()).hexdigest()

    def text(self) -> str:
        """The page as of now. Raises RunError where a folder has become none of a run."""
        with self._lock:  # two browsers, one reading
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


class ReportServer(ThreadingHTTPServer):
    """Answers `/?token=…` with the page and `/stamp?token=…` with what changes when it does; anything else is refused."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], host: str, port: int) -> None:
        self.pages, self.token = PageCache(tuple(folders)), secrets.token_urlsafe(24)
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """What to open."""
        host, port = self.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version, sys_version = "policygrad", ""
    kinds: ClassVar[dict[str, str]] = {"/": "text/html", "/stamp": "text/plain"}

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        given = parse_qs(url.query).get("token", [""])[0]
        if not secrets.compare_digest(given.encode(), self.server.token.encode()):
            self._say(
                HTTPStatus.FORBIDDEN, "text/plain", "the token is missing or wrong: open the address that was printed"
            )
        elif url.path not in self.kinds:
            self._say(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing here: open the address that was printed")
        else:
            self._answer(self.server.pages.text if url.path == "/" else self.server.pages.stamp, self.kinds[url.path])

    def _answer(self, make: Callable[[], str], kind: str) -> None:
        try:
            self._say(HTTPStatus.OK, kind, make())
        except RunError as error:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))

    def _say(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
        }
        for name, value in (headers | {"Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: every two seconds a line with the token in it would help nobody."""


def create_server(folders: Sequence[Path], host: str = DEFAULT_HOST, port: int = 0) -> ReportServer:
    """Listens, and answers once `serve_forever` is called. port: 0 = a free one.

    Raises:
        RunError: no run in a folder. ConfigError: nobody may listen there.
    """
    for folder in folders:
        read_run(folder, empty=True)
    try:
        return ReportServer(folders, host, port)
    except OSError as error:
        where = f"{host}:{port}"
        raise ConfigError(
            f"nothing can listen at {where}: {error.strerror}; take another --port, or leave it out"
        ) from error
    except (ValueError, TypeError) as error:  # a NUL, or letters that no name of a host is written in
        raise ConfigError(
            f"--host {host!r} is no host or address ({error}): leave it out for {DEFAULT_HOST}, this machine alone"
        ) from error
