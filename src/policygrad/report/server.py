"""Serve the page of running runs, protected by a token; by default on this machine only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from threading import Lock

from policygrad.errors import RunError
from policygrad.report.data import CONFIG_FILES, read_run
from policygrad.report.page import render_report
from policygrad.trackers.jsonl import COMPLETIONS, METRICS, NOTES
from policygrad.utils.page_server import PageServer, Response

DEFAULT_HOST = "127.0.0.1"


class ReportServer(PageServer):
    """Serves the page at `/?token=…` and its hash at `/stamp?token=…`; rejects all other requests.

    The page is rendered again when a file of one of the folders changes.
    """

    def __init__(self, host: str, port: int, folders: Sequence[Path]) -> None:
        self.folders = folders
        self._stamp, self._text, self._lock = "", "", Lock()

        def answer(make: Callable[[], str], kind: str) -> Response:
            try:
                return Response(make(), kind)
            except RunError as error:
                return Response(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE)

        routes = {
            ("GET", "/"): lambda body: answer(self.text, "text/html"),
            ("GET", "/stamp"): lambda body: answer(self.stamp, "text/plain"),
        }
        super().__init__(host, port, routes)

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


def create_server(folders: Sequence[Path], host: str = DEFAULT_HOST, port: int = 0) -> ReportServer:
    """Create a server that listens and responds once `serve_forever` is called. port: 0 = a free one.

    Raises:
        RunError: A folder has no run.
        ConfigError: The address cannot be used.
    """
    for folder in folders:
        read_run(folder, empty=True)
    return ReportServer.create(host, port, folders)
