"""A server that answers in the form of a chat completion, and thinks every text worth 1. The standard library only. Prints its
address."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SAID = json.dumps({"choices": [{"message": {"content": json.dumps({"score": 1})}}]}).encode()


class Handler(BaseHTTPRequestHandler):
    """Reads what it is asked and gives the same answer."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(SAID)))
        self.end_headers()
        self.wfile.write(SAID)

    def log_message(self, *words: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
