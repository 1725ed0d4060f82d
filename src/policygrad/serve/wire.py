"""The Tinker API's wire format, by the SDK's own types and protobuf messages. This module alone imports the SDK.

Training requests and what they compute are protobuf, the rest is JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policygrad.errors import ConfigError, PolicygradError, import_optional
from policygrad.samplers.base import SamplingParams
from policygrad.serve.adapters import AdapterSpec
from policygrad.serve.losses import Datum
from policygrad.serve.model_input import ModelInputParts, PictureChunk
from policygrad.serve.models import AdamParams
from policygrad.serve.sampling import SampleAnswer, SampleQuery, TopTokens
from policygrad.utils.pictures import Picture

tinker = import_optional("tinker", "policygrad serve", "serve")

from google.protobuf.message import DecodeError  # noqa: E402  # as pydantic, it comes with the SDK
from pydantic import ValidationError  # noqa: E402
from tinker import types  # noqa: E402
from tinker.proto import tinker_public_pb2 as pb  # noqa: E402
from tinker.types.client_config_response import ClientConfigResponse  # noqa: E402
from tinker.types.client_dynamic_config_response import ClientDynamicConfigResponse  # noqa: E402

PROTOBUF, JSON = "application/x-protobuf", "application/json"


@dataclass(frozen=True)
class Answer:
    """The body of an HTTP answer."""

    content_type: str
    body: bytes


MAX_ELEMENTS = 2**26
"""Numbers of a tensor that a client sends; a sparse one is small to send and may be large to compute with."""
MAX_NODES, MAX_NUMBERS, MAX_ELEMENTS_CHECKED = 2**15, 2**23, 2**13
"""Objects or lists, commas, and elements that are no numbers of tokens and data, of one JSON request."""
MAX_ERRORS = 1000
MAX_MESSAGES = 2**18
"""Messages within a protobuf message: a few bytes each to send, and a hundred to keep."""
MAX_SAMPLES = 4096
"""Completions of one prompt in a request."""
MAX_TOP = 1024
"""Tokens with their log-probabilities at a position, most probable or drawn."""
MAX_CHUNK = 2**30
"""A request is not divided by the client: an algorithm's coefficients are over all of its data."""
DATUM_COUNT = "datums"
"""Setting of a loss for clients that divide a request all the same: how many data it has in all."""


def client_config() -> dict[str, Any]:
    """Return what clients ask for at their start."""
    config = ClientConfigResponse(
        fwdbwd_max_chunk_len=MAX_CHUNK,
        fwdbwd_max_chunk_bytes_count=MAX_CHUNK,
        fwdbwd_dispatch_bytes_semaphore_size=MAX_CHUNK,
        custom_loss_server_side=False,
        sample_join_sampling_session=True,
        use_pyqwest_transport=True,
    )
    return config.model_dump(mode="json")


def dynamic_config() -> dict[str, Any]:
    """Return what clients ask for again from time to time."""
    return ClientDynamicConfigResponse(sample_cancel_enabled=True).model_dump(mode="json")


@dataclass(frozen=True, eq=False)
class PassRequest:
    """forward or forward_backward."""

    data: list[Datum]
    loss: str
    config: dict[str, float | str]
    backward: bool


def parse(kind: str, body: bytes) -> Any:
    """Parse a JSON request of the API by the name in its URL. Raises ConfigError for one that is malformed."""
    check_json(kind, body)
    try:
        return REQUESTS[kind].model_validate_json(body or b"{}")
    except ValidationError as error:
        if error.error_count() > MAX_ERRORS:  # to list them all would take seconds
            raise ConfigError(
                f"{kind}: {error.error_count():,} parts of the request are not what the API takes"
            ) from None
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{kind}: {where or 'the request'}: {first['msg']}") from None


def read_json(kind: str, body: bytes) -> dict[str, Any]:
    """Return the object that a request is. Raises ConfigError for anything else, and for more than is read."""
    if body.count(b"{") > MAX_NODES or body.count(b"[") > MAX_NODES or body.count(b",") > MAX_NUMBERS:
        raise ConfigError(
            f"{kind}: the request has too many parts: at most {MAX_NODES:,} objects and {MAX_NUMBERS:,} numbers"
        )
    try:
        values = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{kind}: the request is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{kind}: the request must be a JSON object, not {type(values).__name__}")
    return values


