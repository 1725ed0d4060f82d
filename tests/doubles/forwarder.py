"""A process in the place of a server, which can be killed like one: `forwarder.py TARGET … --port N …`

What connects to port N talks to the port TARGET of this machine, which first gets 16 bytes that are this process's own. It needs a
few modules of the standard library alone, and so starts at once.
"""

from __future__ import annotations

import os
import socket
import sys
from threading import Thread

NAME_BYTES = 16


def forward(source: socket.socket, target: socket.socket) -> None:
    """Send on what arrives until there is no more."""
    try:
        while piece := source.recv(65536):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one of them is gone
        source.close()
        target.close()


def main(target: int, port: int) -> None:
    name = os.urandom(NAME_BYTES)
    with socket.create_server(("127.0.0.1", port)) as server:
        print(f"http://127.0.0.1:{port}", flush=True)
        while True:
            client, _ = server.accept()
            behind = socket.create_connection(("127.0.0.1", target))
            behind.sendall(name)
            for ends in ((client, behind), (behind, client)):
                Thread(target=forward, args=ends, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[sys.argv.index("--port") + 1]))
