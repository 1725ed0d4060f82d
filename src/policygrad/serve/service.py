"""The service behind the server: sessions, models and samplers by their ids, and one thread that computes what they ask for.

A request is written to the folder before it is accepted (`Store`). Each model computes its requests in their order; models and
sampling take turns. What a model computed is written too, so that a client may ask again, also after a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import traceback
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from policygrad.checkpoint.format import load_latest, save_checkpoint
from policygrad.checkpoint.model_export import write_model
from policygrad.errors import ConfigError, DataError, ModelError, NumericsError, PolicygradError
from policygrad.models.adapters import ADAPTER_WEIGHTS
from policygrad.models.loading import resolve_model
from policygrad.samplers.config import LOCAL
from policygrad.serve import wire
from policygrad.serve.adapters import Adapter, AdapterSpec, write_adapter
from policygrad.serve.config import ServeConfig
from policygrad.serve.custom_loss import CustomLoss, build_custom_loss
from policygrad.serve.models import Network, TrainedModel, load_network
from policygrad.serve.page import Status, format_seconds, is_heard, summarise
from policygrad.serve.sampling import EngineAnswers, LocalAnswers, SampleQuery, WholeWeights
from policygrad.serve.store import LoggedRequest, SavedInfo, SavedPath, Store, UnknownIdError
from policygrad.training.trainer import limit_torch_threads
from policygrad.utils.filesystem import hold_lock

GATHER_SECONDS = 0.01
"""A sampling request waits this long for others, so that they are decoded together."""
MAX_GATHER_SECONDS = 0.5
MAX_SAMPLE_RESULTS = 8192
"""Answers to sampling requests that are kept for clients that have not fetched them."""
WHOLE_WEIGHTS = "model.safetensors"
WeightsT = TypeVar("WeightsT", Adapter, WholeWeights)


class GoneError(DataError):
    """A sampling request that a restart has lost: the client sends it again."""


@dataclass(frozen=True)
class Answer:
    """What a client gets."""

    content_type: str
    body: bytes


@dataclass(eq=False)
class Lane:
    """A model's requests, in the order of their numbers."""

    model_id: str
    next: int
    """Number of the request to compute next."""
    waiting: dict[int, LoggedRequest] = field(default_factory=dict)
    model: TrainedModel | None = None
    """None: on the disk, or not created yet."""
    failed: str = ""
    """Why a forward_backward failed whose gradient the next optimizer step would miss."""
    chunks: list[Any] = field(default_factory=list)
    """Requests of which only the first ones have arrived (`wire.DATUM_COUNT`)."""
    unsaved_seconds: float = 0.0
    """Work that a restart would repeat."""
    last_used: float = 0.0
    activity: str = ""

    @property
    def is_ready(self) -> bool:
        return self.next in self.waiting


@dataclass(frozen=True, eq=False)
class QueuedSample:
    """A sampling request that waits."""

    request_id: str
    session: str
    """The sampling session, among which turns are taken."""
    query: SampleQuery
    source: Mapping[str, str]
    """{"base_model": …} or {"model_path": …}."""