def check_json(kind: str, body: bytes) -> None:
    """Raise ConfigError for JSON that would be checked for minutes: pydantic collects the errors of every element of every list."""
    if body.count(b"{") <= MAX_ELEMENTS_CHECKED and body.count(b",") <= MAX_ELEMENTS_CHECKED:
        return
    count, found = 0, list[tuple[str, Any]]([("", read_json(kind, body))])
    while found:
        key, value = found.pop()
        if isinstance(value, list) and key in _NUMBER_LISTS and {*map(type, value)} <= _NUMBER_LISTS[key]:
            continue
        if isinstance(value, list | dict):
            count += len(value)
            found.extend(((key, x) for x in value) if isinstance(value, list) else value.items())
    if count > MAX_ELEMENTS_CHECKED:
        raise ConfigError(
            f"{kind}: the request has {count:,} elements, without the numbers of tokens and data: at most "
            f"{MAX_ELEMENTS_CHECKED:,} are read"
        )


_NUMBER_LISTS: Mapping[str, set[type]] = {
    "tokens": {int},
    "data": {int, float},
    "sparse_crow_indices": {int},
    "sparse_col_indices": {int},
}

REQUESTS: Mapping[str, Any] = {
    "create_session": types.CreateSessionRequest,
    "session_heartbeat": types.SessionHeartbeatRequest,
    "create_model": types.CreateModelRequest,
    "get_info": types.GetInfoRequest,
    "unload_model": types.UnloadModelRequest,
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
    "load_weights": types.LoadWeightsRequest,
    "create_sampling_session": types.CreateSamplingSessionRequest,
    "join_sampling_session": types.JoinSamplingSessionRequest,
    "asample": types.SampleRequest,
    "retrieve_future": types.FutureRetrieveRequest,
}


def parse_request_address(kind: str, body: bytes, content_type: str) -> tuple[str, int]:
    """Return (model id, sequence number) of a training request."""
    if PROTOBUF in content_type:
        message = _parse_message(body)
        return message.model_id, message.seq_id
    values = read_json(kind, body)
    if not isinstance(values.get("model_id"), str):
        raise ConfigError(f"{kind}: model_id must be text")
    sequence = values.get("seq_id")
    if type(sequence) is not int or sequence < 1:
        raise ConfigError(f"{kind}: seq_id must be a whole number, at least 1, not {str(sequence)[:40]}")
    return values["model_id"], sequence


def adds_gradient(kind: str, body: bytes, content_type: str) -> bool:
    """Return whether a request is to add to the gradient; in doubt it is."""
    if kind != "forward_backward" or PROTOBUF not in content_type:
        return kind == "forward_backward"
    try:
        return not _parse_message(body).forward_only
    except ConfigError:
        return True


def _parse_message(body: bytes) -> Any:
    message = pb.ForwardBackwardRequest()
    try:
        _check_messages(body, message.DESCRIPTOR)
        message.ParseFromString(body)
    except DecodeError as error:
        raise ConfigError(f"forward_backward: the request is no protobuf message of that kind ({error})") from error
    return message


def _check_messages(body: bytes, descriptor: Any) -> None:
    """Raise ConfigError for too many messages within a message, before memory is taken for them; what is malformed is left to
    protobuf."""
    count, spans = 0, [(0, len(body), descriptor)]
    while spans:
        at, end, kind = spans.pop()
        while at < end:
            key, at = _read_varint(body, at)
            if (wire_type := key & 7) == 0:
                _, at = _read_varint(body, at)
            elif wire_type in (1, 5):
                at += 8 if wire_type == 1 else 4
            elif wire_type == 2:
                length, at = _read_varint(body, at)
                field = kind.fields_by_number.get(key >> 3)
                if field is not None and field.message_type is not None:
                    count += 1
                    if count > MAX_MESSAGES:
                        raise ConfigError(
                            f"forward_backward: the request has more than {MAX_MESSAGES:,} parts: send less data at a time"
                        )
                    spans.append((at, min(at + length, end), field.message_type))
                at += length
            else:
                return


def _read_varint(body: bytes, at: int) -> tuple[int, int]:
    """Return (a number, where the next field is)."""
    number = shift = 0
    while at < len(body) and shift < 70:
        byte = body[at]
        number, at, shift = number | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            break
    return number, at


# Chunks.

