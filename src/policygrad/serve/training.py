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
from typing import Any

import torch
from safetensors.torch import save_file

from policygrad.checkpoint.format import load_latest, save_checkpoint
from policygrad.checkpoint.model_export import write_model
from policygrad.errors import ConfigError, ModelError, NumericsError, PolicygradError
from policygrad.serve import wire
from policygrad.serve.adapters import AdapterSpec, write_adapter
from policygrad.serve.config import ServeConfig
from policygrad.serve.custom_loss import CustomLoss, build_custom_loss
from policygrad.serve.models import ClientModel, ServedNetwork, load_network
from policygrad.serve.store import LoggedRequest, SavedInfo, SavedPath, Store, UnknownIdError
from policygrad.serve.wire import Answer

FULL_WEIGHTS = "model.safetensors"
"""All weights of a model in a folder of weights for sampling; an adapter is in PEFT's file instead."""
ADAPTER_SPEC = "weights.json"
"""The base model and the adapter's specification, beside either."""


@dataclass(eq=False)
class Lane:
    """A model's requests, in the order of their numbers."""

    model_id: str
    next: int
    """Number of the request to compute next."""
    waiting: dict[int, LoggedRequest] = field(default_factory=dict)
    model: ClientModel | None = None
    """None: on the disk, or not created yet."""
    failed: str = ""
    """Why a forward_backward failed whose gradient the next optimizer step would miss."""
    chunks: list[tuple[int, wire.PassRequest]] = field(default_factory=list)
    """Requests of which only the first ones have arrived (`wire.DATUM_COUNT`)."""
    unsaved_seconds: float = 0.0
    """Work that a restart would repeat."""
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
        self.custom_losses: dict[str, CustomLoss] = {}
        self.counts = {"requests": 0, "updates": 0, "tokens_trained": 0}

    # Requests.

    def lane(self, model_id: str) -> Lane:
        """Return a model's lane, with what a server before this one has left to do. Raises UnknownIdError for a malformed id."""
        if model_id not in self.lanes:
            folder = self.store.model(model_id)
            steps = [int(p.name[5:]) for p in (folder / "state").glob("step-*") if p.name[5:].isdigit()]
            lane = Lane(model_id, max(steps, default=-1) + 1)
            lane.waiting = {r.sequence: r for r in self.store.read_requests(model_id) if r.sequence >= lane.next}
            self.lanes[model_id] = lane
            self._wake(lane)
        return self.lanes[model_id]

    def submit(self, model_id: str, request: LoggedRequest) -> str:
        """Accept a request and return its id. One that was accepted before is not accepted again."""
        lane = self.lane(model_id)
        if request.sequence and lane.next == 0 and 0 not in lane.waiting:
            raise UnknownIdError(f"there is no model {model_id!r}")
        with self.condition:
            if request.sequence >= lane.next and request.sequence not in lane.waiting:
                self.store.log_request(model_id, request)
                lane.waiting[request.sequence] = request
                self.counts["requests"] += 1
        self._wake(lane)
        return f"{model_id}:{request.sequence}"

    def _wake(self, lane: Lane) -> None:
        with self.condition:
            if lane.is_ready:
                self.on_ready(lane.model_id)

    def next_free(self, model_id: str) -> int:
        """Return the number after a model's last request."""
        lane = self.lane(model_id)
        return max([lane.next, *(n + 1 for n in lane.waiting)])

    def last_used(self, model_id: str) -> float:
        """Return when a model last computed something, in seconds since 1970."""
        lane = self.lanes.get(model_id)
        return lane.last_used if lane and lane.last_used else self.store.model(model_id).stat().st_mtime

    def find_result(self, model_id: str, sequence: int) -> Answer | None:
        """Return a request's result, None while there is none. Raises UnknownIdError if there is no such request."""
        if (result := self.store.read_result(model_id, sequence)) is not None:
            return Answer(*result)
        if sequence not in self.lane(model_id).waiting and not self.store.has_request(model_id, sequence):
            raise UnknownIdError(f"there is no request '{model_id}:{sequence}'")
        return None

    def compute_next(self, model_id: str) -> None:
        """Compute a model's next request, and write its result."""
        lane = self.lanes[model_id]
        request = lane.waiting[lane.next]
        request_id, started = f"{model_id}:{request.sequence}", time.perf_counter()
        lane.activity, lane.last_used = request.kind, time.time()
        try:
            answer = COMPUTE[request.kind](self, lane, request)
        except PolicygradError as error:
            answer = wire.format_error(str(error), is_users=not isinstance(error, NumericsError))
        except torch.OutOfMemoryError as error:
            answer = wire.format_error(
                f"out of memory: send fewer or shorter data, or start the server with a smaller --learner.micro-tokens ({error})",
                is_users=False,
            )
        except Exception as error:  # a bug must not end the server; the client and the log get it
            self.note(f"{request_id}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
            answer = wire.format_error(f"{type(error).__name__}: {error} (a bug of the server)", is_users=False)
        if answer is not None:  # None: a part of a request, of which more has to arrive
            if self.store.read_result(model_id, request.sequence) is None:  # else it was answered before a restart
                self.store.write_result(model_id, request.sequence, answer.content_type, answer.body)
            lane.unsaved_seconds += time.perf_counter() - started
            if lane.unsaved_seconds > self.config.replay_seconds:
                self._save_state(lane, after=request.sequence)
            self.on_result(request_id)
        with self.condition:
            lane.activity = ""
            lane.waiting.pop(lane.next)
            lane.next += 1
        self._wake(lane)

    # State.

    def save_all(self) -> None:
        """Write the states of all models."""
        for lane in self.lanes.values():
            self._save_state(lane, after=lane.next - 1)

    def _save_state(self, lane: Lane, *, after: int, force: bool = False) -> bool:
        """Write a model's state after a request, unless a gradient is pending, which no state contains.

        Args:
            force: Also if nothing was computed since the last state.

        Returns:
            Whether what is on the disk is what is in memory.
        """
        if lane.model is None or after < 0:
            return False
        if not (lane.unsaved_seconds or force):
            return True
        if lane.model.pending or lane.chunks or lane.failed:
            return False
        tensors, values = lane.model.state()
        self.store.save_state(lane.model_id, after, tensors, {**values, **_describe(lane.model)})
        lane.unsaved_seconds = 0.0
        return True

    def _model(self, lane: Lane) -> ClientModel:
        """Return a model, from the disk if it is there."""
        if lane.model is None:
            saved = self.store.load_state(lane.model_id)
            if saved is None or saved[0] != lane.next - 1:
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
        self._save_state(lane, after=request.sequence, force=True)  # a random seed is part of it
        return wire.format_json(type="create_model", model_id=lane.model_id)

    def _register(self, lane: Lane, user_metadata: Any) -> None:
        """Write what a new model is."""
        assert lane.model is not None
        values = {**_describe(lane.model), "user_metadata": user_metadata}
        self.store.write(self.store.model(lane.model_id) / "model.json", values)
        self._make_room(lane)

    def _run_pass(self, lane: Lane, request: LoggedRequest) -> Answer | None:
        model, backward = self._model(lane), True
        try:
            given = wire.parse_pass(request.body, request.content_type)
            backward, config = given.backward, dict(given.config)
            expected = config.pop(wire.DATUM_COUNT, None)
            lane.chunks.append((request.sequence, given))
            if expected is not None and sum(len(part.data) for _, part in lane.chunks) < float(expected):
                return None
            chunks, lane.chunks = lane.chunks, []
            data = [datum for _, part in chunks for datum in part.data]
            result = model.run(data, given.loss, config, self._load_custom_losses(lane.model_id), backward=backward)
        except Exception as error:
            if backward:  # part of the gradient may have been added, and a step must not be taken with it
                model.clear_gradient()
                lane.failed, lane.chunks = str(error), []
            raise
        self.counts["tokens_trained"] += sum(len(d.tokens) for d in data)
        first, answer = 0, None
        for sequence, part in chunks:  # each part gets its own log-probabilities; the metrics go with the last
            is_last = sequence == request.sequence
            logprobs, first = result.logprobs[first : first + len(part.data)], first + len(part.data)
            metrics = result.metrics if is_last else dict.fromkeys(result.metrics, 0.0)
            answer = wire.format_pass(logprobs, metrics)
            if not is_last:
                self.store.write_result(lane.model_id, sequence, answer.content_type, answer.body)
                self.on_result(f"{lane.model_id}:{sequence}")
        return answer

    def create_custom_loss(self, request: Any) -> str:
        """Check and keep an uploaded loss; return its id, which is the request's too."""
        inputs = [(x.name, x.rank) for x in request.inputs]
        nodes = [node.model_dump() for node in request.graph.nodes]
        loss = build_custom_loss(request.name, inputs, nodes, request.graph.format)
        loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
        values = {"name": request.name, "inputs": inputs, "nodes": nodes, "format": request.graph.format}
        self.store.write(self.store.loss(loss_id), values)
        self.custom_losses[loss_id] = loss
        return loss_id

    def _load_custom_losses(self, model_id: str) -> Mapping[str, CustomLoss]:
        """Return the losses that a model's session has uploaded, by their id."""
        session_id = model_id.partition(":")[0]
        for path in (self.store.session(session_id) / "loss").glob("*.json"):
            loss_id = f"{session_id}:loss:{path.stem}"
            if loss_id not in self.custom_losses:
                x = self.store.read(path, f"loss {loss_id!r}")
                self.custom_losses[loss_id] = build_custom_loss(x["name"], x["inputs"], x["nodes"], x["format"])
        return {name: loss for name, loss in self.custom_losses.items() if name.startswith(f"{session_id}:")}

    def _optim_step(self, lane: Lane, request: LoggedRequest) -> Answer:
        if lane.failed:
            why, lane.failed = lane.failed, ""
            raise ConfigError(f"no step was taken, because a forward_backward before it failed: {why}")
        metrics = self._model(lane).step(wire.parse_adam(wire.parse("optim_step", request.body)))
        self.counts["updates"] += 1
        return wire.format_json(metrics=metrics)

    def _unload_model(self, lane: Lane, request: LoggedRequest) -> Answer:
        if self._save_state(lane, after=request.sequence, force=True):
            lane.model = None
        return wire.format_json(type="unload_model", model_id=lane.model_id)

    def _save_weights(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("save_weights", request.body)
        model = self._model(lane)
        path = SavedPath(lane.model_id, "weights", values.path or f"{request.sequence:06d}")
        if not self.store.check_name(path, request.sequence, overwrite=values.overwrite):
            if model.pending:
                raise ConfigError("a gradient is pending, which a checkpoint does not contain: call optim_step first")
            folder = self.store.temporary(path)
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
        model, is_temporary = self._model(lane), values.path is None
        path = SavedPath(lane.model_id, "sampler_weights", values.path or f"sampler-{request.sequence:06d}")
        if not self.store.check_name(path, request.sequence, overwrite=False):
            folder = self.store.temporary(path)
            if model.adapter is not None:
                write_adapter(folder, model.adapter, model.network.path)
            else:
                tensors = {name: p.detach().cpu().contiguous() for name, p in model.network.model.named_parameters()}
                save_file(tensors, folder / FULL_WEIGHTS, metadata={"format": "pt"})
            self.store.write(folder / ADAPTER_SPEC, _describe(model))
            self.store.install(path, folder, _saved_info(request, values, is_temporary=is_temporary))
            self.on_sampler_weights(model.network.name, str(path))
        if not is_temporary:
            return wire.format_json(type="save_weights_for_sampler", path=str(path))
        self.store.prune_temporary(lane.model_id, self.config.keep_samplers)
        session_id = lane.model_id.partition(":")[0]
        sampler_id = f"{session_id}:sample:{values.sampling_session_seq_id}"
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
        if not self.store.check_name(path, request.sequence, overwrite=False):
            folder = self.store.temporary(path)
            tokenizer = model.network.tokenizer.hf
            if model.adapter is not None:
                write_adapter(folder, model.adapter, model.network.path)
                tokenizer.save_pretrained(folder)
            else:
                folder.rmdir()
                write_model(folder, model.network.model, tokenizer)
            self.store.install(path, folder, _saved_info(request, values))
        size = self.store.saved_info(path).size
        return wire.format_json(type="save_weights_external", path=str(path), size_bytes=size)

    def _load_weights(self, lane: Lane, request: LoggedRequest) -> Answer:
        values = wire.parse("load_weights", request.body)
        path = SavedPath.parse(values.path)
        self.store.check_owner(self.store.owner(lane.model_id), path.model_id)
        if path.kind != "weights":
            raise ConfigError(f"{path} is not for training: save_state saves what is")
        saved = load_latest(self.store.saved(path) / "state", warn=lambda text: None)
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
        lane.failed = ""
        self._save_state(lane, after=request.sequence, force=True)  # a restart might not find the checkpoint any more
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
    "unload_model": Training._unload_model,
}


def load_trainable(config: ServeConfig, name: str, path: str) -> ServedNetwork:
    """Load a copy of a base model whose weights train."""
    return load_network(name, path, config.learner, adaptable=False, trust_remote_code=config.trust_remote_code)


def _describe(model: ClientModel) -> dict[str, Any]:
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
