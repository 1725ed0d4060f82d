"""Requests of clients that mean no good, or are broken: each is answered with what is wrong, and nobody else waits."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serve.running import Running, running
from tinker.proto import tinker_public_pb2 as pb

from policygrad.commands.serve import end_in_time
from policygrad.errors import ConfigError
from policygrad.serve import sample_queue, wire
from policygrad.serve.config import ServeConfig

BIG = 10**40
SAMPLE = {"num_samples": 1, "sampling_params": {"max_tokens": 2}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("serve") / "served") as found:
        yield found


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/api/v1", timeout=60) as client:
        yield client


@pytest.fixture
def ids(http: httpx.Client) -> SimpleNamespace:
    """A session, a model and a sampling session."""
    session = http.post("/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0"}).json()[
        "session_id"
    ]
    given = {"session_id": session, "base_model": "tiny"}
    made = http.post("/create_model", json={**given, "model_seq_id": 0, "lora_config": {"rank": 2, "seed": 1}})
    model = http.post("/retrieve_future", json=made.json()).json()["model_id"]
    sampler = http.post("/create_sampling_session", json={**given, "sampling_session_seq_id": 0}).json()
    return SimpleNamespace(session=session, model=model, sampler=sampler["sampling_session_id"])


def test_no_malformed_request_is_a_bug_of_the_server(http: httpx.Client, ids: SimpleNamespace) -> None:
    """Bodies that are no JSON, too deep or not finite, and values of every wrong kind at every place."""
    chunks = [{"type": "encoded_text", "tokens": [5, 6]}]
    target = {"data": [1], "dtype": "int64", "shape": [1, 1]}
    params = {"max_tokens": 2, "seed": 1, "stop": ["x"]}
    requests: dict[str, dict[str, Any]] = {
        "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0"},
        "forward_backward": {"model_id": ids.model, "seq_id": 2, "forward_backward_input": {}},
        "save_weights_for_sampler": {"model_id": ids.model, "seq_id": 2, "path": "a", "ttl_seconds": 5},
        "asample": {
            "sampling_session_id": ids.sampler,
            "seq_id": 1,
            "num_samples": 1,
            "prompt": {"chunks": chunks},
            "sampling_params": params,
            "target_prompt_logprobs": target,
        },
        "retrieve_future": {"request_id": f"{ids.model}:²"},
        "cancel_future": {"request_id": "x"},
        "weights_info": {"tinker_path": "x"},
    }
    broken = (b"", b"null", b"{", b"\xff\xfe", b'{"a":' * 2000, b"[" * 100_000, b"9" * 5000, b"\x00" * 10, b"NaN")
    odd = (None, True, -1, 10**8, BIG, 1.5, float("nan"), "", "\ud800", "²", "a" * 300, [], [None], {}, {"a": 1})
    for kind, request in requests.items():
        bodies = [json.dumps(changed).encode() for place in places(request) for changed in put(request, place, odd)]
        for body in (*broken, b'{"model_id": "a", "seq_id": ' + b"9" * 5000 + b"}", *bodies):
            if kind == "retrieve_future" and body == json.dumps({"request_id": f"{ids.model}:0"}).encode():
                continue
            answer = http.post(f"/{kind}", content=body, headers={"content-type": "application/json"})
            assert answer.status_code < 500, (kind, body[:200], answer.text)
            assert answer.status_code < 400 or answer.json()["error"], (kind, body[:200])


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*before, key)
        yield from places(inner, (*before, key))


def put(request: dict[str, Any], place: tuple[Any, ...], odd: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    for value in odd:
        changed = json.loads(json.dumps(request))
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        yield changed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", {"chunks": [{}] * 164_000}),  # four errors for each kind of chunk: 22 s to list those of 492 KB
        ("prompt", {"chunks": [None] * 98_000}),
        ("prompt", {"chunks": [{"type": "encoded_text", "tokens": [1]}] * 12_600}),
        ("prompt", {"chunks": [{"type": "encoded_text", "tokens": ["x"] * 120_000}]}),
        ("sampling_params", {"stop": [{}] * 160_000}),
        ("tokens", [[[]] * 100] * 1000),
    ],
)
def test_json_that_takes_long_to_check_is_refused_before(field: str, value: Any) -> None:
    body = json.dumps({**SAMPLE, "prompt": {"chunks": []}, field: value}, separators=(",", ":")).encode()
    with pytest.raises(ConfigError, match=r"elements, without the numbers|too many parts"):
        wire.parse("asample", body)


def test_a_long_prompt_is_no_attack() -> None:
    chunks = [{"type": "encoded_text", "tokens": list(range(1000))} for _ in range(1000)]
    given = wire.parse("asample", json.dumps({**SAMPLE, "prompt": {"chunks": chunks}}).encode())
    assert len(wire.parse_sample(given).prompt) == 10**6


def test_a_message_of_empty_parts_is_refused_before_it_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes a datum, or a chunk of one, and a hundred in memory."""
    monkeypatch.setattr(wire, "MAX_MESSAGES", 1000)
    empty = pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    for _ in range(3):
        empty.data.add().model_input.add()
    assert wire.parse_request_address("forward_backward", empty.SerializeToString(), wire.PROTOBUF) == ("m", 1)
    datum = pb.ForwardBackwardRequest()
    datum.data.add()
    many = datum.SerializeToString() * (wire.MAX_MESSAGES + 1)
    chunk = pb.ForwardBackwardRequest().data.add()
    chunk.model_input.add()
    inner = chunk.SerializeToString() * (wire.MAX_MESSAGES + 1)
    length, varint = len(inner), bytearray()
    while length > 127:
        varint, length = varint + bytes([length & 127 | 128]), length >> 7
    nested = datum.SerializeToString()[:1] + bytes([*varint, length]) + inner
    for body in (many, nested):
        with pytest.raises(ConfigError, match="more than 1,000 parts"):
            wire.parse_request_address("forward_backward", body, wire.PROTOBUF)


