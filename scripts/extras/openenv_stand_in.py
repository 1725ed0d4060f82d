"""A server that speaks OpenEnv's protocol over the package websockets, which the extra brings: one turn, worth 1. The real server
has `make test-environments`. Prints its address."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

SCHEMA = json.dumps({"action": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}) + "\n"


def schema(connection: ServerConnection, request: Any) -> Any:
    """What an action is; anything else is a WebSocket."""
    return connection.respond(HTTPStatus.OK, SCHEMA) if request.path == "/schema" else None


async def session(connection: ServerConnection) -> None:
    """One episode after another, until it is told to close."""
    async for message in connection:
        kind = json.loads(message)["type"]
        if kind == "close":
            return
        done = kind == "step"
        data = {"observation": {"prompt": "Say anything."}, "reward": float(done), "done": done}
        await connection.send(json.dumps({"type": "observation", "data": data}))


async def main() -> None:
    async with serve(session, "127.0.0.1", 0, process_request=schema) as server:
        print(f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
