"""The proxy's HTTP server, in a thread of its own: each client is known by its API key, and each key has a handler."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from policygrad.errors import ConfigError, PolicygradError, import_optional
from policygrad.models.chat.control_tokens import replace_surrogates
from policygrad.proxy.formats import FORMATS, MESSAGES, RESPONSES, ApiError, ApiFormat, ChatReply, ChatRequest, Event
from policygrad.proxy.reading import openai_error
from policygrad.proxy.stored import StoredResponses
from policygrad.utils.http_limits import HttpLimits, ListeningSocket, host_names, limit_app

Answer = Callable[[ChatRequest], "Future[ChatReply]"]
"""Answers a request, from any thread. The future may raise ApiError; it is cancelled when the client goes away."""
MAX_CONNECTIONS = 512
"""Connections at once, or half of the files that this process may open if those are fewer."""
MAX_BODY = 16 * 2**20
"""Bytes of a request."""
MAX_READ = 2**30
"""Bytes of a request that are read, so that its client sees why it is refused."""
MAX_BODIES = 2 * MAX_BODY
"""Bytes of the requests that one key is sending at once."""
MAX_BODIES_IN_ALL = 16 * MAX_BODY
"""Bytes of the requests that are being sent at once."""
BODY_SECONDS = 60.0
"""Seconds in which a request must have arrived."""
MAX_DEPTH = 100
"""Levels of a request's JSON. Templates and schemas are read recursively."""
MAX_PENDING = 64
"""Requests of one key that may wait for their answers at once."""
KEEP_ALIVE_SECONDS = 10.0
"""A stream that waits for its completion sends a comment so often, so that no client takes it for dead. Until the first, a refusal
has its own status."""
START_SECONDS = 30.0
ANY_KEY = ""
"""The key of a handler for clients with any key, or none."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Handler:
    """What becomes of a key's requests."""

    answer: Answer
    note_error: Callable[[ApiError], None] | None = None
    """Called, from the server's thread, with each error that a request is answered with."""


