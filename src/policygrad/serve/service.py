"""The service behind the server: sessions and who they belong to, and one thread in which training and sampling take turns."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import traceback
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError
from policygrad.models.loading import resolve_model
from policygrad.serve import wire
from policygrad.serve.config import ServeConfig
from policygrad.serve.models import ServedNetwork, load_network
from policygrad.serve.page import GONE, IDLE, Status, is_recent, summarise
from policygrad.serve.sample_queue import QueuedSample, SampleQueue
from policygrad.serve.sampling import SampleQuery
from policygrad.serve.store import SEQUENCE, LoggedRequest, SavedPath, Store
from policygrad.serve.training import WEIGHTS_INFO, Training
from policygrad.serve.wire import Answer
from policygrad.trackers.console import format_duration
from policygrad.training.learner_setup import limit_torch_threads
from policygrad.utils.filesystem import hold_lock

SAMPLING = "sampling"
LOCAL_USER = "local"
"""Everyone, where no API keys are needed."""
KEEP_SOURCES = 4096
UNLOAD = "unload"
"""In place of a number: unloading is no part of what a model computes."""


class Service:
    """Everything but HTTP. Its methods are called in the event loop."""

    def __init__(self, config: ServeConfig, note: Callable[[str], None] = lambda text: None) -> None:
        """Load the models, and continue what a server before this one has left in the folder.

        Raises:
            ModelError: A model that cannot be loaded.
            RunError: Another server uses the folder.
        """
        self.config, self.note = config, note
        folder = config.folder.resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"--folder {folder} cannot be made: {error.strerror}; choose another") from error
        if exposed := config.find_exposed():
            note(exposed)
        self.resources = ExitStack()
        self.resources.enter_context(hold_lock(folder / ".lock"))
        self.store = Store(folder)
        for session_id in self.store.sessions():
            for model_id in self.store.models(session_id):
                self.store.prune(model_id, config.keep_samplers)
        # One thread loads and computes. A second one that had computed would have OpenMP threads of its own: on two CPUs a step of
        # a model of 135M parameters then took twice the system time, probably as more threads than CPUs sleep at their barriers.
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="serve")
        self.networks = self.worker.submit(self._load_networks).result()
        self.turns: OrderedDict[str, deque[str]] = OrderedDict()  # by tenant: models that have something to compute
        self.condition = threading.Condition()
        self.queue = self.worker.submit(
            SampleQueue,
            config,
            self.store,
            self.networks,
            condition=self.condition,
            on_ready=lambda: self._add_turn(SAMPLING, SAMPLING),
            on_results=self._announce,
            note=note,
        ).result()
        self.training = Training(
            config,
            self.store,
            self.networks,
            condition=self.condition,
            on_ready=lambda model_id: self._add_turn(self.find_tenant(self.store.owner(model_id), model_id), model_id),
            on_result=lambda request_id: self._announce([request_id]),
            on_sampler_weights=self.queue.publish,
            note=note,
        )
        self.heartbeats: dict[str, float] = {}
        self.sources: OrderedDict[str, Mapping[str, str | None]] = OrderedDict()  # by sampling session; the latest
        self.waiters: dict[str, list[asyncio.Future[None]]] = {}
        self.is_stopping = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.started, self.url = time.time(), f"http://{config.host}:{config.port}"
        self.computing: Future[None] | None = None

    def _load_networks(self) -> dict[str, ServedNetwork]:
        networks: dict[str, ServedNetwork] = {}
        for name, path in self.config.models:
            self.note(f"loading {name}")
            networks[name] = load_network(
                name, path, self.config.learner, adaptable=True, trust_remote_code=self.config.trust_remote_code
            )
        return networks

    def start(self) -> None:
        """Begin to compute; called in the event loop."""
        self.loop = asyncio.get_running_loop()
        self.computing = self.worker.submit(self._take_turns)

    def stop(self) -> None:
        """Finish the request that is being computed, and write the state of all models. Stopping twice is no error."""
        with self.condition:
            if self.is_stopping:
                return
            self.is_stopping = True
            self.condition.notify_all()
        self.worker.submit(self.training.save_all).result()
        self.worker.shutdown()
        self.queue.close()
        self.resources.close()

    # The thread that computes.

    def find_tenant(self, user: str, full_id: str) -> str:
        """Return who takes turns with others: the user, or the session where no keys tell users apart."""
        return full_id.partition(":")[0] if user == LOCAL_USER else user

    def _add_turn(self, tenant: str, name: str) -> None:
        names = self.turns.setdefault(tenant, deque())
        if name not in names:
            names.append(name)
            self.condition.notify_all()

    def _take_turns(self) -> None:
        largest = max((x.model for x in self.networks.values()), key=lambda m: sum(p.numel() for p in m.parameters()))
        with limit_torch_threads(largest):
            while (turn := self._next_turn()) is not None:
                try:
                    if turn == SAMPLING:
                        self.queue.answer_some()
                    else:
                        self.training.compute_next(turn)
                except Exception:  # a bug must not end the server for all others
                    self.note(f"{turn}: {traceback.format_exc()}")

    def _next_turn(self) -> str | None:
        """Return whose turn it is, a model's id or SAMPLING; wait until there is something to compute. None: stop."""
        with self.condition:
            while not self.is_stopping:
                if not self.turns:
                    self.condition.wait()
                elif list(self.turns) == [SAMPLING] and (seconds := self.queue.seconds_to_gather()) > 0:
                    self.condition.wait(seconds)
                else:
                    tenant, names = self.turns.popitem(last=False)
                    turn = names.popleft()
                    if names:
                        self.turns[tenant] = names  # after all others
                    return turn
            return None

    # Sessions.

    def create_session(self, user: str, request: Any) -> str:
        """Return the id of a new session."""
        if request.project_id is not None:
            raise ConfigError("projects are not available here: leave project_id out")
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

    def finish_session(self, user: str, session_id: str) -> None:
        """Let no more models be created in a session."""
        values = self.store.read_session(user, session_id)
        self.store.write(self.store.session(session_id) / "session.json", values | {"finished": time.time()})
        self.heartbeats.pop(session_id, None)

    # Models.

    def create_model(self, user: str, request: Any, kind: str, body: bytes) -> str:
        """Accept a request for a new model, with new or with saved weights, and return its request id."""
        if "finished" in self.store.read_session(user, request.session_id):
            raise ConfigError(f"the session {request.session_id} is finished: open another")
        if kind == "create_model":
            self._check_new_model(request)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        return self.training.submit(model_id, LoggedRequest(0, kind, body, wire.JSON))

    def _check_new_model(self, request: Any) -> None:
        """Raise ConfigError for a model that cannot be created, before the request is kept."""
        network, spec = self.networks.get(request.base_model), wire.parse_adapter(request)
        if network is None:
            raise ConfigError(f"there is no model {request.base_model!r} here: {', '.join(self.networks)}")
        if spec is not None and network.switch is not None:
            sizes = [min(x.in_features, x.out_features) for x in network.switch.choose_layers(spec).values()]
            if spec.rank > max(sizes, default=0):
                raise ConfigError(
                    f"lora_config.rank is {spec.rank}, and the largest rank that a layer of {network.name!r} can change is "
                    f"{max(sizes, default=0)}: rank=0 trains all weights"
                )

    def submit(self, user: str, model_id: str, request: LoggedRequest) -> str:
        """Accept a training request and return its id. One that was accepted before is not accepted again."""
        self.store.check_owner(user, model_id)
        return self.training.submit(model_id, request)

    def model_info(self, model_id: str) -> dict[str, Any]:
        """Return what get_info tells, and the adapter's specification. Raises UnknownIdError if there is no such model."""
        created = self.store.read(self.store.model(model_id) / "model.json", f"model {model_id!r}")
        name, spec = created["base_model"], created["adapter"]
        arch, tokenizer_id = None, name
        if (network := self.networks.get(name)) is not None:
            arch, path = type(network.model).__name__, Path(resolve_model(network.path))
            # where a client on this machine finds the tokenizer
            tokenizer_id = str(path.resolve()) if path.is_dir() else network.path
        return {
            "model_id": model_id,
            "model_name": name,
            "model_data": {"arch": arch, "model_name": name, "tokenizer_id": tokenizer_id},
            "is_lora": spec is not None,
            "lora_rank": None if spec is None else spec["rank"],
            "adapter": spec,
            "user_metadata": created["user_metadata"],
        }

    def status(self, user: str | None = None) -> Status:
        """Return what is shown on the page and the terminal: of one user, or of all."""
        bases = [
            {
                "name": name,
                "parameters": f"{sum(p.numel() for p in x.model.parameters()) / 1e6:.2f}M",
                "context": x.context_length or "unknown",
                "device": f"{x.device}, {x.config.dtype}",
            }
            for name, x in self.networks.items()
        ]
        with self.condition:
            lanes = [x for x in self.training.lanes.values() if user in (None, self.store.owner(x.model_id))]
        sessions = list[dict[str, Any]]()
        for session_id, last in list(self.heartbeats.items()):
            if not is_recent(last):
                self.heartbeats.pop(session_id, None)
            elif user in (None, self.store.owner(session_id)):
                values = self.store.read(self.store.session(session_id) / "session.json", session_id)
                count = sum(lane.model_id.startswith(f"{session_id}:") for lane in lanes)
                age = f"{format_duration(time.time() - last)} ago"
                sessions.append({"id": session_id, "name": values["display_name"] or "", "heard": age, "models": count})
        open_sessions = {session["id"] for session in sessions}
        models = list[dict[str, Any]]()
        for lane in lanes:
            model = lane.model
            now = lane.activity or ("waits" if lane.waiting else IDLE)
            if now == IDLE and lane.model_id.partition(":")[0] not in open_sessions:
                now = GONE
            shown = {"id": lane.model_id, "waiting": len(lane.waiting), "now": now}
            if model is not None:
                trains = "all weights" if model.adapter is None else f"an adapter of rank {model.adapter.spec.rank}"
                models.append(
                    {**shown, "base": model.network.name, "trains": trains, "updates": model.optimizer.num_updates}
                )
            elif lane.waiting:
                models.append({**shown, "base": "", "trains": "", "updates": ""})
        counts = {
            name: self.training.counts.get(name, 0) + self.queue.counts.get(name, 0)
            for name in self.training.counts.keys() | self.queue.counts.keys()
        }
        uptime = format_duration(time.time() - self.started)
        summary = summarise(counts, len(self.queue.waiting))
        return Status(self.url, self.key_hint, uptime, summary, bases, sessions, models)

    @property
    def key_hint(self) -> str:
        """The value to which clients set TINKER_API_KEY."""
        return "one of the keys in --api-keys" if self.config.api_keys else "tml-local"

    # Sampling.

    def create_sampling_session(self, user: str, request: Any) -> str:
        """Return the id of a session that samples from saved weights, or from a model as it was loaded."""
        self.store.read_session(user, request.session_id)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        source = {"base_model": request.base_model, "model_path": request.model_path}
        self._complete_source(user, source)
        self.store.write(self.store.sampling_session(sampler_id), source)
        return sampler_id

    def _complete_source(self, user: str, source: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return what is sampled from, the base model's name and a path of saved weights, or None for the base model itself.

        Raises:
            ConfigError: There is no such model, or the weights are not for sampling.
            UnknownIdError: There are no such weights of this user.
        """
        name, path = source.get("base_model"), source.get("model_path")
        if path is not None:
            saved = SavedPath.parse(path)
            self.store.check_owner(user, saved.model_id)
            if saved.kind != "sampler_weights":
                raise ConfigError(f"{path} is not for sampling: save_weights_for_sampler saves what is")
            name = self.store.read(self.store.find_saved(saved) / WEIGHTS_INFO, path)["base_model"]
        if name not in self.networks:
            raise ConfigError(f"there is no model {name!r} here: {', '.join(self.networks)}")
        return {"base_model": name, "model_path": path}

    def read_sampler(self, user: str, sampler_id: str) -> dict[str, str | None]:
        """Return what a sampling session samples from: `base_model` and `model_path`."""
        self.store.check_owner(user, sampler_id)
        source = self.store.read(self.store.sampling_session(sampler_id), f"sampling session {sampler_id!r}")
        return self._complete_source(user, source)

    def join_sampling_session(self, user: str, sampler_id: str) -> int:
        """Return a number for another client of a sampling session, whose requests then have numbers of their own."""
        self.store.check_owner(user, sampler_id)
        path = self.store.sampling_session(sampler_id)
        source = self.store.read(path, f"sampling session {sampler_id!r}")
        count = int(source.get("clients", 0)) + 1
        self.store.write(path, {**source, "clients": count})
        return count

    def sample(self, user: str, request: Any, query: SampleQuery, num_bytes: int) -> str:
        """Accept a sampling request, and what `wire.parse_sample` made of it, and return its id."""
        if request.sampling_session_id is not None:
            sampler_id, number = request.sampling_session_id, request.seq_id or 0
            self.store.check_owner(user, sampler_id)
            if sampler_id not in self.sources:
                self.sources[sampler_id] = self.read_sampler(user, sampler_id)
                if len(self.sources) > KEEP_SOURCES:
                    self.sources.popitem(last=False)
            source = self.sources[sampler_id]
        else:
            sampler_id, number = f"{user}:{uuid.uuid4().hex}", 0
            source = self._complete_source(user, {"base_model": request.base_model, "model_path": request.model_path})
        seed = int.from_bytes(hashlib.sha256(sampler_id.partition(":")[2].encode()).digest()[:6], "big")
        if request.sampling_params.seed is None:
            query = replace(query, key=(seed, number))
        request_id = f"{sampler_id}:{number}"
        tenant = self.find_tenant(user, sampler_id)
        self.queue.add(
            QueuedSample(request_id, tenant, query, str(source["base_model"]), source["model_path"], num_bytes)
        )
        return request_id

    # Results.

    async def retrieve(self, user: str, request_id: str, seconds: float) -> Answer | None:
        """Return a result; None if it is not there after so many seconds.

        Raises:
            UnknownIdError: No such request.
            LostRequestError: A sampling request that a restart has lost.
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

    def check_requester(self, user: str, request_id: str) -> None:
        """Raise UnknownIdError unless a request is this user's."""
        if not request_id.startswith(f"{user}:"):  # else a sampling request without a session
            self.store.check_owner(user, request_id)

    def _find_result(self, user: str, request_id: str) -> Answer | None:
        self.check_requester(user, request_id)
        owner, _, number = request_id.rpartition(":")
        if ":train:" in owner and number == UNLOAD:
            return wire.format_json(type="unload_model", model_id=owner)
        if ":train:" in owner and SEQUENCE.fullmatch(number):
            return self.training.find_result(owner, int(number))
        return self.queue.find_answer(request_id)

    def _announce(self, request_ids: Iterable[str]) -> None:
        """Wake those who wait for results; called by the computing thread."""

        def wake() -> None:
            for request_id in request_ids:
                for future in self.waiters.get(request_id, []):
                    if not future.done():
                        future.set_result(None)

        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(wake)
