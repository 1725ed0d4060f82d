"""Real llama.cpp servers that can be given a fault, by signals and by a small proxy before each: for scripts/engine_faults.py."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from policygrad.samplers.engines import llama_server
from policygrad.samplers.engines.llama_cpp import LlamaServerProcess

PARALLEL, CONTEXT = 4, 256
GARBAGE = (
    b"<html>502 Bad Gateway</html>",
    b'{"tokens": [1, 2',
    b"[]",
    b"null",
    b'{"tokens": [99999999], "completion_probabilities": [{"id": 99999999, "prob": 0.5}]}',
    b'{"tokens": [7, 1], "completion_probabilities": [{"id": 7, "prob": 0.5}]}',
    b'{"tokens": [7, 1], "completion_probabilities": [{"id": 7, "prob": 1.5}, {"id": 1, "prob": 0.5}]}',
    b'{"tokens": ["x"], "completion_probabilities": [{"id": "x", "prob": "y"}]}',
)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked has broken the connection, which is what this is about."""


class Proxy:
    """What a client takes for a server; `fault` is what it does to the answers of the one behind it: nothing, or a kind."""

    def __init__(self, upstream: int, draw: random.Random) -> None:
        self.own = self.upstream = upstream
        """Ports: of its server, and of the one that it asks."""
        self.fault, self.draw = "", draw
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                proxy.answer(self)

            do_POST = do_GET

        self.server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, asked: BaseHTTPRequestHandler) -> None:
        """As the server behind it, but for the fault."""
        body = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
        status, said, asked.close_connection = 500, b"a fault", True
        if self.fault == "garbage":
            status, said = 200, self.draw.choice(GARBAGE)
        elif self.fault == "gone":
            return
        elif self.fault != "errors":
            connection = HTTPConnection("127.0.0.1", self.upstream, timeout=60)
            try:
                connection.request(asked.command, asked.path, body or None, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                status, said = answer.status, answer.read()
            except (OSError, HTTPException):  # it is not there, which shows as a connection that breaks
                return
            finally:
                connection.close()
            asked.close_connection = self.fault == "drops"
        with contextlib.suppress(OSError):  # who asked has gone
            asked.send_response(status)
            asked.send_header("Content-Length", str(len(said)))
            asked.end_headers()
            asked.wfile.write(said[: len(said) // 2] if self.fault == "drops" else said)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@dataclass(frozen=True)
class Engine:
    """A real server that follows a folder, and the proxy before it."""

    process: LlamaServerProcess
    proxy: Proxy

    def native(self) -> int | None:
        """The process that serves, below the one that watches; None = there is none just now."""
        assert self.process.process is not None
        pid = self.process.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None

    def alive(self) -> int:
        """As `native`, once there is one."""
        while (pid := self.native()) is None:
            time.sleep(0.005)
        return pid

    @contextlib.contextmanager
    def faulty(self, kind: str, old: int) -> Iterator[None]:
        """Inside, it has the fault. old: the port of a server with old weights."""
        stopped = 0
        if kind in ("killed", "hangs"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped := self.alive(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        elif kind == "old":
            self.proxy.upstream = old
        else:
            self.proxy.fault = kind
        try:
            yield
        finally:
            self.proxy.fault, self.proxy.upstream = "", self.proxy.own
            if kind == "hangs":
                with contextlib.suppress(ProcessLookupError):  # it was replaced meanwhile
                    os.kill(stopped, signal.SIGCONT)


@contextlib.contextmanager
def two_engines(folder: Path, draw: random.Random) -> Iterator[list[Engine]]:
    """Two servers that follow the folder."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(2):
            process = LlamaServerProcess(folder, max_concurrency=PARALLEL, context_length=CONTEXT, threads=1)
            process.ensure_running()
            stack.callback(process.stop)
            proxy = Proxy(process.port, draw)
            stack.callback(proxy.close)
            found.append(Engine(process, proxy))
        yield found


@contextlib.contextmanager
def keeping(weights: Path, folder: Path) -> Iterator[int]:
    """The port of a server that keeps the first of these weights, once there are any. folder: for its copy."""
    port = LlamaServerProcess(folder, max_concurrency=PARALLEL, context_length=CONTEXT, threads=1).port
    shutil.rmtree(folder, ignore_errors=True)
    children: list[subprocess.Popen[bytes]] = []

    def serve() -> None:
        while not (name := llama_server.read_current_name(weights)):
            time.sleep(0.005)
        shutil.copytree(weights / name, folder / name)
        argv = [f"--file={folder / name / llama_server.MODEL_FILE}", f"--name={name}", f"--port={port}", "--threads=1"]
        argv += [f"--max-concurrency={PARALLEL}", f"--context-length={CONTEXT}", f"--parent={os.getpid()}"]
        with (folder / "log").open("wb") as log:
            command = [sys.executable, "-P", llama_server.__file__, "serve", *argv]
            children.append(subprocess.Popen(command, stdout=log, stderr=log))

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield port
    finally:
        for child in children:
            child.kill()
            child.wait()
