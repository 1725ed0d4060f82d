"""The proxy's HTTP server, in a thread of its own: each client is known by its API key, and each key has a handler."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from policygrad.errors import ConfigError, PolicygradError, import_optional
from policygrad.proxy.formats import FORMATS, RESPONSES, ApiError, ApiFormat, ChatReply, ChatRequest, Event

Handler = Callable[[ChatRequest], "Future[ChatReply]"]
"""Answers a request, from any thread. The future may raise ApiError."""
MAX_BODY = 64 * 2**20
"""Bytes of a request."""
MAX_PENDING = 64
"""Requests of one key that may wait for their answers at once."""
KEEP_ALIVE_SECONDS = 10.0
"""A stream that waits for its completion sends a comment so often, so that no client takes it for dead."""
START_SECONDS = 30.0
ANY_KEY = ""
"""The key of a handler for clients with any key, or none."""


class Proxy:
    """Serves OpenAI's and Anthropic's request formats on one address.

    Args:
        host: The address to listen on.
        port: 0 = any that is free.
        model: The name that `/v1/models` lists.

    Raises:
        ConfigError: The address cannot be used, or the packages of the extra `proxy` are not installed.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, model: str = "policy") -> None:
        self.model = model
        self._handlers: dict[str, Handler] = {}
        self._finders: dict[str, Callable[[int], str | None]] = {}
        self._pending, self._lock = Counter[str](), threading.Lock()
        self._responses: dict[tuple[str, str], list[Any]] = {}
        """By key and id: the input items of a response and its output, which a later request may continue by
        `previous_response_id`."""
        uvicorn = import_optional("uvicorn", "a proxy for programs", "proxy")
        import_optional("starlette", "a proxy for programs", "proxy")
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"the proxy cannot listen on {host}:{port} ({error.strerror}): choose another --port"
            ) from error
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(self._make_app(), log_level="critical", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise ConfigError(f"the proxy at {self.url} did not start within {START_SECONDS:g} s")

    def add(self, key: str, handler: Handler) -> None:
        """Answer the requests of a key with a handler."""
        self._handlers[key] = handler

    def remove(self, key: str) -> None:
        """Refuse a key's requests from now on."""
        self._handlers.pop(key, None)
        self._finders.pop(key, None)
        for name in [name for name in self._responses if name[0] == key]:
            del self._responses[name]

    def resolve(self, key: str, find: Callable[[int], str | None] | None) -> None:
        """Take requests with a key for those of the key that `find` returns for the client's port; None = no more."""
        if find is None:
            self._finders.pop(key, None)
        else:
            self._finders[key] = find

    def environment(self, key: str) -> dict[str, str]:
        """Return the environment variables by which the clients of OpenAI, Anthropic and LiteLLM find the proxy."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": key,
            "POLICYGRAD_MODEL": self.model,
        }

    def close(self) -> None:
        """End the server."""
        self._server.should_exit = True
        self._thread.join(START_SECONDS)
        self._socket.close()

    def wait(self) -> None:
        """Wait until the server ends."""
        self._thread.join()

    def _serve(self) -> None:
        async def run() -> None:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._started.set)  # connections are queued by the socket until the server accepts them
            await self._server.serve(sockets=[self._socket])

        self._socket.listen(2048)
        # uvicorn's own `run` would install signal handlers where it is the main thread
        asyncio.run(run())

    def _make_app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        async def list_models(request: Request) -> Response:
            model = {"id": self.model, "object": "model", "created": 0, "owned_by": "policygrad"}
            return JSONResponse({"object": "list", "data": [model]})

        def make_route(api: ApiFormat) -> Route:
            async def answer(request: Request) -> Response:
                try:
                    key, handler = self._authenticate(request)
                    body = await _read_body(request)
                    if api is RESPONSES:
                        body = self._with_earlier_items(key, body)
                    parsed = api.parse(body)
                    parsed = replace(parsed, model=parsed.model or self.model)
                    future = self._submit(key, handler, parsed)
                    if parsed.stream:
                        return _stream(api, parsed, future)  # type: ignore[no-any-return]
                    reply = await asyncio.wrap_future(future)
                    rendered = api.render(parsed, reply)
                    if api is RESPONSES:
                        self._responses[key, rendered["id"]] = [*_as_items(body["input"]), *rendered["output"]]
                    return JSONResponse(rendered)
                except ApiError as error:
                    return JSONResponse(api.render_error(error), error.status)
                except PolicygradError as error:
                    return JSONResponse(api.render_error(ApiError(str(error))), 400)

            return Route(api.path, answer, methods=["POST"])

        return Starlette(routes=[*map(make_route, FORMATS), Route("/v1/models", list_models)])

    def _authenticate(self, request: Any) -> tuple[str, Handler]:
        headers = request.headers
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key in self._finders:
            key = self._finders[key](request.client.port) or ""
        if (handler := self._handlers.get(key)) is not None:
            return key, handler
        if (handler := self._handlers.get(ANY_KEY)) is not None:
            return key, handler
        raise ApiError(
            "the API key belongs to no running episode: send the one in OPENAI_API_KEY or ANTHROPIC_API_KEY",
            401,
            "invalid_api_key",
        )

    def _submit(self, key: str, handler: Handler, request: ChatRequest) -> Future[ChatReply]:
        with self._lock:
            if self._pending[key] >= MAX_PENDING:
                raise ApiError(
                    f"{MAX_PENDING} requests of this key wait already: send fewer at once", 429, "rate_limit_exceeded"
                )
            self._pending[key] += 1
        future = handler(request)
        future.add_done_callback(lambda _: self._release(key))
        return future

    def _release(self, key: str) -> None:
        with self._lock:  # a future may be done in another thread
            self._pending[key] -= 1
            if not self._pending[key]:
                del self._pending[key]

    def _with_earlier_items(self, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """Put the items of the response that a request continues before its own."""
        earlier = body.get("previous_response_id")
        if earlier is None:
            return body
        if (items := self._responses.get((key, str(earlier)))) is None:
            raise ApiError(
                f"there is no earlier response {earlier!r}: streamed responses are not stored, send their items", 404
            )
        return {**body, "input": [*items, *_as_items(body.get("input"))]}


def _as_items(given: Any) -> list[Any]:
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else list(given or ())


async def _read_body(request: Any) -> dict[str, Any]:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise ApiError(f"the request is larger than {MAX_BODY} bytes", 413)
        parts.append(part)
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(f"the request must be a JSON object, not {type(body).__name__}")
    return body


def _stream(api: ApiFormat, request: ChatRequest, future: Future[ChatReply]) -> Any:
    """Return a response that sends a completion as server-sent events once it is sampled, and comments until then."""
    from starlette.responses import StreamingResponse

    async def events() -> AsyncIterator[str]:
        waiting = asyncio.wrap_future(future)
        while not (await asyncio.wait({waiting}, timeout=KEEP_ALIVE_SECONDS))[0]:
            yield ": the completion is being sampled\n\n"
        try:
            for event in api.stream(request, waiting.result()):
                yield _format_event(event)
            if api.last_line:
                yield f"data: {api.last_line}\n\n"
        except (ApiError, PolicygradError) as error:
            failure = error if isinstance(error, ApiError) else ApiError(str(error))
            yield _format_event(("error", api.render_error(failure)))

    return StreamingResponse(events(), media_type="text/event-stream")


def _format_event(event: Event) -> str:
    name, data = event
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