_REFUSED_CHUNKS = {
    "image_asset_pointer": "an address of an image, and this server fetches nothing: send an ImageChunk with the file",
    "dmel": "audio, which this server does not read: leave it out",
}
_NO_IDS = torch.zeros(0, dtype=torch.int64)


def _refuse_chunk(kind: str | None, where: str) -> ConfigError:
    reason = _REFUSED_CHUNKS.get(str(kind), f"of the kind {kind!r}: this server reads text and images")
    return ConfigError(f"{where} is {reason}")


def _picture_chunk(data: bytes, expected_tokens: int | None, where: str) -> PictureChunk:
    """Return an image as a request has it. Its format is read from the file, whatever the request calls it."""
    if not data:
        raise ConfigError(f"{where} is an image without data: send its file's contents")
    return PictureChunk(Picture(data=data, source=where), expected_tokens)


def _read_chunk(chunk: Any, where: str) -> Tensor | PictureChunk:
    """Return a chunk of a JSON request: one of the SDK's types."""
    if isinstance(chunk, types.EncodedTextChunk):
        return torch.tensor(chunk.tokens, dtype=torch.int64)
    if isinstance(chunk, types.ImageChunk):
        return _picture_chunk(chunk.data, chunk.expected_tokens, where)
    raise _refuse_chunk(chunk.type, where)


# Training.


def parse_pass(body: bytes, content_type: str) -> PassRequest:
    """Parse a forward_backward request. Raises ConfigError for one that is malformed or has other chunks."""
    if PROTOBUF not in content_type:
        return _parse_json_pass(body)
    message = _parse_message(body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    try:
        data = [_parse_datum(i, datum) for i, datum in enumerate(message.data)]
    except ValueError as error:  # bytes that are no whole numbers
        raise ConfigError(f"forward_backward: a tensor's bytes are malformed ({error})") from error
    return PassRequest(data, message.loss_fn, config, not message.forward_only)


def _parse_datum(index: int, message: Any) -> Datum:
    chunks = [_parse_chunk(chunk, f"datum {index}, chunk {i}") for i, chunk in enumerate(message.model_input)]
    inputs = {name: _parse_tensor(x, f"datum {index}: {name}") for name, x in message.loss_fn_inputs.items()}
    return _make_datum(index, chunks, inputs)


def _parse_chunk(chunk: Any, where: str) -> Tensor | PictureChunk:
    kind = chunk.WhichOneof("chunk")
    if kind == "encoded_text":
        return torch.from_numpy(np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).astype(np.int64))
    if kind != "image":
        raise _refuse_chunk(kind, where)
    image = chunk.image
    if image.HasField("override_dimensions"):
        raise ConfigError(
            f"{where}: override_dimensions is not available here: send the image in the size that it is to have"
        )
    expected_tokens = image.expected_tokens if image.HasField("expected_tokens") else None
    return _picture_chunk(image.data, expected_tokens, where)


def _make_datum(index: int, chunks: Sequence[Tensor | PictureChunk], inputs: Mapping[str, Tensor]) -> Datum:
    parts = ModelInputParts(tuple(chunks))
    if parts.ids is None:
        return Datum(_NO_IDS, inputs, parts=parts)
    if not len(parts.ids):
        raise ConfigError(f"datum {index} has no tokens")
    return Datum(parts.ids, inputs)


_DTYPES: Mapping[int, Any] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


def _parse_tensor(message: Any, what: str) -> Tensor:
    """Return a dense tensor; what a sparse one does not list is 0."""
    if message.dtype not in _DTYPES:
        raise ConfigError(f"{what} has an unknown type of numbers")
    dtype = np.dtype(_DTYPES[message.dtype])
    shape = tuple(message.shape)
    if math.prod(shape) > MAX_ELEMENTS:
        raise ConfigError(f"{what} has the shape {list(shape)}: at most {MAX_ELEMENTS:,} numbers are read")
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        rows, columns = (np.frombuffer(x, dtype=np.int64) for x in (csr.crow_indices, csr.col_indices))
        values = np.frombuffer(csr.values, dtype=dtype)
        valid = len(shape) == 2 and len(rows) == shape[0] + 1 and len(columns) == len(values) == int(rows[-1])
        if (
            not valid
            or (np.diff(rows) < 0).any()
            or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1])
        ):
            raise ConfigError(f"{what} is a sparse tensor whose indices do not fit its shape {list(shape)}")
        dense = np.zeros(shape, dtype=dtype)
        dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    else:
        dense = np.frombuffer(message.dense, dtype=dtype)
        if shape and int(np.prod(shape)) != dense.size:
            raise ConfigError(f"{what} has {dense.size} numbers, and its shape is {list(shape)}")
        dense = dense.reshape(shape) if shape else dense
    if dense.dtype == np.int32:
        dense = dense.astype(np.int64)
    return torch.from_numpy(dense.copy())