class Service:
    """Everything but HTTP. Its methods are called in the event loop, except those that compute."""

    def __init__(self, config: ServeConfig, note: Callable[[str], None] = lambda text: None) -> None:
        """Load the models, and continue what a server before this one has left in the folder.

        Raises:
            ModelError: A model that cannot be loaded.
            RunError: Another server uses the folder.
        """
        self.config, self.note = config, note
        self.store = Store(config.folder.resolve())
        self.resources = ExitStack()
        self.resources.enter_context(hold_lock(self.store.folder / ".lock"))
        self.networks: dict[str, Network] = {}
        for name, path in config.models:
            note(f"loading {name}")
            self.networks[name] = load_network(
                name, path, config.learner, adaptable=True, trust_remote_code=config.trust_remote_code
            )
        self.samplers = {name: self._make_answers(x) for name, x in self.networks.items()}
        self.whole_samplers: OrderedDict[str, LocalAnswers] = OrderedDict()
        self.sampler_weights: OrderedDict[str, Adapter | WholeWeights] = OrderedDict()
        self.lanes: dict[str, Lane] = {}
        self.custom: dict[str, CustomLoss] = {}
        self.sample_queue: deque[QueuedSample] = deque()
        self.sample_results: OrderedDict[str, Answer | None] = OrderedDict()  # None: not computed yet
        self.cancelled: set[str] = set()
        self.heartbeats: dict[str, float] = {}
        self.users: dict[str, str] = {}  # by session
        self.sampler_sources: dict[str, Mapping[str, str]] = {}  # by sampling session
        self.waiters: dict[str, list[asyncio.Future[None]]] = {}
        self.counts = {"requests": 0, "updates": 0, "tokens_sampled": 0, "tokens_trained": 0}
        self.ready: deque[str] = deque()  # models, and SAMPLING, that have something to compute
        self.condition = threading.Condition()
        self.stopping = False
        self.last_sample = self.first_sample = 0.0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.started, self.url = time.time(), f"http://{config.host}:{config.port}"
        self.thread = threading.Thread(target=self._work, name="serve", daemon=True)

    def _make_answers(self, network: Network) -> LocalAnswers:
        """Return what samples for a base model: this process, or servers of an engine."""
        if self.config.sampler.engine == LOCAL:
            return LocalAnswers(network, self.config.decode_rows)
        return EngineAnswers(
            self._load_whole(network.name, network.path),
            self.config.decode_rows,
            base=network,
            config=self.config.sampler,
            folder=self.store.folder,
            note=self.note,
        )

    def start(self) -> None:
        """Begin to compute; called in the event loop."""
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        """Finish the request that is being computed, and write the state of all models. Stopping twice is no error."""
        with self.condition:
            if self.stopping:
                return
            self.stopping = True
            self.condition.notify_all()
        if self.thread.is_alive():
            self.thread.join()
        for lane in self.lanes.values():
            self._save_state(lane)
        for answers in self.samplers.values():
            if isinstance(answers, EngineAnswers):
                answers.close()
        self.resources.close()

    # Sessions.

    def create_session(self, user: str, request: Any) -> str:
        """Return the id of a new session."""
        session_id = uuid.uuid4().hex[:20]
        values = {
            "user": user,
            "created": time.time(),
            "tags": request.tags,
            "user_metadata": request.user_metadata,
            "display_name": request.display_name,
        }
        self.store.create_session(session_id, values)
        self.heartbeats[session_id] = time.time()
        return session_id

    def read_session(self, user: str, session_id: str) -> dict[str, Any]:
        """Return a session's values. Raises UnknownIdError if it is another user's."""
        values = self.store.read(self.store.session(session_id) / "session.json", f"session {session_id!r}")
        if values["user"] != user:
            raise UnknownIdError(f"there is no session {session_id!r}")
        return values

    def finish_session(self, user: str, session_id: str) -> None:
        """Write the states of a session's models, and free their memory."""
        values = self.read_session(user, session_id)
        self.store.write(self.store.session(session_id) / "session.json", values | {"finished": time.time()})
        self.heartbeats.pop(session_id, None)

    def owned(self, user: str, full_id: str) -> None:
        """Raise UnknownIdError unless an id SESSION:… is this user's."""
        session_id = full_id.partition(":")[0]
        if self.users.get(session_id) != user:
            self.read_session(user, session_id)
            self.users[session_id] = user

    # Models.

    def create_model(self, user: str, request: Any, body: bytes) -> str:
        """Accept a request for a new model, and return its request id."""
        values = self.read_session(user, request.session_id)
        if "finished" in values:
            raise ConfigError(f"the session {request.session_id} is finished: open another")
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        self.submit(user, model_id, LoggedRequest(0, "create_model", body, wire.JSON))
        return f"{model_id}:0"

    def load_new_model(self, user: str, request: Any, body: bytes) -> str:
        """Accept a request for a new model from saved weights, and return its request id."""
        self.read_session(user, request.session_id)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        self.submit(user, model_id, LoggedRequest(0, "load_weights", body, wire.JSON))
        return f"{model_id}:0"

    def submit(self, user: str, model_id: str, request: LoggedRequest) -> str:
        """Accept a request of a model and return its id. One that was accepted before is not accepted again."""
        self.owned(user, model_id)
        lane = self._lane(model_id)
        if request.sequence and lane.next == 0 and 0 not in lane.waiting:
            raise UnknownIdError(f"there is no model {model_id!r}")
        with self.condition:
            if request.sequence >= lane.next and request.sequence not in lane.waiting:
                self.store.log_request(model_id, request)
                lane.waiting[request.sequence] = request
                self.counts["requests"] += 1
            self._wake(lane)
        return f"{model_id}:{request.sequence}"

    def _lane(self, model_id: str) -> Lane:
        """Return a model's lane, with what a server before this one has left to do."""
        if model_id not in self.lanes:
            self.store.model(model_id)
            lane = Lane(model_id, self._next_request(model_id))
            for request in self.store.read_requests(model_id):
                if request.sequence >= lane.next:
                    lane.waiting[request.sequence] = request
            self.lanes[model_id] = lane
            with self.condition:
                self._wake(lane)
        return self.lanes[model_id]

    def _next_request(self, model_id: str) -> int:
        steps = [int(p.name[5:]) for p in (self.store.model(model_id) / "state").glob("step-*") if p.name[5:].isdigit()]
        return max(steps) + 1 if steps else 0

    def _wake(self, lane: Lane) -> None:
        if lane.is_ready and lane.model_id not in self.ready:
            self.ready.append(lane.model_id)
        self.condition.notify_all()

    def next_free(self, model_id: str) -> int:
        """Return the number after a model's last request."""
        lane = self._lane(model_id)
        return max([lane.next, *(n + 1 for n in lane.waiting)])

    def last_used(self, model_id: str) -> float:
        """Return when a model last computed something, in seconds since 1970."""
        lane = self.lanes.get(model_id)
        return lane.last_used if lane and lane.last_used else self.store.model(model_id).stat().st_mtime

    def model_info(self, model_id: str) -> dict[str, Any]:
        """Return what get_info tells, and the adapter's specification. Raises UnknownIdError if there is no such model."""
        created = self.store.read(self.store.model(model_id) / "model.json", f"model {model_id!r}")
        name, spec = created["base_model"], created["adapter"]
        network = self.networks.get(name)
        return {
            "model_id": model_id,
            "model_name": name,
            "model_data": {
                "arch": None if network is None else type(network.model).__name__,
                "model_name": name,
                "tokenizer_id": name if network is None else _tokenizer_id(network),
            },
            "is_lora": spec is not None,
            "lora_rank": None if spec is None else spec["rank"],
            "adapter": spec,
            "user_metadata": created["user_metadata"],
        }

    def status(self) -> Status:
        """Return what is shown on the page and the terminal."""
        bases = [
            {
                "name": name,
                "parameters": f"{sum(p.numel() for p in x.model.parameters()) / 1e6:.2f}M",
                "context": x.context_length or "unknown",
                "device": f"{x.device}, {x.config.dtype}",
            }
            for name, x in self.networks.items()
        ]
        sessions = list[dict[str, Any]]()
        for session_id, last in self.heartbeats.items():
            if is_heard(last):
                values = self.store.read(self.store.session(session_id) / "session.json", session_id)
                own = sum(m.startswith(f"{session_id}:") for m in self.lanes)
                heard = f"{format_seconds(time.time() - last)} ago"
                sessions.append({"id": session_id, "name": values["display_name"] or "", "heard": heard, "models": own})
        lanes = [lane for lane in self.lanes.values() if lane.model is not None or lane.waiting]
        models = [
            {
                "id": lane.model_id,
                "base": "" if lane.model is None else lane.model.network.name,
                "trains": "" if lane.model is None else _describe_trained(lane.model),
                "updates": "" if lane.model is None else lane.model.optimizer.num_updates,
                "waiting": len(lane.waiting),
                "now": lane.activity,
            }
            for lane in lanes
        ]
        up = format_seconds(time.time() - self.started)
        return Status(self.url, up, summarise(self.counts, len(self.sample_queue)), bases, sessions, models)

    # Sampling.

    def create_sampling_session(self, user: str, request: Any) -> str:
        """Return the id of a session that samples from saved weights, or from a model as it was loaded."""
        self.read_session(user, request.session_id)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        source = (
            {"base_model": request.base_model} if request.model_path is None else {"model_path": request.model_path}
        )
        self._check_source(user, source)
        self.store.write(self.store.sampling_session(sampler_id), source)
        return sampler_id

    def _check_source(self, user: str, source: Mapping[str, str | None]) -> str:
        """Return the name of the base model that a source samples with. Raises for a source that does not exist."""
        if (path := source.get("model_path")) is not None:
            saved = SavedPath.parse(path)
            self.owned(user, saved.model_id)
            if saved.kind != "sampler_weights":
                raise ConfigError(f"{path} is not for sampling: save_weights_for_sampler saves what is")
            return str(self.store.read(self.store.saved(saved) / "weights.json", path)["base_model"])
        name = source.get("base_model")
        if name not in self.networks:
            raise ConfigError(f"there is no model {name!r} here: {', '.join(self.networks)}")
        return str(name)

    def read_sampler(self, user: str, sampler_id: str) -> dict[str, str]:
        """Return what a sampling session samples from, and its base model."""
        self.owned(user, sampler_id)
        source = self.store.read(self.store.sampling_session(sampler_id), f"sampling session {sampler_id!r}")
        return {**source, "base_model": self._check_source(user, source)}

    def join_sampling_session(self, user: str, sampler_id: str) -> int:
        """Return a number for another client of a sampling session, whose requests then have numbers of their own."""
        self.owned(user, sampler_id)
        path = self.store.sampling_session(sampler_id)
        source = self.store.read(path, f"sampling session {sampler_id!r}")
        count = int(source.get("clients", 0)) + 1
        self.store.write(path, {**source, "clients": count})
        return count

    def sample(self, user: str, request: Any) -> tuple[str, int]:
        """Accept a sampling request; return its id and the number of samples."""
        if request.sampling_session_id is not None:
            sampler_id, number = request.sampling_session_id, request.seq_id or 0
            self.owned(user, sampler_id)
            if sampler_id not in self.sampler_sources:
                self.sampler_sources[sampler_id] = self.read_sampler(user, sampler_id)
            source = self.sampler_sources[sampler_id]
        else:
            sampler_id, number = f"{user}:{uuid.uuid4().hex}", 0
            given = {"base_model": request.base_model, "model_path": request.model_path}
            source = {"base_model": self._check_source(user, given)}
            if request.model_path is not None:
                source["model_path"] = request.model_path
        request_id = f"{sampler_id}:{number}"
        seed = int.from_bytes(hashlib.sha256(sampler_id.partition(":")[2].encode()).digest()[:6], "big")
        query = wire.parse_sample(request, (seed, number))
        with self.condition:
            if request_id not in self.sample_results:
                self.sample_results[request_id] = None
                self.sample_queue.append(QueuedSample(request_id, sampler_id, query, source))
                self.last_sample = time.monotonic()
                if SAMPLING not in self.ready:
                    self.first_sample = self.last_sample
                    self.ready.append(SAMPLING)
                self.counts["requests"] += 1
            self.condition.notify_all()
        return request_id, request.num_samples

    def cancel(self, request_id: str) -> None:
        """Leave out a sampling request that has not begun."""
        with self.condition:
            if request_id in self.sample_results and self.sample_results[request_id] is None:
                self.cancelled.add(request_id)

    # Results.

    async def retrieve(self, user: str, request_id: str, seconds: float) -> Answer | None:
        """Return a result; None if it is not there after so many seconds.

        Raises:
            UnknownIdError: No such request.
            GoneError: A sampling request that a restart has lost.
        """
        end = time.monotonic() + seconds
        while True:
            future = asyncio.get_running_loop().create_future()
            self.waiters.setdefault(request_id, []).append(future)
            try:
                if (answer := self._find_result(user, request_id)) is not None:
                    return answer
                await asyncio.wait_for(future, max(0.0, end - time.monotonic()))
            except TimeoutError:
                return None
            finally:
                waiting = self.waiters.get(request_id, [])
                if future in waiting:
                    waiting.remove(future)
                if not waiting:
                    self.waiters.pop(request_id, None)

    def _find_result(self, user: str, request_id: str) -> Answer | None:
        owner, _, number = request_id.rpartition(":")
        if ":train:" in owner and number.isdigit():
            self.owned(user, owner)
            if (found := self.store.read_result(owner, int(number))) is not None:
                return Answer(*found)
            lane = self._lane(owner)
            if int(number) not in lane.waiting and not self.store.has_request(owner, int(number)):
                raise UnknownIdError(f"there is no request {request_id!r}")
            return None
        if ":loss:" in request_id:
            self.owned(user, request_id)
            self.store.read(self.store.loss(request_id), f"loss {request_id!r}")
            return Answer(wire.JSON, wire.format_json(type="create_custom_loss", loss_id=request_id))
        if request_id in self.sample_results:
            if not request_id.startswith(f"{user}:"):
                self.owned(user, owner)
            return self.sample_results[request_id]
        raise GoneError(f"the sampling request {request_id!r} was lost when the server started again: send it again")

    def _announce(self, request_id: str) -> None:
        """Wake those who wait for a result; called by the computing thread."""

        def wake() -> None:
            for future in self.waiters.get(request_id, []):
                if not future.done():
                    future.set_result(None)

        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(wake)

    # The thread that computes.

    def _work(self) -> None:
        largest = max((x.model for x in self.networks.values()), key=lambda m: sum(p.numel() for p in m.parameters()))
        with limit_torch_threads(largest):
            self._take_turns()

    def _take_turns(self) -> None:
        while (turn := self._next_turn()) is not None:
            if turn == SAMPLING:
                self._answer_samples(self._take_samples())
                continue
            lane = self.lanes[turn]
            request = lane.waiting[lane.next]
            lane.activity = request.kind
            self._compute(lane, request)
            with self.condition:
                lane.activity = ""
                lane.waiting.pop(lane.next)
                lane.next += 1
                self._wake(lane)

    def _next_turn(self) -> str | None:
        """Return whose turn it is, a model's id or SAMPLING; wait until there is something to compute. None: stop."""
        with self.condition:
            while not self.stopping:
                if not self.ready:
                    self.condition.wait()
                    continue
                if self.ready[0] == SAMPLING and len(self.ready) == 1:  # nothing else to do meanwhile
                    now = time.monotonic()
                    wait = min(self.last_sample + GATHER_SECONDS, self.first_sample + MAX_GATHER_SECONDS) - now
                    if wait > 0 and not self.config.reproducible:
                        self.condition.wait(wait)
                        continue
                return self.ready.popleft()
            return None

    def _compute(self, lane: Lane, request: LoggedRequest) -> None:
        """Compute a model's request and write its result."""
        request_id, started = f"{lane.model_id}:{request.sequence}", time.perf_counter()
        lane.last_used = time.time()
        try:
            answer = COMPUTE[request.kind](self, lane, request)
        except PolicygradError as error:
            answer = Answer(wire.JSON, wire.format_failure(str(error), is_users=not isinstance(error, NumericsError)))
        except torch.OutOfMemoryError as error:
            text = f"out of memory: send fewer or shorter data, or start the server with a smaller --learner.micro-tokens ({error})"
            answer = Answer(wire.JSON, wire.format_failure(text, is_users=False))
        except Exception as error:  # a bug must not end the server; the client and the log get it
            self.note(f"{request_id}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
            text = f"{type(error).__name__}: {error} (a bug of the server)"
            answer = Answer(wire.JSON, wire.format_failure(text, is_users=False))
        if answer is None:  # a part of a request, whose rest has not arrived
            return
        if self.store.read_result(lane.model_id, request.sequence) is None:  # else it was answered before a restart
            self.store.write_result(lane.model_id, request.sequence, answer.content_type, answer.body)
        lane.unsaved_seconds += time.perf_counter() - started
        if lane.model is not None and lane.model.pending == 0 and lane.unsaved_seconds > self.config.replay_seconds:
            self._save_state(lane, after=request.sequence)
        self._announce(request_id)

    # State.

    def _save_state(self, lane: Lane, after: int | None = None) -> bool:
        """Write a model's state, unless a gradient is pending, which no state contains."""
        if lane.model is None or lane.model.pending or lane.chunks or lane.failed or not lane.unsaved_seconds:
            return lane.model is not None and not lane.unsaved_seconds
        sequence = lane.next - 1 if after is None else after
        if sequence < 0:
            return False
        tensors, values = lane.model.state()
        self.store.save_state(lane.model_id, sequence, tensors, {**values, **_describe(lane.model)})
        lane.unsaved_seconds = 0.0
        return True

    def _model(self, lane: Lane) -> TrainedModel:
        """Return a model, from the disk if it is there."""
        if lane.model is None:
            saved = self.store.load_state(lane.model_id)
            if saved is None or saved[0] != lane.next - 1:
                raise ModelError(f"the model {lane.model_id} was not created, or its state is lost: create it again")
            lane.model = self._build(saved[2])
            lane.model.restore(saved[1], saved[2])
            self._make_room(lane)
        return lane.model

    def _build(self, values: Mapping[str, Any]) -> TrainedModel:
        """Return a model as described in a state: the base model's name, and its adapter's specification."""
        name, spec = values["base_model"], values["adapter"]
        if name not in self.networks:
            raise ConfigError(f"there is no model {name!r} here: start the server with --model {name}")
        if spec is not None:
            return TrainedModel.with_adapter(self.networks[name], AdapterSpec(**spec))
        path = self.networks[name].path
        return TrainedModel(self._load_whole(name, path), None)

    def _load_whole(self, name: str, path: str) -> Network:
        return load_network(
            name, path, self.config.learner, adaptable=False, trust_remote_code=self.config.trust_remote_code
        )

    def _make_room(self, keep: Lane) -> None:
        """Write idle models to the disk until at most `max_models` are in memory."""
        with self.condition:
            idle = [
                lane for lane in self.lanes.values() if lane.model is not None and lane is not keep and not lane.waiting
            ]
        excess = sum(lane.model is not None for lane in self.lanes.values()) - self.config.max_models
        for lane in sorted(idle, key=lambda lane: lane.last_used)[: max(0, excess)]:
            if self._save_state(lane):
                lane.model = None

    # What each kind of training request computes.

    def _create_model(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("create_model", request.body)
        spec = wire.parse_adapter(values)
        lane.model = self._build({"base_model": values.base_model, "adapter": None if spec is None else asdict(spec)})
        self._created(lane, request.sequence, values.user_metadata)
        return Answer(wire.JSON, wire.format_json(type="create_model", model_id=lane.model_id))

    def _created(self, lane: Lane, sequence: int | None, user_metadata: Any) -> None:
        """Write what a new model is, and its state if that is after a request: a random seed is part of it."""
        assert lane.model is not None
        values = {**_describe(lane.model), "user_metadata": user_metadata}
        self.store.write(self.store.model(lane.model_id) / "model.json", values)
        self._make_room(lane)
        if sequence is not None:
            lane.unsaved_seconds += 1e-9
            self._save_state(lane, after=sequence)

    def _run_pass(self, lane: Lane, request: LoggedRequest) -> Answer | None:
        model, backward = self._model(lane), True
        try:
            given = wire.parse_pass(request.body, request.content_type)
            backward, config = given.backward, dict(given.config)
            expected = config.pop(wire.DATUM_COUNT, None)
            lane.chunks.append((request.sequence, given))
            total = sum(len(part.data) for _, part in lane.chunks)
            if expected is not None and total < float(expected):
                return None
            chunks, lane.chunks = lane.chunks, []
            data = [datum for _, part in chunks for datum in part.data]
            result = model.run(data, given.loss, config, self.custom_losses(lane.model_id), backward=backward)
        except Exception as error:
            if backward:  # part of the gradient may have been added, and a step must not be taken with it
                model.clear_gradient()
                lane.failed, lane.chunks = str(error), []
            raise
        self.counts["tokens_trained"] += sum(len(d.tokens) for d in data)
        for sequence, part in chunks:  # each part gets its own log-probabilities; the metrics go with the last
            own, rest = result.logprobs[: len(part.data)], result.logprobs[len(part.data) :]
            result = type(result)(rest, result.metrics)
            is_last = sequence == request.sequence
            metrics = result.metrics if is_last else dict.fromkeys(result.metrics, 0.0)
            answer = Answer(wire.PROTOBUF, wire.format_pass(type(result)(own, metrics)))
            if not is_last:
                self.store.write_result(lane.model_id, sequence, answer.content_type, answer.body)
                self._announce(f"{lane.model_id}:{sequence}")
        return answer

    def custom_losses(self, model_id: str) -> Mapping[str, CustomLoss]:
        """Return the losses that a model's session has uploaded, by their id."""
        session_id = model_id.partition(":")[0]
        folder = self.store.session(session_id) / "loss"
        for path in folder.glob("*.json") if folder.is_dir() else []:
            loss_id = f"{session_id}:loss:{path.stem}"
            if loss_id not in self.custom:
                values = self.store.read(path, f"loss {loss_id!r}")
                self.custom[loss_id] = build_custom_loss(
                    values["name"], values["inputs"], values["nodes"], values["format"]
                )
        return {name: loss for name, loss in self.custom.items() if name.startswith(f"{session_id}:")}

    def create_custom_loss(self, user: str, request: Any) -> str:
        """Check and keep an uploaded loss; return its id, which is the request's too."""
        self.read_session(user, request.session_id)
        inputs = [(x.name, x.rank) for x in request.inputs]
        nodes = [node.model_dump() for node in request.graph.nodes]
        loss = build_custom_loss(request.name, inputs, nodes, request.graph.format)
        loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
        values = {"name": request.name, "inputs": inputs, "nodes": nodes, "format": request.graph.format}
        self.store.write(self.store.loss(loss_id), values)
        self.custom[loss_id] = loss
        return loss_id

    def _optim_step(self, lane: Lane, request: LoggedRequest) -> Answer:
        if lane.failed:
            why, lane.failed = lane.failed, ""
            raise ConfigError(f"no step was taken, because a forward_backward before it failed: {why}")
        model = self._model(lane)
        metrics = model.step(wire.parse_adam(wire.parse("optim_step", request.body)))
        self.counts["updates"] += 1
        return Answer(wire.JSON, wire.format_json(metrics=metrics))

    def _unload_model(self, lane: Lane, request: LoggedRequest) -> Answer:
        lane.unsaved_seconds += 1e-9
        if self._save_state(lane, after=request.sequence):
            lane.model = None
        return Answer(wire.JSON, wire.format_json(type="unload_model", model_id=lane.model_id))

    def _save_weights(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("save_weights", request.body)
        model = self._model(lane)
        path = SavedPath(lane.model_id, "weights", values.path or f"{request.sequence:06d}")
        if not self.store.check_name(path, request.sequence, overwrite=values.overwrite):
            folder = self.store.temporary(path)
            if model.pending:
                raise ConfigError("a gradient is pending, which a checkpoint does not contain: call optim_step first")
            tensors, state = model.state()
            save_checkpoint(
                folder / "state", model.optimizer.num_updates, tensors, {**state, **_describe(model)}, keep=1
            )
            self.store.install(path, folder, _saved_info(request, values))
        return Answer(wire.JSON, wire.format_json(type="save_weights", path=str(path)))

    def _save_for_sampler(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("save_weights_for_sampler", request.body)
        if values.kind != "snapshot":
            raise ConfigError(
                f"kind={values.kind!r} is not available here: a snapshot's weights are those of every token, and are loaded at once"
            )
        is_temporary = values.path is None
        path = SavedPath(lane.model_id, "sampler_weights", values.path or f"sampler-{request.sequence:06d}")
        if not self.store.check_name(path, request.sequence, overwrite=False):
            self._write_sampler(path, self._model(lane), _saved_info(request, values, is_temporary=is_temporary))
        if not is_temporary:
            return Answer(wire.JSON, wire.format_json(type="save_weights_for_sampler", path=str(path)))
        self.store.prune_temporary(lane.model_id, self.config.keep_samplers)
        session_id = lane.model_id.partition(":")[0]
        sampler_id = f"{session_id}:sample:{values.sampling_session_seq_id}"
        self.store.write(self.store.sampling_session(sampler_id), {"model_path": str(path)})
        return Answer(
            wire.JSON, wire.format_json(type="save_weights_for_sampler", path=None, sampling_session_id=sampler_id)
        )

    def _write_sampler(self, path: SavedPath, model: TrainedModel, info: SavedInfo) -> None:
        folder = self.store.temporary(path)
        if model.adapter is not None:
            write_adapter(folder, model.adapter, model.network.path)
        else:
            save_file(_own_tensors(model.network), folder / WHOLE_WEIGHTS, metadata={"format": "pt"})
        self.store.write(folder / "weights.json", _describe(model))
        self.store.install(path, folder, info)
        answers = self.samplers[model.network.name]
        if isinstance(answers, EngineAnswers):
            answers.publish(self._weights_for({"base_model": model.network.name, "model_path": str(path)})[1])

    def _save_external(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("save_weights_external", request.body)
        if values.age_encryption_recipients:
            raise ConfigError(
                "age_encryption_recipients is not available here: encrypt the files after downloading them"
            )
        model = self._model(lane)
        path = SavedPath(lane.model_id, "external_weights", values.path)
        if not self.store.check_name(path, request.sequence, overwrite=False):
            folder = self.store.temporary(path)
            network = model.network
            if model.adapter is not None:
                write_adapter(folder, model.adapter, network.path)
                network.tokenizer.hf.save_pretrained(folder)
            else:
                folder.rmdir()
                write_model(folder, network.model, network.tokenizer.hf)
            self.store.install(path, folder, _saved_info(request, values))
        size = self.store.saved_info(path).size
        return Answer(wire.JSON, wire.format_json(type="save_weights_external", path=str(path), size_bytes=size))

    def _load_weights(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("load_weights", request.body)
        path = SavedPath.parse(values.path)
        user = self.store.read(self.store.session(lane.model_id.partition(":")[0]) / "session.json", "session")["user"]
        self.owned(user, path.model_id)
        if path.kind != "weights":
            raise ConfigError(f"{path} is not for training: save_state saves what is")
        saved = load_latest(self.store.saved(path) / "state", warn=lambda text: None)
        if saved is None:
            raise ModelError(f"{path} cannot be read: its files are damaged")
        if request.sequence == 0:
            if values.base_model not in (None, saved.state["base_model"]):
                raise ConfigError(
                    f"{path} was trained from {saved.state['base_model']!r}, which base_model={values.base_model!r} is not"
                )
            lane.model = self._build(saved.state)
            self._created(lane, None, values.user_metadata)
        model = self._model(lane)
        if _describe(model) | {"seed": 0} != {k: saved.state[k] for k in ("base_model", "adapter")} | {"seed": 0}:
            own, theirs = (dict(x["adapter"] or {}, seed=0) for x in (_describe(model), saved.state))
            if own != theirs or model.network.name != saved.state["base_model"]:
                raise ConfigError(
                    f"{path} has another base model or adapter than this one: create a client from it instead"
                )
        model.restore(saved.tensors, saved.state, optimizer=values.optimizer)
        lane.failed = ""
        lane.unsaved_seconds += 1e-9  # the checkpoint may be gone when a restart would read it again
        self._save_state(lane, after=request.sequence)
        return Answer(wire.JSON, wire.format_json(type="load_weights", path=str(path), model_id=lane.model_id))

    # Sampling, in the computing thread.

    def _take_samples(self) -> list[QueuedSample]:
        """Take requests of all sampling sessions in turn, as many as are decoded at a time."""
        with self.condition:
            by_session: OrderedDict[str, deque[QueuedSample]] = OrderedDict()
            for item in self.sample_queue:
                by_session.setdefault(item.session, deque()).append(item)
            taken, rows = list[QueuedSample](), 0
            limit = 1 if self.config.reproducible else self.config.decode_rows
            while by_session and (not taken or rows < limit):
                for session in list(by_session):
                    item = by_session[session].popleft()
                    taken.append(item)
                    rows += item.query.num_samples
                    if not by_session[session]:
                        del by_session[session]
                    if rows >= limit:
                        break
            ids = {item.request_id for item in taken}
            self.sample_queue = deque(item for item in self.sample_queue if item.request_id not in ids)
            if self.sample_queue and SAMPLING not in self.ready:
                self.first_sample = 0.0
                self.ready.append(SAMPLING)
            dropped = self.cancelled & ids
            self.cancelled -= ids
            for request_id in dropped:
                self.sample_results.pop(request_id, None)
        return [item for item in taken if item.request_id not in dropped]

    def _answer_samples(self, items: Sequence[QueuedSample]) -> None:
        groups: dict[int, tuple[LocalAnswers, list[tuple[QueuedSample, Any]]]] = {}
        for item in items:
            try:
                answers, adapter = self._weights_for(item.source)
                answers.check(item.query)
                groups.setdefault(id(answers), (answers, []))[1].append((item, adapter))
            except PolicygradError as error:
                self._finish_sample(item, Answer(wire.JSON, wire.format_failure(str(error), is_users=True)))
        for answers, chosen in groups.values():
            try:
                found = answers.answer([(item.query, adapter) for item, adapter in chosen])
            except Exception as error:  # the clients and the log get it, and the server goes on
                is_bug = not isinstance(error, PolicygradError)
                text = f"{type(error).__name__}: {error}" + " (a bug of the server)" * is_bug
                if is_bug:
                    self.note(f"sampling: {text}")
                for item, _ in chosen:
                    self._finish_sample(item, Answer(wire.JSON, wire.format_failure(text, is_users=False)))
                continue
            for (item, _), answer in zip(chosen, found, strict=True):
                self.counts["tokens_sampled"] += sum(len(s.tokens) for s in answer.samples)
                self._finish_sample(item, Answer(wire.PROTOBUF, wire.format_sample(answer)))

    def _finish_sample(self, item: QueuedSample, answer: Answer) -> None:
        with self.condition:
            self.sample_results[item.request_id] = answer
            self.sample_results.move_to_end(item.request_id)
            finished = [key for key, value in self.sample_results.items() if value is not None]
            for key in finished[: max(0, len(finished) - MAX_SAMPLE_RESULTS)]:
                del self.sample_results[key]
        self._announce(item.request_id)

    def _weights_for(self, source: Mapping[str, str]) -> tuple[LocalAnswers, Adapter | WholeWeights | None]:
        """Return what samples from a source, with its weights in memory."""
        name = source["base_model"]
        if (path := source.get("model_path")) is None:
            return self.samplers[name], None
        if path in self.sampler_weights:
            self.sampler_weights.move_to_end(path)
            return self.samplers[name], self.sampler_weights[path]
        if path in self.whole_samplers:
            self.whole_samplers.move_to_end(path)
            return self.whole_samplers[path], None
        folder = self.store.saved(SavedPath.parse(path))
        spec = self.store.read(folder / "weights.json", path)["adapter"]
        if spec is None and isinstance(self.samplers[name], EngineAnswers):
            return self.samplers[name], self._remember(path, WholeWeights(load_file(folder / WHOLE_WEIGHTS)))
        if spec is None:
            network = self._load_whole(name, self.networks[name].path)
            _load_own_tensors(network, load_file(folder / WHOLE_WEIGHTS))
            self.whole_samplers[path] = LocalAnswers(network, self.config.decode_rows)
            while len(self.whole_samplers) > max(1, self.config.max_models // 4):
                self.whole_samplers.popitem(last=False)
            return self.whole_samplers[path], None
        network = self.networks[name]
        assert network.switch is not None
        adapter_spec = AdapterSpec(**spec)
        adapter = Adapter(network.switch.choose_layers(adapter_spec), adapter_spec)
        adapter.load(load_file(folder / ADAPTER_WEIGHTS))
        return self.samplers[name], self._remember(path, adapter)

    def _remember(self, path: str, weights: WeightsT) -> WeightsT:
        """Keep weights to sample from in memory, and drop those that were used longest ago."""
        self.sampler_weights[path] = weights
        while len(self.sampler_weights) > self.config.max_models:
            self.sampler_weights.popitem(last=False)
        return weights


SAMPLING = "sampling"
COMPUTE: Mapping[str, Callable[[Service, Lane, LoggedRequest], Answer | None]] = {
    "create_model": Service._create_model,
    "forward_backward": Service._run_pass,
    "forward": Service._run_pass,
    "optim_step": Service._optim_step,
    "save_weights": Service._save_weights,
    "save_weights_for_sampler": Service._save_for_sampler,
    "save_weights_external": Service._save_external,
    "load_weights": Service._load_weights,
    "unload_model": Service._unload_model,
}


def _describe(model: TrainedModel) -> dict[str, Any]:
    """Return what a state needs to build the model again."""
    spec = None if model.adapter is None else asdict(model.adapter.spec)
    return {"base_model": model.network.name, "adapter": spec}


def _saved_info(request: LoggedRequest, values: Any, *, is_temporary: bool = False) -> SavedInfo:
    seconds = values.ttl_seconds
    if seconds is not None and seconds <= 0:
        raise ConfigError(f"ttl_seconds must be above 0, or left out, not {seconds}")
    now = time.time()
    return SavedInfo(
        created=now,
        request=request.sequence,
        expires=None if seconds is None else now + seconds,
        user_metadata=getattr(values, "user_metadata", None),
        is_temporary=is_temporary,
    )


def _tokenizer_id(network: Network) -> str:
    """Return where a client on this machine finds the tokenizer."""
    path = Path(resolve_model(network.path))
    return str(path.resolve()) if path.is_dir() else network.path


def _describe_trained(model: TrainedModel) -> str:
    return "all weights" if model.adapter is None else f"an adapter of rank {model.adapter.spec.rank}"


def _own_tensors(network: Network) -> dict[str, Tensor]:
    return {name: p.detach().cpu().contiguous() for name, p in network.model.named_parameters()}


@torch.no_grad()
def _load_own_tensors(network: Network, tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in network.model.named_parameters():
        parameter.copy_(tensors[name])
