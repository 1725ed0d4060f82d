"""A hub on this machine: creates repositories and takes commits, in the form that huggingface_hub 1 and 2 speak.

Its documentation: huggingface.co/docs/hub/api; the forms were read off what the client sends.
"""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class Hub:
    """What it was sent."""

    token: str = "hf_right"
    url: str = ""
    leaves: str = ""
    """Part of an address at which it breaks off without a word; "" = none."""
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str, body: bytes) -> Any:
        if path.endswith("/repos/create"):
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/{self.created[-1].get('organization', 'me')}/{self.created[-1]['name']}"}
        if "/preupload/" in path:
            return {"files": [{**f, "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]}
        if "/commit/" in path:
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"commitUrl": f"{self.url}/me/it/commit/1", "commitOid": "1" * 40}
        return {}


@contextmanager
def hub() -> Iterator[Hub]:
    """One that listens, and refuses whoever lacks its token."""
    result = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if result.leaves and result.leaves in self.path:
                self.close_connection = True
                return
            right = self.headers.get("Authorization") == f"Bearer {result.token}"
            output = result.answer(self.path, body) if right else {"error": "Invalid username or password."}
            self._say(200 if right else 401, json.dumps(output).encode())

        def do_GET(self) -> None:
            self._say(401, b'{"error": "Invalid username or password."}')

        def _say(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        result.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield result
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def gone() -> Iterator[Hub]:
    """An address at which nobody answers, and that nobody else can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield Hub(url=f"http://127.0.0.1:{held.getsockname()[1]}")
