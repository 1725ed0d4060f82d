"""`policygrad serve`: a training server that speaks the Tinker API."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.parsing import parse_arguments
from policygrad.errors import ConfigError, import_optional
from policygrad.serve.config import ServeConfig
from policygrad.utils.http_limits import ListeningSocket

HELP = (
    "Serve models for clients that write the training loop themselves, with the Tinker API: forward_backward, optim_step, "
    "sample, save_state. Clients set TINKER_BASE_URL to the printed address, and TINKER_API_KEY to tml-local or, with --api-keys, "
    "to a key.",
    "Several clients share each base model, with an adapter each (rank=0 trains all weights). What they have saved, and what a "
    "restart needs to go on, is in --folder. Ctrl-C stops the server; started again, it goes on where it was.",
)
STATUS_SECONDS = 1.0
STOP_SECONDS = 20.0
"""After a signal to end, for what is being computed and for the states of all models."""


@dataclass(frozen=True)
class ServeOptions(ServeConfig):
    """Options of `policygrad serve`."""

    plain: bool = False
    """Print plain lines, even on a terminal."""
    json: bool = False
    """Print the address, and at the end that it stopped, as JSON lines."""


class Serving(TypedDict):
    """The server listens."""

    event: Literal["serving"]
    url: str
    models: list[str]
    api_key: str
    """What clients set TINKER_API_KEY to, or a hint at it."""


class ServerStopped(TypedDict):
    """The server has stopped."""

    event: Literal["stopped"]


@prints(Serving, ServerStopped)
def serve(args: list[str]) -> int:
    """Run `policygrad serve [--model M] [--port P]`."""
    options = parse_arguments(ServeOptions, args, "serve", *HELP)
    for module in ("tinker", "starlette", "uvicorn"):
        import_optional(module, "policygrad serve", "serve")
    from policygrad.serve.app import build_app, make_server
    from policygrad.serve.page import render_line
    from policygrad.serve.service import Service

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    listening = listen(options.host, options.port)
    service = Service(options, note)
    service.url = format_url(options.host, listening.getsockname()[1])
    server = make_server(options, build_app(options, service))
    end_in_time(server, lambda: _end(note))
    names = ", ".join(service.networks)
    if options.json:
        models = list(service.networks)
        print_json({"event": "serving", "url": service.url, "models": models, "api_key": service.key_hint})
    else:
        print(f"serving {names} at {service.url}", flush=True)
        print(f"page: {service.url}/", flush=True)
        print(f"clients: export TINKER_BASE_URL={service.url} TINKER_API_KEY={service.key_hint}", flush=True)
    stopped = threading.Event()
    if sys.stderr.isatty() and not options.plain:

        def show_status() -> None:
            """Keep one line of the terminal up to date."""
            while not stopped.wait(STATUS_SECONDS):
                print(f"\r\x1b[2K{render_line(service.status())}", end="", file=sys.stderr, flush=True)

        threading.Thread(target=show_status, daemon=True).start()
    try:
        with contextlib.suppress(KeyboardInterrupt):  # which the server raises again once it has stopped
            server.run(sockets=[listening])
    finally:
        stopped.set()
        service.stop()
    if options.json:
        print_json({"event": "stopped"})
    return 0


def end_in_time(server: Any, end: Callable[[], None], seconds: float = STOP_SECONDS) -> None:
    """Call `end` so long after a server was told to end by a signal, if it has not ended by then."""
    handle = server.handle_exit

    def handle_exit(*args: Any) -> None:
        handle(*args)
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()

    server.handle_exit = handle_exit


def _end(note: Callable[[str], None]) -> None:
    """End as a killed server does: a request that is being computed may take minutes, and is in the folder."""
    note(f"{STOP_SECONDS:g} s after the signal a request is still being computed: the next start computes it again")
    os._exit(0)


def format_url(host: str, port: int) -> str:
    """Return the address that clients use: this machine's name where the server listens at all of its addresses."""
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ConfigError if the address cannot be used."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        # asyncio sends without delay only if the protocol is named; otherwise every answer takes 40 ms
        listening = ListeningSocket(family, kind, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # clients that come while the models are loaded wait
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from error
    return listening
