"""The HTTP server: the Tinker API's addresses, who may use them, and a page about what it does."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from policygrad.errors import ConfigError, PolicygradError, import_optional
from policygrad.serve import wire
from policygrad.serve.config import ServeConfig
from policygrad.serve.page import render_status_page
from policygrad.serve.sample_queue import BusyError, LostRequestError
from policygrad.serve.sampling import SampleQuery
from policygrad.serve.service import LOCAL_USER, UNLOAD, Service
from policygrad.serve.store import META, LoggedRequest, SavedInfo, SavedPath, UnknownIdError
from policygrad.serve.training import compute_expiry
from policygrad.utils.filesystem import is_disk_full
from policygrad.utils.http_limits import HOLD, HttpLimits, HttpRefusal, host_names, limit_app

import_optional("starlette", "policygrad serve", "serve")
import_optional("uvicorn", "policygrad serve", "serve")

import uvicorn  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import ClientDisconnect, Request  # noqa: E402
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response  # noqa: E402
from starlette.routing import Route  # noqa: E402

LONG_POLL_SECONDS = 20.0
"""A client that asks for a result waits so long for it before it asks again."""
MAX_BODY, MAX_TOTAL_BODY = 2**29, 2**30
"""Bytes of a request, unpacked, and of all that are being read."""
SMALL_BODY = 2**16
"""Bytes that are parsed at once; a thread parses more, so that others are answered meanwhile."""
DOWNLOAD_SECONDS = 3600
API = "/api/v1"
TRAINING = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
T = TypeVar("T")
Handler = Callable[["Api", Request], Awaitable[Response]]


class Api:
    """Answers requests with a service."""

    def __init__(self, config: ServeConfig, service: Service) -> None:
        self.config, self.service = config, service
        self.keys = config.read_api_keys()
        self.downloads: dict[str, tuple[Path, float]] = {}  # by token: the file, and until when

    def authenticate(self, request: Request) -> str:
        """Return who asks: an API key's short hash, or `local` where none is needed. Raises HttpRefusal."""
        if not self.keys:
            return LOCAL_USER
        given = request.headers.get("x-api-key", "")
        for key in self.keys:
            if secrets.compare_digest(given.encode(), key.encode()):
                return hash_key(key)
        raise HttpRefusal(
            401, "the API key is missing or unknown: set TINKER_API_KEY to one of the server's --api-keys"
        )

    async def read_body(self, request: Request) -> bytes:
        """Return a request's body, unpacked."""
        body = b"".join([part async for part in request.stream()])
        encoding = request.headers.get("content-encoding", "")
        if encoding == "zstd":
            return await asyncio.to_thread(_unpack, body, request.scope[HOLD])
        if encoding not in ("", "identity"):
            raise HttpRefusal(415, f"content-encoding {encoding!r} is not read here: send zstd, or none")
        return body

    async def parse(self, kind: str, request: Request) -> Any:
        """Return a request of the API by the name in its URL. Raises ConfigError for one that is malformed."""
        return await self.compute(wire.parse, kind, await self.read_body(request))

    async def compute(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function, in a thread if it has much to read."""
        if sum(len(x) for x in args if isinstance(x, bytes)) <= SMALL_BODY:
            return function(*args)
        return await asyncio.to_thread(function, *args)

    async def read_json(self, request: Request) -> dict[str, Any]:
        """Return the object that is a request's body."""
        return await self.compute(wire.read_json, request.url.path.rpartition("/")[2], await self.read_body(request))

    # Sessions.

    async def capabilities(self, request: Request) -> Response:
        models = [
            {"model_name": name, "max_context_length": x.context_length, "trainable": True, "sampleable": True}
            for name, x in self.service.networks.items()
        ]
        return JSONResponse({"supported_models": models})

    async def create_session(self, request: Request) -> Response:
        given = await self.parse("create_session", request)
        session_id = self.service.create_session(request.state.user, given)
        return JSONResponse({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, request: Request) -> Response:
        given = await self.parse("session_heartbeat", request)
        values = self.service.store.read_session(request.state.user, given.session_id)
        if "finished" in values:
            raise HttpRefusal(410, f"the session {given.session_id} is finished")
        self.service.heartbeats[given.session_id] = time.time()
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        await self.read_body(request)
        self.service.finish_session(request.state.user, request.path_params["session_id"])
        return Response(status_code=204)

    async def list_sessions(self, request: Request) -> Response:
        user, store = request.state.user, self.service.store
        sessions = [s for s in store.sessions() if _is_owned(self.service, user, s)]
        return JSONResponse({"sessions": sessions[slice(*_page(request))]})

    async def get_session(self, request: Request) -> Response:
        session_id, store = request.path_params["session_id"], self.service.store
        values = self.service.store.read_session(request.state.user, session_id)
        ids = {"training_run_ids": store.models(session_id), "sampler_ids": store.samplers(session_id)}
        return JSONResponse({**ids, "user_metadata": values["user_metadata"], "display_name": values["display_name"]})

    # Training.

    async def create_model(self, request: Request) -> Response:
        body = await self.read_body(request)
        given = await self.compute(wire.parse, "create_model", body)
        return _future(self.service.create_model(request.state.user, given, "create_model", body))

    async def load_weights(self, request: Request) -> Response:
        body = await self.read_body(request)
        given = await self.compute(wire.parse, "load_weights", body)
        user = request.state.user
        if given.weights_access_token is not None:
            raise HttpRefusal(400, "weights_access_token: weights of other accounts are not available here")
        if given.optimizer_config is not None and given.optimizer_config.type != "adamw":
            raise HttpRefusal(400, f"the optimizer {given.optimizer_config.type!r} is not available here: use adamw")
        if given.session_id is not None:
            return _future(self.service.create_model(user, given, "load_weights", body))
        if given.model_id is None or given.seq_id is None:
            raise HttpRefusal(400, "load_weights: give model_id and seq_id, or session_id and model_seq_id")
        return _future(
            self.service.submit(user, given.model_id, LoggedRequest(given.seq_id, "load_weights", body, wire.JSON))
        )

    async def forward_backward(self, request: Request) -> Response:
        return await self._train(request, "forward_backward")

    async def forward(self, request: Request) -> Response:
        return await self._train(request, "forward")

    async def train(self, request: Request) -> Response:
        return await self._train(request, request.url.path.rpartition("/")[2])

    async def _train(self, request: Request, kind: str) -> Response:
        body, content_type = await self.read_body(request), request.headers.get("content-type", wire.JSON)
        try:
            model_id, sequence = await self.compute(wire.parse_request_address, kind, body, content_type)
        except UnicodeDecodeError as error:
            raise HttpRefusal(400, f"{kind}: the request is not text ({error})") from error
        if sequence < 1:
            raise HttpRefusal(400, f"{kind}: seq_id must be at least 1, not {sequence}")
        return _future(
            self.service.submit(request.state.user, model_id, LoggedRequest(sequence, kind, body, content_type))
        )

    async def unload_model(self, request: Request) -> Response:
        given = await self.parse("unload_model", request)
        self.service.store.check_owner(request.state.user, given.model_id)
        self.service.training.unload(given.model_id)
        return _future(f"{given.model_id}:{UNLOAD}")

    async def get_info(self, request: Request) -> Response:
        given = await self.parse("get_info", request)
        user = request.state.user
        self.service.store.check_owner(user, given.model_id)
        return JSONResponse({"type": "get_info", **self.service.model_info(given.model_id)})

    # Sampling.

    async def create_sampling_session(self, request: Request) -> Response:
        given = await self.parse("create_sampling_session", request)
        sampler_id = self.service.create_sampling_session(request.state.user, given)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def join_sampling_session(self, request: Request) -> Response:
        given = await self.parse("join_sampling_session", request)
        count = self.service.join_sampling_session(request.state.user, given.sampling_session_id)
        return JSONResponse({"type": "join_sampling_session", "client_counter": count})

    async def sample(self, request: Request) -> Response:
        body = await self.read_body(request)
        given, query = await self.compute(_parse_sample, body)
        request_id = self.service.sample(request.state.user, given, query, len(body))
        return _future(request_id, sample_sequence_ids=[f"{request_id}:{i}" for i in range(given.num_samples)])

    async def get_sampler(self, request: Request) -> Response:
        sampler_id = request.path_params["sampler_id"]
        return JSONResponse({"sampler_id": sampler_id, **self.service.read_sampler(request.state.user, sampler_id)})

    async def cancel_future(self, request: Request) -> Response:
        given = await self.parse("retrieve_future", request)
        self.service.check_requester(request.state.user, given.request_id)
        self.service.queue.cancel(given.request_id)
        return Response(status_code=204)

    async def retrieve_future(self, request: Request) -> Response:
        given = await self.parse("retrieve_future", request)
        answer = await self.service.retrieve(request.state.user, given.request_id, LONG_POLL_SECONDS)
        if answer is None:
            waiting = {"type": "try_again", "request_id": given.request_id, "queue_state": "active"}
            return JSONResponse(waiting, status_code=408)
        return Response(answer.body, media_type=answer.content_type)

    # Saved weights.

    async def list_training_runs(self, request: Request) -> Response:
        user, store = request.state.user, self.service.store
        runs = [m for s in store.sessions() if _is_owned(self.service, user, s) for m in reversed(store.models(s))]
        start, end = _page(request)
        described = [self._training_run(user, model_id) for model_id in runs[start:end]]
        return JSONResponse({"training_runs": described, "cursor": _cursor(start, end, len(runs))})

    async def get_training_run(self, request: Request) -> Response:
        model_id, user = request.path_params["model_id"], request.state.user
        self.service.store.check_owner(user, model_id)
        return JSONResponse(self._training_run(user, model_id))

    def _training_run(self, user: str, model_id: str) -> dict[str, Any]:
        info, saved = self.service.model_info(model_id), self.service.store.list_saved(model_id)
        latest = {path.kind: _describe_saved(path, info) for path, info in saved}
        return {
            "training_run_id": model_id,
            "base_model": info["model_data"]["model_name"],
            "model_owner": user,
            "is_lora": info["is_lora"],
            "lora_rank": info["lora_rank"],
            "last_request_time": _time(self.service.training.last_used(model_id)),
            "last_checkpoint": latest.get("weights"),
            "last_sampler_checkpoint": latest.get("sampler_weights"),
            "user_metadata": info["user_metadata"],
        }

    async def list_checkpoints(self, request: Request) -> Response:
        model_id = request.path_params["model_id"]
        self.service.store.check_owner(request.state.user, model_id)
        saved = self.service.store.list_saved(model_id)
        return JSONResponse({"checkpoints": [_describe_saved(*entry) for entry in saved]})

    async def list_all_checkpoints(self, request: Request) -> Response:
        user, store = request.state.user, self.service.store
        models = [m for s in store.sessions() if _is_owned(self.service, user, s) for m in store.models(s)]
        saved = [entry for m in models for entry in store.list_saved(m)]
        start, end = _page(request)
        checkpoints = [_describe_saved(*entry) for entry in saved[start:end]]
        return JSONResponse({"checkpoints": checkpoints, "cursor": _cursor(start, end, len(saved))})

    def _saved_path(self, request: Request) -> SavedPath:
        model_id, kind, name = (request.path_params[key] for key in ("model_id", "kind", "name"))
        path = SavedPath.parse(f"tinker://{model_id}/{kind}/{name}")
        self.service.store.check_owner(request.state.user, model_id)
        self.service.store.find_saved(path)
        return path

    async def delete_checkpoint(self, request: Request) -> Response:
        self.service.store.delete(self._saved_path(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        path = self._saved_path(request)
        given = await self.read_json(request)
        self.service.store.set_expiry(path, compute_expiry(given.get("ttl_seconds")))
        return Response(status_code=204)

    async def external_urls(self, request: Request) -> Response:
        path = self._saved_path(request)
        if path.kind != "external_weights":
            raise HttpRefusal(400, f"{path} is not for other programs: save_weights_external saves what is")
        now, folder, urls = time.time(), self.service.store.find_saved(path), dict[str, str]()
        expires = now + DOWNLOAD_SECONDS
        self.downloads = {token: x for token, x in self.downloads.items() if x[1] > now}
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.name != META:
                token = secrets.token_urlsafe(24)
                self.downloads[token] = (file, expires)
                urls[file.relative_to(folder).as_posix()] = str(
                    request.url_for("download", token=token, name=file.name)
                )
        return JSONResponse({"urls": urls, "expires": _time(expires)})

    async def download(self, request: Request) -> Response:
        file, expires = self.downloads.get(request.path_params["token"], (Path(), 0.0))
        if time.time() > expires or not file.is_file():
            raise HttpRefusal(404, "this address is unknown or has expired: ask for another one")
        return FileResponse(file)

    async def weights_info(self, request: Request) -> Response:
        path = SavedPath.parse(str((await self.read_json(request)).get("tinker_path")))
        self.service.store.check_owner(request.state.user, path.model_id)
        self.service.store.find_saved(path)
        info = self.service.model_info(path.model_id)
        spec = info["adapter"]
        flags = (
            {}
            if spec is None
            else {"train_unembed": spec["head"], "train_mlp": spec["mlp"], "train_attn": spec["attention"]}
        )
        name = info["model_data"]["model_name"]
        return JSONResponse({"base_model": name, "is_lora": info["is_lora"], "lora_rank": info["lora_rank"], **flags})

    # The rest.

    async def client_config(self, request: Request) -> Response:
        return JSONResponse(wire.client_config())

    async def dynamic_config(self, request: Request) -> Response:
        return JSONResponse(wire.dynamic_config())

    async def healthz(self, request: Request) -> Response:
        if self.service.computing is None or self.service.computing.done():
            raise HttpRefusal(500, "nothing is computed any more: start the server again")
        return JSONResponse({"status": "ok"})

    async def telemetry(self, request: Request) -> Response:
        await self.read_body(request)  # not kept
        return JSONResponse({"status": "accepted"})

    async def page(self, request: Request) -> Response:
        page = render_status_page(self.service.status(request.state.user))
        return HTMLResponse(page, headers={"Cache-Control": "no-store"})

    async def not_here(self, request: Request) -> Response:
        # not a 501, after which the SDK would try again for minutes
        raise HttpRefusal(
            400, f"{request.method} {request.url.path} is not available here: docs/serve.md lists what is"
        )


def build_app(config: ServeConfig, service: Service) -> Starlette:
    """Return the application. It starts and stops the service's computing thread."""
    api = Api(config, service)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    return Starlette(routes=_list_routes(api), lifespan=lifespan)


def _list_routes(api: Api) -> list[Route]:
    run = f"{API}/training_runs/{{model_id}}"
    saved = f"{run}/checkpoints/{{kind}}/{{name}}"
    return [  # the first that fits is taken, so that what is asked for most is first
        _route(api, "POST", f"{API}/asample", api.sample),
        _route(api, "POST", f"{API}/retrieve_future", api.retrieve_future),
        _route(api, "GET", "/", api.page),
        _route(api, "GET", f"{API}/healthz", api.healthz, is_open=True),
        _route(api, "GET", f"{API}/get_server_capabilities", api.capabilities),
        _route(api, "POST", f"{API}/client/config", api.client_config),
        _route(api, "POST", f"{API}/client/dynamic_config", api.dynamic_config),
        _route(api, "POST", f"{API}/telemetry", api.telemetry),
        _route(api, "POST", f"{API}/create_session", api.create_session),
        _route(api, "POST", f"{API}/session_heartbeat", api.heartbeat),
        _route(api, "GET", f"{API}/sessions", api.list_sessions),
        _route(api, "GET", f"{API}/sessions/{{session_id}}", api.get_session),
        _route(api, "POST", f"{API}/sessions/{{session_id}}/finish", api.finish_session),
        _route(api, "POST", f"{API}/create_model", api.create_model),
        _route(api, "POST", f"{API}/load_weights", api.load_weights),
        _route(api, "POST", f"{API}/forward_backward", api.forward_backward),
        _route(api, "POST", f"{API}/forward", api.forward),
        *(_route(api, "POST", f"{API}/{kind}", api.train) for kind in TRAINING),
        _route(api, "POST", f"{API}/unload_model", api.unload_model),
        _route(api, "POST", f"{API}/get_info", api.get_info),
        _route(api, "POST", f"{API}/create_sampling_session", api.create_sampling_session),
        _route(api, "POST", f"{API}/join_sampling_session", api.join_sampling_session),
        _route(api, "GET", f"{API}/samplers/{{sampler_id}}", api.get_sampler),
        _route(api, "POST", f"{API}/cancel_future", api.cancel_future),
        _route(api, "GET", f"{API}/training_runs", api.list_training_runs),
        _route(api, "GET", run, api.get_training_run),
        _route(api, "GET", f"{run}/checkpoints", api.list_checkpoints),
        _route(api, "GET", f"{API}/checkpoints", api.list_all_checkpoints),
        _route(api, "DELETE", saved, api.delete_checkpoint),
        _route(api, "PUT", f"{saved}/ttl", api.set_ttl),
        _route(api, "GET", f"{saved}/external_weights_urls", api.external_urls),
        _route(api, "GET", "/files/{token}/{name}", api.download, is_open=True),
        _route(api, "POST", f"{API}/weights_info", api.weights_info),
        *(_route(api, method, "/api/{rest:path}", api.not_here) for method in ("GET", "POST", "PUT", "DELETE")),
    ]


def _route(
    api: Api, method: str, path: str, handler: Callable[[Request], Awaitable[Response]], *, is_open: bool = False
) -> Route:
    """Return a route whose errors become answers. `is_open`: no API key is needed."""

    async def answer(request: Request) -> Response:
        try:
            request.state.user = "" if is_open else api.authenticate(request)
            return await handler(request)
        except Exception as error:  # the client gets it, and the server goes on
            return _answer_error(error, path, api.service.note)

    return Route(path, answer, methods=[method], name=handler.__name__)


def _answer_error(error: Exception, path: str, note: Callable[[str], object]) -> Response:
    """Return the answer to a request that failed; `note` gets what the server's owner has to know."""
    match error:
        case HttpRefusal():
            return _error(error.status, str(error))
        case UnknownIdError():
            return _error(404, str(error))
        case LostRequestError():
            return _error(410, str(error))
        case BusyError():
            return _error(429, str(error))
        case ClientDisconnect():  # nobody reads an answer
            return Response(status_code=400)
        case PolicygradError():
            return _error(400, str(error))
        case OSError():
            note(f"{path}: {error}")
            if is_disk_full(error):
                return _error(
                    507, f"the disk of the server's folder is full ({error.strerror}): try again when there is room"
                )
            return _error(500, f"the server cannot read or write its folder: {error}")
        case _:
            note(f"{path}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
            return _error(500, f"{type(error).__name__}: {error} (a bug of the server)")


def make_server(config: ServeConfig, app: Any, log_level: str = "warning") -> uvicorn.Server:
    """Return the server of an application, with limits on what it accepts."""
    limits = HttpLimits.for_this_machine(body_bytes=MAX_BODY, total_body_bytes=MAX_TOTAL_BODY)
    hosts = None if config.api_keys else host_names(config.host)
    options = limits.server_options()
    return uvicorn.Server(
        uvicorn.Config(limit_app(app, limits, hosts), log_level=log_level, access_log=False, **options)
    )


def _unpack(body: bytes, hold: Callable[[int], None]) -> bytes:
    """Unpack zstd. Raises HttpRefusal for what cannot be unpacked, or is too large."""
    import zstandard

    parts = list[bytes]()
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            while part := reader.read(2**20):
                hold(len(part))
                parts.append(part)
    except zstandard.ZstdError as error:
        raise HttpRefusal(400, f"the request cannot be unpacked: {error}") from error
    return b"".join(parts)


def _parse_sample(body: bytes) -> tuple[Any, SampleQuery]:
    given = wire.parse("asample", body)
    return given, wire.parse_sample(given)


def hash_key(key: str) -> str:
    """Return the name of a key's user."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _describe_saved(path: SavedPath, info: SavedInfo) -> dict[str, Any]:
    """Return what the API tells of saved weights."""
    kinds = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": kinds[path.kind],
        "time": _time(info.created),
        "tinker_path": str(path),
        "size_bytes": info.size,
        "public": False,
        "user_metadata": info.user_metadata,
        "expires_at": None if info.expires is None else _time(info.expires),
    }


def _error(status: int, text: str) -> Response:
    text = text.encode(errors="backslashreplace").decode()  # a client's text may have half of a character
    return JSONResponse({"detail": text, "error": text}, status_code=status)


def _future(request_id: str, **values: Any) -> Response:
    return JSONResponse({"request_id": request_id, **values})


def _is_owned(service: Service, user: str, session_id: str) -> bool:
    with contextlib.suppress(UnknownIdError):
        service.store.read_session(user, session_id)
        return True
    return False


def _page(request: Request) -> tuple[int, int]:
    try:
        start = max(0, int(request.query_params.get("offset", 0)))
        return start, start + max(0, min(1000, int(request.query_params.get("limit", 20))))
    except ValueError as error:
        raise ConfigError(f"limit and offset must be whole numbers ({error})") from error


def _cursor(start: int, end: int, total: int) -> dict[str, int]:
    return {"offset": start, "limit": end - start, "total_count": total}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
