"""Clients' models: each computes its requests in their order, and a restart computes again what its state does not contain.

A request is written to the folder before it is accepted (`Store`), and so is what it computed, so that a client may ask again. A
model that is idle may be on the disk alone.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from policygrad.checkpoint.format import load_latest, save_checkpoint
from policygrad.checkpoint.model_export import write_model
from policygrad.checkpoint.read_back import describe_difference, saved_tensors
from policygrad.errors import ConfigError, ModelError, NumericsError, OutOfMemoryError, PolicygradError
from policygrad.models.loading import model_origin
from policygrad.serve import wire
from policygrad.serve.adapters import AdapterSpec, write_adapter
from policygrad.serve.config import ServeConfig
from policygrad.serve.models import ClientModel, ServedNetwork, load_network
from policygrad.serve.store import MAX_SEQUENCE, LoggedRequest, SavedInfo, SavedPath, Store, UnknownIdError
from policygrad.serve.wire import Answer
from policygrad.utils.out_of_memory import describe_missing_memory, is_out_of_memory

FULL_WEIGHTS = "model.safetensors"
"""All weights of a model in a folder of weights for sampling; an adapter is in PEFT's file instead."""
WEIGHTS_INFO = "weights.json"
"""The base model and the adapter's specification, beside either."""
MAX_ATTEMPTS = 3
"""How often a request is begun again that was being computed when the server was killed."""
MAX_AHEAD = 2**16
"""Requests of a model that may wait, from the next to compute on."""
SHORTER_DATA = "send shorter data, or start the server with --learner.gradient-checkpointing or a smaller --max-models"
LONGEST_TTL = 10 * 365 * 86400
"""Seconds."""


@dataclass(eq=False)
class Lane:
    """A model's requests, in the order of their numbers."""

    model_id: str
    next: int
    """Number of the request to compute next."""
    saved: int
    """Number of the request that the state on the disk is after; -1 = there is none."""
    last_logged: int = -1
    """Number of the last request of a server before this one."""
    waiting: set[int] = field(default_factory=set)
    """Numbers of the requests that have arrived and are not computed."""
    model: ClientModel | None = None
    """None: on the disk, or not created yet."""
    failed: str = ""
    """Why a forward_backward failed whose gradient the next optimizer step would miss."""
    lost: str = ""
    """Why the model is not what its client was told: a request that had succeeded failed when it was computed again."""
    parts: list[tuple[int, wire.PassRequest]] = field(default_factory=list)
    """The numbers and contents of a divided request whose last part has not arrived (`wire.DATUM_COUNT`)."""
    unwritten: dict[int, Answer] = field(default_factory=dict)
    """Results that the disk had no room for, by number."""
    unsaved_seconds: float = 0.0
    """Work that a restart would repeat."""
    must_save: bool = False
    """True if a state is due after the request that is being computed."""
    last_used: float = 0.0
    activity: str = ""

    @property
    def is_ready(self) -> bool:
        return self.next in self.waiting