def get_limits() -> HttpLimits:
    """Return what the server accepts before a request is one; `Proxy` bounds the bodies of each key itself."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    connections = max(8, min(MAX_CONNECTIONS, files // 2 if files > 0 else MAX_CONNECTIONS))
    return HttpLimits(
        header_seconds=30.0,
        body_seconds=2 * BODY_SECONDS,
        body_bytes=MAX_READ,
        total_body_bytes=MAX_CONNECTIONS * MAX_READ,
        connections=connections,
        backlog=128,
    )


class Proxy:
    """Serves OpenAI's and Anthropic's request formats on one address.

    Args:
        host: The address to listen on.
        port: 0 = any that is free.
        model: The name that `/v1/models` lists.
        needs_keys: Pages of other sites cannot know a key. Without keys, clients must call the proxy by this machine's own names.

    Raises:
        ConfigError: The address cannot be used, or the packages of the extra `proxy` are not installed.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, model: str = "policy", *, needs_keys: bool = True
    ) -> None:
        self.model = model
        self._handlers: dict[str, Handler] = {}
        self._finders: dict[str, Callable[[int], str | None]] = {}
        self._pending, self._bodies = Counter[str](), Counter[str]()  # requests, and bytes, of the server's thread
        self._stored = StoredResponses()
        self._logged = set[str]()
        import_optional("starlette", "a proxy for programs", "proxy")
        uvicorn = import_optional("uvicorn", "a proxy for programs", "proxy")
        limits, hosts = get_limits(), None if needs_keys else host_names(host)
        config = uvicorn.Config(
            limit_app(self._make_app(), limits, hosts),
            log_level="critical",
            access_log=False,
            lifespan="off",
            **limits.server_options(),
        )
        self._server = uvicorn.Server(config)
        self._socket = ListeningSocket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"the proxy cannot listen on {host}:{port} ({error.strerror}): choose another --port"
            ) from error
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise ConfigError(f"the proxy at {self.url} did not start within {START_SECONDS:g} s")

    def add(self, key: str, answer: Answer, note_error: Callable[[ApiError], None] | None = None) -> None:
        """Answer the requests of a key."""
        self._handlers[key] = Handler(answer, note_error)

    def remove(self, key: str) -> None:
        """Refuse a key's requests from now on."""
        self._handlers.pop(key, None)
        self._finders.pop(key, None)
        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._stored.forget, key)

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
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(
                self._started.set
            )  # connections are queued by the socket until the server accepts them
            await self._server.serve(sockets=[self._socket])

        self._socket.listen()
        # uvicorn's own `run` would install signal handlers where it is the main thread
        asyncio.run(run())

    def _make_app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        def describe_model(name: str) -> dict[str, Any]:
            return {"id": name, "object": "model", "created": 0, "owned_by": "policygrad"}

        async def list_models(request: Request) -> Response:
            return JSONResponse({"object": "list", "data": [describe_model(self.model)]})

        async def show_model(request: Request) -> Response:
            return JSONResponse(describe_model(request.path_params["name"]))

        async def refuse(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            known = ", ".join(api.path for api in FORMATS)
            text = f"{request.method} {request.url.path} is not answered here, but POST {known}; GET /v1/models"
            failure = ApiError(text, error.status_code, "not_found")
            self._note(self._find_handler(self._find_key(request)), failure)
            render = MESSAGES.render_error if "anthropic-version" in request.headers else openai_error
            return JSONResponse(render(failure), error.status_code, error.headers)

        def make_route(api: ApiFormat) -> Route:
            async def answer(request: Request) -> Response:
                return await self._answer(api, request)  # type: ignore[no-any-return]

            return Route(api.path, answer, methods=["POST"])

        models = [Route("/v1/models", list_models), Route("/v1/models/{name:path}", show_model)]
        app = Starlette(routes=[*map(make_route, FORMATS), *models], exception_handlers={HTTPException: refuse})
        app.router.redirect_slashes = False  # a redirected POST loses its body in some clients
        return app

    async def _answer(self, api: ApiFormat, request: Any) -> Any:
        """Answer a request, whatever it is."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response

        key = self._find_key(request)
        handler = self._find_handler(key)
        futures = list[Future[ChatReply]]()
        keeps_pending = False
        self._pending[key] += 1
        try:
            if handler is None:
                raise ApiError(
                    "the API key belongs to no running episode: send the one in OPENAI_API_KEY or ANTHROPIC_API_KEY",
                    401,
                    "invalid_api_key",
                )
            if self._pending[key] > MAX_PENDING:
                raise ApiError(
                    f"{MAX_PENDING} requests of this key wait already: send fewer at once", 429, "rate_limit_exceeded"
                )
            body = await self._read_body(key, request)
            if api is RESPONSES:
                body = self._stored.complete(key, body)
            parsed = api.parse(body)
            parsed = replace(parsed, model=parsed.model or self.model)
            singles = [replace(parsed, prompt=p, more_prompts=()) for p in (parsed.prompt, *parsed.more_prompts)]
            for single in singles:
                futures.append(handler.answer(single))
            waiting = asyncio.gather(*map(asyncio.wrap_future, futures))
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio would report it
            # until the first sign of life a stream can still be refused by its status
            timeout = KEEP_ALIVE_SECONDS if parsed.stream else None
            is_done = await _wait_while_connected(waiting, request, timeout)
            if not is_done and (not parsed.stream or await request.is_disconnected()):
                raise ClientDisconnect
            if not parsed.stream:
                return JSONResponse(self._render(api, key, body, parsed, waiting.result()))
            if waiting.done():
                waiting.result()
            keeps_pending = True
            return self._stream(api, key, body, parsed, waiting, futures)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # whatever a program sends costs its request
            failure = self._describe_failure(error)
            self._note(handler, failure)
            return JSONResponse(api.render_error(failure), failure.status)
        finally:
            if not keeps_pending:
                self._release(key, futures)

    def _release(self, key: str, futures: Sequence[Future[ChatReply]]) -> None:
        """Forget a request that is answered or abandoned."""
        for future in futures:
            future.cancel()  # nothing, if it is done
        self._pending[key] -= 1
        if not self._pending[key]:
            del self._pending[key]

    def _render(
        self, api: ApiFormat, key: str, body: Mapping[str, Any], request: ChatRequest, replies: Sequence[ChatReply]
    ) -> dict[str, Any]:
        rendered = api.render(request, _join_replies(replies))
        if api is RESPONSES:
            self._stored.add(key, body, rendered)
        return rendered

    def _stream(
        self,
        api: ApiFormat,
        key: str,
        body: Mapping[str, Any],
        request: ChatRequest,
        waiting: asyncio.Future[list[ChatReply]],
        futures: Sequence[Future[ChatReply]],
    ) -> Any:
        """Return a response that sends a completion as server-sent events once it is sampled, and comments until then."""
        from starlette.responses import StreamingResponse

        async def events() -> AsyncIterator[str]:
            try:
                while not waiting.done():
                    yield ": the completion is being sampled\n\n"
                    await asyncio.wait({waiting}, timeout=KEEP_ALIVE_SECONDS)
                reply = _join_replies(waiting.result())
                if api is RESPONSES:
                    self._stored.add(key, body, api.render(request, reply))
                for event in api.stream(request, reply):
                    yield _format_event(event)
                if api.last_line:
                    yield f"data: {api.last_line}\n\n"
            except Exception as error:
                failure = self._describe_failure(error)
                self._note(self._find_handler(key), failure)
                yield _format_event(("error", api.render_error(failure)))
            finally:
                waiting.cancel()

        class Streamed(StreamingResponse):
            async def __call__(inner, *args: Any) -> None:
                try:
                    await super().__call__(*args)
                finally:  # also if nothing of it was read
                    self._release(key, futures)

        return Streamed(events(), media_type="text/event-stream")

    def _find_key(self, request: Any) -> str:
        """Return a request's key, or the key of the episode whose program has sent it."""
        key = _read_key(request.headers)
        find = self._finders.get(key)
        return key if find is None else find(request.client.port) or ""

    def _find_handler(self, key: str) -> Handler | None:
        return self._handlers.get(key) or self._handlers.get(ANY_KEY)

    def _describe_failure(self, error: Exception) -> ApiError:
        """Return the error that a client is told of. What no request should cause is logged, each kind once."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, PolicygradError):
            return ApiError(str(error))
        text = f"{type(error).__name__}: {error}"
        if text not in self._logged and len(self._logged) < 100:
            self._logged.add(text)
            _log.error("the proxy failed at a request", exc_info=error)
        return ApiError(f"a fault of the proxy, which its log describes: {text}", 500, "server_error")

    @staticmethod
    def _note(handler: Handler | None, error: ApiError) -> None:
        if handler is not None and handler.note_error is not None:
            handler.note_error(error)

    async def _read_body(self, key: str, request: Any) -> dict[str, Any]:
        parts, size, kept = list[bytes](), 0, 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > MAX_BODY:  # the rest is read, since most clients read no answer before they have sent it
                        parts.clear()
                        continue
                    self._bodies[key] += len(part)
                    kept += len(part)
                    if self._bodies[key] > MAX_BODIES:
                        text = f"this key is sending more than {MAX_BODIES} bytes at once: send fewer requests at once"
                        raise ApiError(text, 429, "rate_limit_exceeded")
                    if self._bodies.total() > MAX_BODIES_IN_ALL:
                        raise ApiError("too many large requests are being sent: try again", 503, "overloaded")
                    parts.append(part)
            if size > MAX_BODY:
                raise ApiError(f"the request has {size} bytes, and the most is {MAX_BODY}", 413, "request_too_large")
            return parse_body(b"".join(parts))
        except TimeoutError as error:
            raise ApiError(f"the request did not arrive within {BODY_SECONDS:g} s", 408, "timeout") from error
        finally:
            self._bodies[key] -= kept
            if not self._bodies[key]:
                del self._bodies[key]


def _read_key(headers: Mapping[str, str]) -> str:
    return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ").strip()


def parse_body(data: bytes) -> dict[str, Any]:
    """Parse a request's JSON object. Lone surrogates, which no tokenizer reads, become U+FFFD.

    Raises:
        ApiError: It is none, has NaN or infinity, or is deeper than MAX_DEPTH.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        body = json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(f"the request must be a JSON object, not {type(body).__name__}")
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise ApiError(f"the request's JSON is nested deeper than {MAX_DEPTH} levels")
    # only these can spell a surrogate
    return replace_surrogates(body) if b"\\u" in data or b"\xed" in data else body


async def _wait_while_connected(waiting: asyncio.Future[Any], request: Any, timeout: float | None) -> bool:
    """Wait for a result. False = the client has gone away, or the time is over."""

    async def notice() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(notice())
    try:
        await asyncio.wait({waiting, leaving}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return waiting.done()
    finally:
        leaving.cancel()


def _join_replies(replies: Sequence[ChatReply]) -> ChatReply:
    """Return the replies to the prompts of one request as one."""
    first, *others = replies
    choices = tuple(choice for reply in replies for choice in reply.choices)
    return replace(first, choices=choices, more_prompt_ids=tuple(reply.prompt_ids for reply in others))


def _format_event(event: Event) -> str:
    name, data = event
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
