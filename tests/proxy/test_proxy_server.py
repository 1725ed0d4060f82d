"""The proxy's server: whatever a client sends costs its own request, and nothing of it stays."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from policygrad.models.chat.turns import ToolCall
from policygrad.proxy import server
from policygrad.proxy.formats import ApiError, ChatChoice, ChatReply, ChatRequest
from policygrad.proxy.server import Proxy

pytest.importorskip("uvicorn")
USER = [{"role": "user", "content": "1 + 1"}]
CHAT = "/v1/chat/completions"
TOOL_OF_ALL = "f"


def reply(request: ChatRequest) -> ChatReply:
    text = f"to {request.prompt if isinstance(request.prompt, str) else len(request.prompt)}"
    calls = (ToolCall("f", {"a": 2}),) if request.tools else ()
    end = "tool_calls" if calls else "stop"
    return ChatReply(
        (
            ChatChoice(
                text, end, (5, 6), (-1.0, -2.0), ("a", "b"), "" if calls else text, calls, ("call_1",) * len(calls)
            ),
        ),
        (1, 2),
    )


def answered(request: ChatRequest) -> Future[ChatReply]:
    future: Future[ChatReply] = Future()
    future.set_result(reply(request))
    return future


class Served:
    """A proxy with clients of the key `k`, and what its handler was told."""

    def __init__(self) -> None:
        self.proxy = Proxy()
        self.answer: Callable[[ChatRequest], Future[ChatReply]] = answered
        self.errors: list[ApiError] = []
        self.proxy.add("k", lambda request: self.answer(request), self.errors.append)
        self.host, self.port = self.proxy.url.removeprefix("http://").split(":")

    def send(self, path: str, body: Any, key: str = "k", **headers: str) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with closing(http.client.HTTPConnection(self.host, int(self.port))) as connection:
            connection.request("POST", path, data, {"authorization": f"Bearer {key}", **headers})
            response = connection.getresponse()
            return response.status, response.read().decode()

    def ask(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        status, text = self.send(path, body, **headers)
        return status, json.loads(text)

    def open(self, text: bytes) -> socket.socket:
        """A connection on which only this much is sent."""
        connection = socket.create_connection((self.host, int(self.port)))
        connection.sendall(text)
        return connection

    def run_in_loop(self, function: Callable[[], Any]) -> Any:
        """What a function returns in the server's thread."""
        done: Future[Any] = Future()
        self.proxy._loop.call_soon_threadsafe(lambda: done.set_result(function()))
        return done.result(30)


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    served = Served()
    yield served
    served.proxy.close()


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    shared.answer, shared.errors[:] = answered, []
    yield shared
    for _ in range(10_000):  # a stream is over once its last part was sent
        if not (left := shared.run_in_loop(lambda: +shared.proxy._pending + shared.proxy._bodies)):
            break
    assert not left


def test_a_handler_that_raises_answers_500_in_the_format_and_does_not_use_up_its_key(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: ChatRequest) -> Future[ChatReply]:
        raise TypeError("broken")

    served.answer = fail
    for _ in range(server.MAX_PENDING + 1):
        status, body = served.ask(CHAT, {"messages": USER})
        assert status == 500
    assert "TypeError: broken" in body["error"]["message"]
    assert served.ask("/v1/messages", {"messages": USER, "max_tokens": 1})[1]["error"]["type"] == "api_error"
    served.answer = answered
    assert served.ask(CHAT, {"messages": USER})[0] == 200
    assert [e.status for e in served.errors] == [500] * (server.MAX_PENDING + 2)
    assert caplog.text.count("Traceback") == 1  # each kind once