class Training:
    """Accepts training requests in the event loop, and computes them in the server's thread."""

    def __init__(
        self,
        config: ServeConfig,
        store: Store,
        networks: Mapping[str, ServedNetwork],
        *,
        condition: threading.Condition,
        on_ready: Callable[[str], None],
        on_result: Callable[[str], None],
        on_sampler_weights: Callable[[str, str], None],
        note: Callable[[str], None],
    ) -> None:
        """
        Args:
            condition: Held while lanes change.
            on_ready: Called, holding the condition, with a model that has something to compute.
            on_result: Called with a request's id when its result is on the disk.
            on_sampler_weights: Called with the base model's name and the path of weights that were saved for sampling.
            note: Tells the server's log about bugs.
        """
        self.config, self.store, self.networks, self.condition = config, store, networks, condition
        self.on_ready, self.on_result, self.on_sampler_weights, self.note = (
            on_ready,
            on_result,
            on_sampler_weights,
            note,
        )
        self.lanes: dict[str, Lane] = {}
        self.counts = {"requests": 0, "updates": 0, "tokens_trained": 0}

    # Requests.

    def open_lane(self, model_id: str, *, is_new: bool = False) -> Lane:
        """Return a model's lane, with what a server before this one has left to do.

        Raises:
            UnknownIdError: A malformed id, or no request has ever asked for this model, and `is_new` is false.
        """
        with self.condition:
            if model_id not in self.lanes:
                folder = self.store.model(model_id)
                steps = [int(p.name[5:]) for p in (folder / "state").glob("step-*") if p.name[5:].isdigit()]
                saved = max(steps, default=-1)
                lane = Lane(model_id, saved + 1, saved)
                lane.waiting = {n for n in self.store.list_requests(model_id) if n >= lane.next}
                lane.last_logged = max(lane.waiting, default=-1)
                if not (is_new or lane.next or 0 in lane.waiting):
                    raise UnknownIdError(f"there is no model {model_id!r}")
                self.lanes[model_id] = lane
                if lane.is_ready:
                    self.on_ready(model_id)
            return self.lanes[model_id]

    def submit(self, model_id: str, request: LoggedRequest) -> str:
        """Accept a request and return its id. One that was accepted before is not accepted again."""
        if request.sequence > MAX_SEQUENCE:
            raise ConfigError(
                f"seq_id must be at most {MAX_SEQUENCE:,}, not {request.sequence}: count a model's requests from 1"
            )
        lane = self.open_lane(model_id, is_new=request.sequence == 0)
        with self.condition:
            if request.sequence >= lane.next and request.sequence not in lane.waiting:
                if request.sequence > lane.next + MAX_AHEAD:
                    raise ConfigError(
                        f"seq_id {request.sequence} is too far ahead: request {lane.next} of this model is computed next, and at "
                        f"most {MAX_AHEAD:,} may wait: send those before it first"
                    )
                self.store.log_request(model_id, request)
                lane.waiting.add(request.sequence)
                self.counts["requests"] += 1
                if lane.is_ready:
                    self.on_ready(model_id)
        return f"{model_id}:{request.sequence}"

    def unload(self, model_id: str) -> None:
        """Let this model be the next to leave the memory when another one needs it."""
        self.open_lane(model_id).last_used = 0.0

    def last_used(self, model_id: str) -> float:
        """Return when a model last computed something, in seconds since 1970."""
        lane = self.lanes.get(model_id)
        return lane.last_used if lane and lane.last_used else self.store.model(model_id).stat().st_mtime

    def find_result(self, model_id: str, sequence: int) -> Answer | None:
        """Return a request's result, None while there is none. Raises UnknownIdError if there is no such request."""
        if (result := self.store.read_result(model_id, sequence)) is not None:
            return Answer(*result)
        lane = self.open_lane(model_id)
        if sequence in lane.unwritten:
            return lane.unwritten[sequence]
        if sequence not in lane.waiting and not self.store.has_request(model_id, sequence):
            if (result := self.store.read_result(model_id, sequence)) is not None:  # written in the meantime
                return Answer(*result)
            raise UnknownIdError(f"there is no request '{model_id}:{sequence}'")
        return None

    def compute_next(self, model_id: str) -> None:
        """Compute a model's next request, write its result, and a state when one is due."""
        lane = self.lanes[model_id]
        if not lane.is_ready:  # it was another turn's already
            return
        request, started = self.store.read_request(model_id, lane.next), time.perf_counter()
        lane.activity, lane.last_used = request.kind, time.time()
        stored = self.store.read_result(model_id, request.sequence)  # of before a restart
        if stored is not None and (why := wire.read_error(Answer(*stored))):
            self._fail(lane, request, why)  # as the client was told, also where it would succeed now
        elif (answer := self._compute(lane, request, is_answered=stored is not None)) is not None:
            if stored is None:
                self._write_result(lane, request.sequence, answer)
            elif why := wire.read_error(answer):
                lane.lost = (
                    f"after a restart request {request.sequence} could not be computed again ({why}): start the server again, or "
                    "load a checkpoint"
                )
        lane.unsaved_seconds += time.perf_counter() - started
        if lane.must_save or lane.unsaved_seconds > self.config.replay_seconds:
            self._save_state(lane, after=request.sequence)
        with self.condition:
            lane.activity, lane.must_save = "", False
            lane.waiting.remove(lane.next)
            lane.next += 1
            if lane.model is not None and not lane.model.optimizer.consistent:  # an optimizer step ended halfway
                del self.lanes[model_id]
                self.open_lane(model_id)  # which computes again from the last state
            elif lane.is_ready:
                self.on_ready(model_id)

    def _compute(self, lane: Lane, request: LoggedRequest, *, is_answered: bool) -> Answer | None:
        """Return a request's result; None for a part of a divided request that is not the last."""
        try:
            if request.sequence <= lane.last_logged and not is_answered:
                attempts = self.store.count_attempt(lane.model_id, request.sequence)
                if attempts > MAX_ATTEMPTS:
                    raise ConfigError(
                        f"the server ended {attempts} times while it computed this request, perhaps for want of memory: send "
                        "fewer or shorter data"
                    )
            if lane.lost and request.kind != "load_weights":
                raise ModelError(lane.lost)
            if lane.parts and request.kind not in ("forward", "forward_backward"):
                count = sum(len(part.data) for _, part in lane.parts)
                raise ConfigError(f"only {count} data of a divided request have arrived: send all of them first")
            return COMPUTE[request.kind](self, lane, request)
        except OutOfMemoryError as error:
            text, is_users = f"{error}: {SHORTER_DATA}", False
        except PolicygradError as error:
            text, is_users = str(error), not isinstance(error, NumericsError)
        except OSError as error:
            text, is_users = f"a file could not be written or read: {error}", False
        except Exception as error:  # a bug must not end the server; the client and the log get it
            text, is_users = f"{type(error).__name__}: {error} (a bug of the server)", False
            if is_out_of_memory(error):  # in an optimizer step, say
                text = f"out of memory ({describe_missing_memory(error)}): {SHORTER_DATA}"
            else:
                request_id = f"{lane.model_id}:{request.sequence}"
                self.note(f"{request_id}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
        self._fail(lane, request, text)
        return wire.format_error(text, is_users=is_users)

    def _fail(self, lane: Lane, request: LoggedRequest, why: str) -> None:
        """Forget what a failed request was to be part of: no optimizer step may be taken with the rest of it."""
        for sequence, _ in lane.parts:
            if sequence != request.sequence:
                self._write_result(lane, sequence, wire.format_error(why, is_users=True))
        lane.parts = []
        if request.kind == "optim_step":
            lane.failed = ""
        elif wire.adds_gradient(request.kind, request.body, request.content_type):
            lane.failed = why
        else:
            return
        if lane.model is not None:
            lane.model.clear_gradient()

    def _write_result(self, lane: Lane, sequence: int, answer: Answer) -> None:
        try:
            self.store.write_result(lane.model_id, sequence, answer.content_type, answer.body)
        except OSError as error:
            lane.unwritten[sequence] = answer
            self.note(f"the result {lane.model_id}:{sequence} is in memory alone: {error}")
        self.on_result(f"{lane.model_id}:{sequence}")

    # State.

    def save_all(self) -> None:
        """Write the states of all models."""
        for lane in self.lanes.values():
            self._save_state(lane, after=lane.next - 1)

    def _save_state(self, lane: Lane, *, after: int) -> bool:
        """Write a model's state after a request, unless a gradient is pending, which no state contains.

        Returns:
            Whether what is on the disk is what is in memory.
        """
        if lane.model is None or after < 0:
            return False
        if not (lane.unsaved_seconds or lane.must_save):
            return True
        if lane.model.pending or lane.parts or lane.failed or lane.lost:
            return False
        try:
            for sequence, answer in list(lane.unwritten.items()):
                self.store.write_result(lane.model_id, sequence, answer.content_type, answer.body)
                del lane.unwritten[sequence]
            tensors, values = lane.model.state()
            self.store.save_state(lane.model_id, after, tensors, {**values, **_describe(lane.model)})
        except (PolicygradError, OSError) as error:  # the log still has what was to be in it
            self.note(f"the state of {lane.model_id} was not written: {error}")
            return False
        lane.saved, lane.unsaved_seconds = after, 0.0
        return True

    def _model(self, lane: Lane) -> ClientModel:
        """Return a model, from the disk if it is there."""
        if lane.model is None:
            saved = self.store.load_state(lane.model_id)
            if saved is None or saved[0] != lane.saved:
                raise ModelError(f"the model {lane.model_id} was not created, or its state is lost: create it again")
            lane.model = self._build(saved[2])
            lane.model.restore(saved[1], saved[2])
            self._make_room(lane)
        return lane.model

    def _build(self, values: Mapping[str, Any]) -> ClientModel:
        """Return a model as described in a state: the base model's name, and its adapter's specification."""
        name, spec = values["base_model"], values["adapter"]
        if name not in self.networks:
            raise ConfigError(f"there is no model {name!r} here: start the server with --model {name}")
        if spec is not None:
            return ClientModel.with_adapter(self.networks[name], AdapterSpec(**spec))
        return ClientModel(load_trainable(self.config, name, self.networks[name].path), None)

    def _make_room(self, keep: Lane) -> None:
        """Write idle models to the disk until at most `max_models` are in memory."""
        with self.condition:
            loaded = [lane for lane in self.lanes.values() if lane.model is not None]
        idle = sorted((x for x in loaded if x is not keep and not x.waiting), key=lambda lane: lane.last_used)
        for lane in idle[: max(0, len(loaded) - self.config.max_models)]:
            if self._save_state(lane, after=lane.next - 1):
                lane.model = None

    # What each kind of request computes.

    def _create_model(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("create_model", request.body)
        spec = wire.parse_adapter(values)
        lane.model = self._build({"base_model": values.base_model, "adapter": None if spec is None else asdict(spec)})
        self._register(lane, values.user_metadata)
        lane.must_save = True  # a random seed is part of it
        return wire.format_json(type="create_model", model_id=lane.model_id)

    def _register(self, lane: Lane, user_metadata: Any) -> None:
        """Write what a new model is."""
        assert lane.model is not None
        values = {**_describe(lane.model), "user_metadata": user_metadata}
        self.store.write(self.store.model(lane.model_id) / "model.json", values)
        self._make_room(lane)

    def _run_pass(self, lane: Lane, request: LoggedRequest) -> Answer | None:
        model, given = self._model(lane), wire.parse_pass(request.body, request.content_type)
        config = dict(given.config)
        expected = config.pop(wire.DATUM_COUNT, None)
        if lane.parts:
            first = lane.parts[0][1]
            if (given.loss, given.config, given.backward) != (first.loss, first.config, first.backward):
                raise ConfigError(
                    "the parts of a divided request differ in loss_fn, loss_fn_config or in what is asked for"
                )
        lane.parts.append((request.sequence, given))
        data = [datum for _, part in lane.parts for datum in part.data]
        if expected is not None:
            if not isinstance(expected, int | float) or expected < len(data):
                raise ConfigError(f"{wire.DATUM_COUNT} must be the number of all data of the request, not {expected!r}")
            if len(data) < expected:
                return None
        result = model.run(data, given.loss, config, backward=given.backward)
        self.counts["tokens_trained"] += sum(len(x) for x in result.logprobs)
        parts, lane.parts = lane.parts, []
        start, answer = 0, None
        for (
            sequence,
            part,
        ) in parts:  # each gets its own log-probabilities; sums go with the last, as the client adds them up
            is_last = sequence == request.sequence
            logprobs, start = result.logprobs[start : start + len(part.data)], start + len(part.data)
            metrics = {n: x if is_last or n.endswith(":mean") else 0.0 for n, x in result.metrics.items()}
            answer = wire.format_pass(logprobs, metrics)
            if not is_last:
                self._write_result(lane, sequence, answer)
        return answer

    def _optim_step(self, lane: Lane, request: LoggedRequest) -> Answer:
        if lane.failed:
            raise ConfigError(f"no step was taken, because a forward_backward before it failed: {lane.failed}")
        metrics = self._model(lane).step(wire.parse_adam(wire.parse("optim_step", request.body)))
        self.counts["updates"] += 1
        return wire.format_json(metrics=metrics)

    def _save_weights(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("save_weights", request.body)
        model = self._model(lane)
        path = SavedPath(lane.model_id, "weights", values.path or f"{request.sequence:06d}")
        if not self.store.check_name(path, request.sequence, overwrite=values.overwrite):
            if model.pending:
                raise ConfigError("a gradient is pending, which a checkpoint does not contain: call optim_step first")
            folder = self.store.make_temporary(path)
            tensors, state = model.state()
            state |= _describe(model)
            save_checkpoint(folder / "state", model.optimizer.num_updates, tensors, state, keep=1)
            self.store.install(path, folder, _saved_info(request, values))
        return wire.format_json(type="save_weights", path=str(path))

    def _save_for_sampler(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("save_weights_for_sampler", request.body)
        if values.kind != "snapshot":
            raise ConfigError(
                f"kind={values.kind!r} is not available here: a snapshot's weights are those of every token, and are loaded at once"
            )
        model, sampler_id = self._model(lane), None
        if values.path is None:
            sampler_id = f"{lane.model_id.partition(':')[0]}:sample:{values.sampling_session_seq_id}"
        path = SavedPath(lane.model_id, "sampler_weights", values.path or f"sampler-{request.sequence:06d}")
        if not self.store.check_name(path, request.sequence):
            folder = self.store.make_temporary(path)
            if model.adapter is not None:
                write_adapter(folder, model.adapter, model.network.model, model_origin(model.network.path))
            else:
                tensors = {name: p.detach().cpu().contiguous() for name, p in model.network.model.named_parameters()}
                save_file(tensors, folder / FULL_WEIGHTS, metadata={"format": "pt"})
            self.store.write(folder / WEIGHTS_INFO, _describe(model))
            self.store.install(path, folder, _saved_info(request, values, sampler_id))
            self.on_sampler_weights(model.network.name, str(path))
        self.store.prune(lane.model_id, self.config.keep_samplers)
        if sampler_id is None:
            return wire.format_json(type="save_weights_for_sampler", path=str(path))
        self.store.write(self.store.sampling_session(sampler_id), {"model_path": str(path)})
        return wire.format_json(type="save_weights_for_sampler", path=None, sampling_session_id=sampler_id)

    def _save_external(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("save_weights_external", request.body)
        if values.age_encryption_recipients:
            raise ConfigError(
                "age_encryption_recipients is not available here: encrypt the files after downloading them"
            )
        model = self._model(lane)
        path = SavedPath(lane.model_id, "external_weights", values.path)
        if not self.store.check_name(path, request.sequence):
            folder = self.store.make_temporary(path)
            tokenizer = model.network.tokenizer
            if model.adapter is not None:
                write_adapter(folder, model.adapter, model.network.model, model_origin(model.network.path))
                tokenizer.save_pretrained(folder)
                if find_spec("peft") is not None:
                    _check_saved(folder, model)
            else:
                folder.rmdir()
                write_model(folder, model.network.model, tokenizer, check=lambda written: _check_saved(written, model))
            self.store.install(path, folder, _saved_info(request, values))
        size = self.store.saved_info(path).size
        return wire.format_json(type="save_weights_external", path=str(path), size_bytes=size)

    def _load_weights(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("load_weights", request.body)
        path = SavedPath.parse(values.path)
        self.store.check_owner(self.store.owner(lane.model_id), path.model_id)
        if path.kind != "weights":
            raise ConfigError(f"{path} is not for training: save_state saves what is")
        saved = load_latest(self.store.find_saved(path) / "state", warn=lambda text: None)
        if saved is None:
            raise ModelError(f"{path} cannot be read: its files are damaged")
        name = saved.state["base_model"]
        if request.sequence == 0:
            if values.base_model not in (None, name):
                raise ConfigError(f"{path} was trained from {name!r}, which base_model={values.base_model!r} is not")
            lane.model = self._build(saved.state)
            self._register(lane, values.user_metadata)
        model = self._model(lane)
        specs = [x and {**x, "seed": 0} for x in (_describe(model)["adapter"], saved.state["adapter"])]
        if model.network.name != name or specs[0] != specs[1]:
            raise ConfigError(
                f"{path} has another base model or adapter than this one: create a client from it instead"
            )
        model.restore(saved.tensors, saved.state, optimizer=values.optimizer)
        lane.failed, lane.lost = "", ""
        lane.must_save = True  # a restart might not find the checkpoint any more
        return wire.format_json(type="load_weights", path=str(path), model_id=lane.model_id)


COMPUTE: Mapping[str, Callable[[Training, Lane, LoggedRequest], Answer | None]] = {
    "create_model": Training._create_model,
    "forward_backward": Training._run_pass,
    "forward": Training._run_pass,
    "optim_step": Training._optim_step,
    "save_weights": Training._save_weights,
    "save_weights_for_sampler": Training._save_for_sampler,
    "save_weights_external": Training._save_external,
    "load_weights": Training._load_weights,
}


def _check_saved(folder: Path, model: ClientModel) -> None:
    """Raise ModelError if other programs read another model from a folder than was trained."""
    network, adapter = model.network.model, model.adapter
    trained = saved_tensors(network) if adapter is None else adapter.saved_tensors()
    if difference := describe_difference(folder, network, trained):
        raise ModelError(
            f"the weights were not saved, as other programs would read another model than was trained: {difference}. Save them "
            "with save_state, and please report which model this is"
        )


def load_trainable(config: ServeConfig, name: str, path: str) -> ServedNetwork:
    """Load a copy of a base model whose weights train."""
    return load_network(name, path, config.learner, adaptable=False, trust_remote_code=config.trust_remote_code)


def _describe(model: ClientModel) -> dict[str, Any]:
    """Return what a state needs to build the model again."""
    spec = None if model.adapter is None else asdict(model.adapter.spec)
    return {"base_model": model.network.name, "adapter": spec}


def compute_expiry(ttl_seconds: object) -> float | None:
    """Return when saved weights expire, in seconds since 1970. Raises ConfigError for a time that is none."""
    if ttl_seconds is None:
        return None
    if not isinstance(ttl_seconds, int | float) or not 0 < ttl_seconds <= LONGEST_TTL:
        raise ConfigError(
            f"ttl_seconds must be above 0 and at most {LONGEST_TTL}, or none for no end, not {ttl_seconds!r}"
        )
    return time.time() + ttl_seconds


def _saved_info(request: LoggedRequest, values: Any, sampler_id: str | None = None) -> SavedInfo:
    return SavedInfo(
        created=time.time(),
        request=request.sequence,
        expires=compute_expiry(values.ttl_seconds),
        user_metadata=getattr(values, "user_metadata", None),
        sampling_session=sampler_id,
    )