def test_a_packed_request_is_bounded_unpacked(http: httpx.Client) -> None:
    zstandard = pytest.importorskip("zstandard")
    headers = {"content-encoding": "zstd"}
    bomb = zstandard.ZstdCompressor().compress(b" " * (2**29 + 1))
    answer = http.post("/create_session", content=bomb, headers=headers)
    assert (answer.status_code, "larger than" in answer.json()["error"]) == (413, True)
    good = zstandard.ZstdCompressor().compress(b'{"tags": [], "user_metadata": {}, "sdk_version": "0"}')
    assert http.post("/create_session", content=good, headers=headers).status_code == 200
    assert http.post("/create_session", content=b"x", headers=headers).status_code == 400


def test_a_request_that_no_file_can_be_named_after_is_refused(http: httpx.Client, ids: SimpleNamespace) -> None:
    for number, words in ((10**8, "at most 99,999,999"), (70_000, "too far ahead")):
        request = {"model_id": ids.model, "seq_id": number, "adam_params": {}}
        answer = http.post("/optim_step", json=request)
        assert (answer.status_code, words in answer.json()["error"]) == (400, True)


def test_a_full_disk_is_told(
    http: httpx.Client, ids: SimpleNamespace, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(server.service.store, "log_request", fail)
    answer = http.post("/optim_step", json={"model_id": ids.model, "seq_id": 1, "adam_params": {}})
    assert (answer.status_code, "disk" in answer.json()["error"]) == (507, True)


def test_bytes_that_wait_for_sampling_are_bounded(
    http: httpx.Client, ids: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_queue, "MAX_WAITING_BYTES", 100)
    monkeypatch.setattr(sample_queue.SampleQueue, "_take", lambda queue: [])  # nothing is answered
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    statuses = [
        http.post(
            "/asample", json={**SAMPLE, "sampling_session_id": ids.sampler, "seq_id": i, "prompt": prompt}
        ).status_code
        for i in (1, 2)
    ]
    assert statuses == [200, 429]


def test_pages_of_other_sites_are_refused(server: Running) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        for method, path in (("GET", "/"), ("POST", "/api/v1/create_session"), ("GET", "/api/v1/healthz")):
            assert httpx.request(method, f"{server.url}{path}", headers=headers, content=b"{}").status_code == 403
    assert httpx.get(f"{server.url}/", headers={"origin": server.url}).status_code == 200


def test_what_others_can_read_is_mentioned(tmp_path: Path) -> None:
    folder, keys = tmp_path / "served", tmp_path / "keys"
    keys.write_text("tml-12345678\n", encoding="utf-8")
    config = ServeConfig(folder=folder, api_keys=keys)
    folder.mkdir(mode=0o700)
    keys.chmod(0o600)
    assert not config.find_exposed()
    keys.chmod(0o644)
    folder.chmod(0o755)
    assert f"chmod 700 {folder}" in config.find_exposed()
    assert f"chmod 600 {keys}" in config.find_exposed()


def test_a_signal_ends_a_server_that_computes() -> None:
    told, ended = list[Any](), threading.Event()
    server = SimpleNamespace(handle_exit=lambda *args: told.append(args))
    end_in_time(server, ended.set, seconds=0.0)
    server.handle_exit(15, None)
    assert ended.wait(60)
    assert told == [(15, None)]