def test_requests_beyond_the_limit_are_refused_and_those_of_clients_that_left_are_cancelled(served: Served) -> None:
    held, arrived = list[Future[ChatReply]](), threading.Semaphore(0)

    def hold(request: ChatRequest) -> Future[ChatReply]:
        held.append(Future())
        arrived.release()
        return held[-1]

    served.answer = hold
    data = json.dumps({"messages": USER, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-length: {len(data)}\r\n\r\n"
    clients = [served.open(head.encode() + data) for _ in range(server.MAX_PENDING)]
    for _ in clients:
        assert arrived.acquire(timeout=30)
    status, body = served.ask(CHAT, {"messages": USER})
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")
    left = threading.Semaphore(0)
    for future in held:
        future.add_done_callback(lambda future: left.release())
    for client in clients:
        client.close()
    for _ in clients:
        assert left.acquire(timeout=30)
    assert all(future.cancelled() for future in held)


def test_a_refused_stream_has_the_status_of_its_refusal(served: Served) -> None:
    def refuse(request: ChatRequest) -> Future[ChatReply]:
        future: Future[ChatReply] = Future()
        future.set_exception(ApiError("over", 403, "episode_over"))
        return future

    served.answer = refuse
    status, body = served.ask(CHAT, {"messages": USER, "stream": True})
    assert (status, body["error"]["type"], body["error"]["code"]) == (403, "permission_error", "episode_over")


def test_unknown_paths_and_models_are_answered_in_json(served: Served) -> None:
    status, body = served.ask("/v1/embeddings", {"input": "a"})
    assert (status, body["error"]["type"]) == (404, "not_found_error")
    assert "POST /v1/chat/completions" in body["error"]["message"]
    status, body = served.ask("/v1/messages/batches", {}, **{"anthropic-version": "2023-06-01"})
    assert (status, body["type"]) == (404, "error")
    assert served.ask(CHAT + "/", {"messages": USER})[0] == 404
    with closing(http.client.HTTPConnection(served.host, int(served.port))) as connection:
        connection.request("GET", "/v1/models/org/name")
        assert json.loads(connection.getresponse().read())["id"] == "org/name"
        connection.request("GET", CHAT)
        response = connection.getresponse()
        assert (response.status, "error" in json.loads(response.read())) == (405, True)


def test_large_deep_and_unreadable_bodies_cost_their_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY", 10_000)
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert served.ask(CHAT, {"messages": USER, "tools": [tool]})[0] == 400
    assert served.ask(CHAT, b"{" + b" " * 20_000)[0] == 413
    assert served.ask(CHAT, b"{")[0] == 400
    assert served.ask(CHAT, {"messages": USER}, key="wrong")[0] == 401
    status, body = served.ask("/v1/completions", b'{"prompt": "a\\ud83d", "model": "m\\ud83d"}')
    assert (status, body["choices"][0]["text"], body["model"]) == (200, "to a\ufffd", "m\ufffd")


def test_bodies_that_are_being_sent_are_limited_together(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODIES", 50_000)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-length: 40000\r\n\r\n".encode()
    opened = [served.open(head + b"x" * 30_000)]
    while served.run_in_loop(lambda: served.proxy._bodies["k"]) < 30_000:
        pass
    opened.append(served.open(head + b"x" * 30_000))
    answer = opened[1].recv(65536).decode()
    assert "429" in answer.partition("\r\n")[0]
    assert served.run_in_loop(lambda: served.proxy._bodies["k"]) == 30_000
    for connection in opened:
        connection.close()
    while served.run_in_loop(lambda: served.proxy._pending["k"]):
        pass


def test_several_prompts_are_several_requests_and_one_answer(served: Served) -> None:
    _, body = served.ask("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 2})
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "to one"), (1, "to two")]
    assert body["usage"]["prompt_tokens"] == 4


def test_responses_are_continued_by_id_by_reference_and_after_a_stream(served: Served) -> None:
    path = "/v1/responses"
    _, first = served.ask(path, {"input": "x"})
    _, second = served.ask(path, {"input": "y", "previous_response_id": first["id"]})
    assert second["output"][0]["content"][0]["text"] == "to 3"
    _, text = served.send(path, {"input": "x", "stream": True})
    last = json.loads([line for line in text.splitlines() if line.startswith("data: ")][-1][6:])
    reference = {"type": "item_reference", "id": last["response"]["output"][0]["id"]}
    status, third = served.ask(path, {"input": [*USER, reference, *USER]})
    assert (status, third["output"][0]["content"][0]["text"]) == (200, "to 3")
    _, unkept = served.ask(path, {"input": "x", "store": False})
    status, body = served.ask(path, {"input": "y", "previous_response_id": unkept["id"]})
    assert (status, "store=false" in body["error"]["message"]) == (404, True)


def test_a_proxy_without_keys_answers_no_page_of_another_site() -> None:
    proxy = Proxy(model="m", needs_keys=False)
    try:
        host, port = proxy.url.removeprefix("http://").split(":")
        for headers, status in (
            ({}, 200),
            ({"host": f"localhost:{port}"}, 200),
            ({"host": "rebound.example"}, 403),
            ({"origin": "https://elsewhere.example"}, 403),
        ):
            with closing(http.client.HTTPConnection(host, int(port))) as connection:
                connection.request("GET", "/v1/models", headers=headers)
                assert connection.getresponse().status == status, headers
    finally:
        proxy.close()


def test_headers_without_end_are_refused(served: Served) -> None:
    with closing(served.open(b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000)) as connection:
        assert b" 431 " in connection.recv(1000)


def test_calls_are_streamed_to_the_official_clients(served: Served) -> None:
    import anthropic
    import openai

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client = openai.OpenAI(base_url=f"{served.proxy.url}/v1", api_key="k", max_retries=0)
    with client.responses.stream(
        model="m", input="x", tools=[{"type": "function", "name": "f", "parameters": schema, "strict": False}]
    ) as stream:
        kinds = [event.type for event in stream]
        item = stream.get_final_response().output[0]
    assert "response.function_call_arguments.done" in kinds
    assert (item.type, getattr(item, "arguments", "")) == ("function_call", '{"a": 2}')
    with client.chat.completions.stream(
        model="m",
        messages=[{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}],
    ) as chat:
        message = chat.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"a": 2}'
    other = anthropic.Anthropic(base_url=served.proxy.url, api_key="k", max_retries=0)
    tool: Any = {"name": "f", "input_schema": schema}
    with other.messages.stream(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}], tools=[tool]
    ) as spoken:
        block = spoken.get_final_message().content[0]
    assert (block.type, getattr(block, "input", None)) == ("tool_use", {"a": 2})
    assert other.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x"}]).input_tokens == 2
    client.close()
    other.close()


def test_what_clients_send_is_answered(served: Served) -> None:
    """Requests as frameworks sent them (the last of a conversation with a tool's result), noted once each."""
    lines = Path(__file__).with_name("client_requests.jsonl").read_text().splitlines()
    for sent in map(json.loads, lines):
        body = sent["body"]
        items = body.get("input", [])
        references = [item for item in items if isinstance(item, dict) and item.get("type") == "item_reference"]
        message = {"type": "message", "role": "assistant", "content": "Let me see."}
        kept = {"id": "resp_1", "output": [{**message, "id": item["id"]} for item in references]}
        served.run_in_loop(lambda kept=kept: served.proxy._stored.add("k", {}, kept))
        status, text = served.send(sent["path"], body)
        assert status == 200, (sent["client"], text)
        assert (f'"{TOOL_OF_ALL}"' in text) == bool(body.get("tools")), sent["client"]
    assert served.errors == []