def _parse_json_pass(body: bytes) -> PassRequest:
    """Parse the form that older clients send."""
    try:
        values = read_json("forward_backward", body)
        given = values.get("forward_backward_input") or values["forward_input"]
        data = []
        for i, datum in enumerate(given["data"]):
            chunks = [
                _parse_json_chunk(chunk, f"datum {i}, chunk {j}")
                for j, chunk in enumerate(datum["model_input"]["chunks"])
            ]
            inputs = {}
            for name, x in datum["loss_fn_inputs"].items():
                if x.get("sparse_crow_indices") is not None:
                    raise ConfigError(f"datum {i}: {name} is sparse, which JSON requests cannot be here")
                dtype = torch.int64 if x["dtype"] == "int64" else torch.float32
                tensor = torch.tensor(x["data"], dtype=dtype)
                inputs[name] = tensor.reshape(x["shape"]) if x.get("shape") else tensor
            data.append(_make_datum(i, chunks, inputs))
        return PassRequest(data, given["loss_fn"], given.get("loss_fn_config") or {}, "forward_input" not in values)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the request is malformed ({type(error).__name__}: {error})") from error


def _parse_json_chunk(chunk: Mapping[str, Any], where: str) -> Tensor | PictureChunk:
    if "tokens" in chunk:  # older clients do not send its type
        return torch.tensor(chunk["tokens"], dtype=torch.int64)
    if chunk.get("type") != "image":
        raise _refuse_chunk(chunk.get("type"), where)
    return _read_chunk(types.ImageChunk.model_validate(chunk), where)


