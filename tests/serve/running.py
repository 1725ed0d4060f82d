"""A server in a thread of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policygrad.commands.serve import listen
from policygrad.serve.app import build_app, make_server
from policygrad.serve.config import ServeConfig
from policygrad.serve.service import Service


@dataclass(eq=False)
class Running:
    """A server that answers at `url`."""

    url: str
    port: int
    service: Service


@contextmanager
def running(folder: Path, *, wrap: Any = None, **options: Any) -> Iterator[Running]:
    """Start a server, and stop it as Ctrl-C does.

    Args:
        wrap: Makes the application that answers from the server's own, to disturb it.
    """
    config = ServeConfig(folder=folder, **{"port": 0, **options})
    listening = listen(config.host, config.port)
    service = Service(config)
    app: Any = build_app(config, service)
    server = make_server(config, app if wrap is None else wrap(app), "error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    port = listening.getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", port, service)
    finally:
        server.should_exit = True
        thread.join()
        service.stop()
        listening.close()
