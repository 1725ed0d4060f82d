"""Environments that have an engine, as far as policygrad can tell: their Python knows a package of its name."""

from __future__ import annotations

import socket
import sys
from collections import defaultdict
from functools import cache
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from doubles import forwarder
from stand_in_servers import make_handler, make_vllm


def make_environment(folder: Path, package: str = "vllm", program: str = "") -> Path:
    """Return the folder of an environment whose Python has the package, version 1.2, and nothing else.

    Args:
        program: A shell script, the program of the package's name; "" = a server that samples from the weights it is given.
    """
    program = program or f'exec {sys.executable} -I -S {forwarder.__file__} {serve_stand_ins()} "$@"'
    site, scripts = folder / "site", folder / "bin"
    (site / package).mkdir(parents=True)
    (site / package / "__init__.py").write_text("")
    (site / f"{package}-1.2.dist-info").mkdir()
    (site / f"{package}-1.2.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n"
    )
    scripts.mkdir()
    for name, text in {"python": f'PYTHONPATH={site} exec {sys.executable} -S "$@"', package: program}.items():
        (scripts / name).write_text(f"#!/bin/sh\n{text}\n")
        (scripts / name).chmod(0o755)
    return folder


@cache
def serve_stand_ins() -> int:
    """Serve stand-ins for vLLM in a thread of this process; return the port.

    Each process that connects (`doubles/forwarder.py`) has one of its own, which has no weights at first: it is a server that
    can be killed, and need not import torch.
    """
    lock = Lock()  # of all: transformers cannot load two models at a time
    handlers: defaultdict[bytes, type] = defaultdict(lambda: make_handler(make_vllm(), lock))

    def handle(connection: socket.socket, *about: Any) -> None:
        if name := connection.recv(forwarder.NAME_BYTES, socket.MSG_WAITALL):
            handlers[name](connection, *about)

    server = ThreadingHTTPServer(("127.0.0.1", 0), handle)  # type: ignore[arg-type]
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])
