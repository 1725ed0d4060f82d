"""An OpenAI-compatible server of a test's own, on this machine: what it answers is scripted by what it is asked about."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any, dict[str, str]]
"""(status, the judge's text, or a whole body in bytes, headers)."""


@dataclass
class Asked:
    """What the server has seen."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def about(self, completion: str) -> int:
        """How often it was asked about this completion."""
        return sum(shown(body)["completion"] == completion for body in self.bodies)


def shown(body: dict[str, Any]) -> dict[str, Any]:
    """What the judge is shown."""
    result: dict[str, Any] = json.loads(body["messages"][1]["content"])
    return result


@contextmanager
def judging(says: Callable[[str, int], Answer]) -> Iterator[Asked]:
    """says: from a completion, and how often it was asked about before, to the answer."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                completion = shown(body)["completion"]
                status, text, headers = says(completion, asked.about(completion))
                asked.bodies.append(body)
                asked.headers.append({name.lower(): value for name, value in self.headers.items()})
                asked.paths.append(self.path)
            full = (
                text if isinstance(text, bytes) else json.dumps({"choices": [{"message": {"content": text}}]}).encode()
            )
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(full)))
            self.end_headers()
            self.wfile.write(full)

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    asked = Asked(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