def format_pass(logprobs: Sequence[Tensor], metrics: Mapping[str, float]) -> Answer:
    """Return the answer to forward or forward_backward, with [T] or [T, K] log-probabilities of each datum."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        message.metrics[name] = value
    for x in logprobs:  # a record each, as their last dimensions may differ
        array = x.float().contiguous().numpy()
        record = message.loss_fn_outputs.add()
        record.num_datums = 1
        field = record.fields["logprobs"]
        field.data = array.tobytes()
        field.offsets = np.array([0, array.nbytes], dtype=np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(array.shape[1:])
    return Answer(PROTOBUF, message.SerializeToString())


def parse_adam(request: Any) -> AdamParams:
    """Return the settings of an optim_step request."""
    if not isinstance(request.optim_params, types.AdamParams):
        raise ConfigError(f"the optimizer {request.optim_params.type!r} is not available here: use AdamParams")
    return AdamParams(**request.optim_params.model_dump())


def parse_adapter(request: Any) -> AdapterSpec | None:
    """Return the adapter that a create_model request asks for; None for rank 0 or no configuration: all weights train."""
    if request.optimizer_config.type != "adamw":
        raise ConfigError(f"the optimizer {request.optimizer_config.type!r} is not available here: use adamw")
    lora = request.lora_config
    if lora is None or lora.rank == 0:
        return None
    seed = lora.seed if lora.seed is not None else int(np.random.default_rng().integers(2**31))
    return AdapterSpec(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed)


# Sampling.


def parse_sample(request: Any) -> SampleQuery:
    """Return the query of an asample request; without a seed, its `key` is to be given. Raises ConfigError for what this server
    does not do."""
    try:
        return _parse_sample(request)
    except (ValueError, RuntimeError, OverflowError) as error:  # numbers that do not fit a tensor or its shape
        if isinstance(error, PolicygradError):
            raise
        raise ConfigError(f"asample: the request is malformed ({error})") from error


def _parse_sample(request: Any) -> SampleQuery:
    if request.record_stability_info:
        raise ConfigError(
            "record_stability_info=True records what loss_fn='stable_reinforce' needs, whose definition is not public: leave it "
            "out, and train with another loss"
        )
    _check_range("num_samples", request.num_samples, 1, MAX_SAMPLES)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        _check_range(name, getattr(request, name), 0, MAX_TOP)
    if request.sampling_params.max_tokens is not None:
        _check_range("max_tokens", request.sampling_params.max_tokens, 1, 2**31)
    chunks = [_read_chunk(chunk, f"the prompt's chunk {i}") for i, chunk in enumerate(request.prompt.chunks)]
    parts = ModelInputParts(tuple(chunks))
    targets = None
    if request.target_prompt_logprobs is not None:
        shape = request.target_prompt_logprobs.shape or []
        _check_range("the size of target_prompt_logprobs", math.prod(shape), 0, MAX_ELEMENTS)
        targets = request.target_prompt_logprobs.to_torch(-1)  # where a sparse tensor lists nothing
        if targets.dtype != torch.int64 or targets.ndim != 2:
            raise ConfigError(
                f"target_prompt_logprobs must be int64 [P − 1, K], not {targets.dtype} {list(targets.shape)}"
            )
    params = request.sampling_params
    stop_tokens, stop_texts = None, tuple[str, ...]()
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if stop is not None:
        stop_texts = tuple(s for s in stop if isinstance(s, str))
        stop_tokens = frozenset(int(s) for s in stop if not isinstance(s, str))
        for token in stop_tokens:
            _check_range("a stop token", token, 0, 2**31)
    sampling = SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        max_tokens=params.max_tokens or 1,
    )
    return SampleQuery(
        prompt=_NO_IDS if parts.ids is None else parts.ids,
        num_samples=request.num_samples,
        sampling=sampling,
        max_tokens=params.max_tokens,
        key=(0, (params.seed or 0) % 2**63),
        stop_tokens=stop_tokens,
        stop_texts=stop_texts,
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last=request.prompt_logprobs_last_n,
        top_prompt_logprobs=request.topk_prompt_logprobs,
        top_sample_logprobs=request.topk_sample_logprobs,
        target_ids=targets,
        prompt_draws=request.prompt_alt_tokens_k,
        parts=parts if parts.ids is None else None,
    )


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} must be from {least} to {most:,}, not {value}")


def format_sample(answer: SampleAnswer) -> Answer:
    """Return the answer to asample."""
    message = pb.SampleResponse()
    for sample in answer.samples:
        sequence = message.sequences.add()
        sequence.stop_reason = pb.STOP_REASON_STOP if sample.finish_reason == "stop" else pb.STOP_REASON_LENGTH
        sequence.tokens = sample.tokens.to(torch.int32).numpy().tobytes()
        sequence.logprobs = sample.logprobs.float().numpy().tobytes()
        if sample.top is not None:
            _write_top(sequence.topk_sampled_logprobs, sample.top)
    if answer.prompt_logprobs is not None:
        message.prompt_logprobs = answer.prompt_logprobs.float().numpy().tobytes()
    if answer.top_prompt is not None:
        _write_top(message.topk_prompt_logprobs, answer.top_prompt)
    if answer.target_logprobs is not None:
        _write_dense(message.target_prompt_logprobs, answer.target_logprobs)
    if answer.drawn_ids is not None and answer.drawn_logprobs is not None:
        _write_dense(message.prompt_alt_tokens.tokens, answer.drawn_ids)
        _write_dense(message.prompt_alt_tokens.logprobs, answer.drawn_logprobs)
    return Answer(PROTOBUF, message.SerializeToString())


def _write_top(message: Any, top: TopTokens) -> None:
    message.token_ids, message.logprobs = top.ids.numpy().tobytes(), top.logprobs.numpy().tobytes()
    message.length, message.k = top.ids.shape


def _write_dense(message: Any, tensor: Tensor) -> None:
    is_integer = not tensor.is_floating_point()
    message.dtype = pb.DTYPE_INT64 if is_integer else pb.DTYPE_FLOAT32
    message.dense = (tensor.long() if is_integer else tensor.float()).contiguous().numpy().tobytes()
    message.shape.extend(tensor.shape)


# JSON answers.


def format_json(**values: Any) -> Answer:
    return Answer(JSON, json.dumps(values).encode())


def read_error(answer: Answer) -> str:
    """Return the error that an answer tells of; empty for a result."""
    values = json.loads(answer.body) if answer.content_type == JSON else {}
    return str(values.get("error", ""))


def format_error(text: str, *, is_users: bool) -> Answer:
    """Return what a request that failed has as its result."""
    return format_json(error=text, category="user" if is_users else "server")
