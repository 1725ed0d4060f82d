"""MCP servers whose replies are odd, large, or pictures: the policy reads what can be read, and an error of the rest."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import policygrad as pg
from doubles import mcp_server, odd_mcp_server
from doubles.scripted_sampler import conversation
from policygrad.environments import mcp
from policygrad.environments.tools import Tool
from policygrad.models.chat.turns import ToolCall
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.utils.message_parts import UNSEEN_PICTURE

QUESTION = pg.Example(({"role": "user", "content": "Look."},), {})
ODD = (sys.executable, odd_mcp_server.__file__)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("tiny", load_model("tiny"))


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def play(tokenizer: Tokenizer, server: pg.McpTools, *calls: str, **options: Any) -> tuple[list[str], dict[str, float]]:
    """What the policy reads after each call, and the episode's metrics."""
    with pg.ToolUse(
        (server,), lambda answer, example: 1.0, max_turns=99, **{"tools_in_prompt": False} | options
    ) as environment:
        group, _ = conversation(tokenizer, environment, QUESTION, [*calls, "done"], max_tokens=600)
    (trajectory,) = group.trajectories
    assert trajectory.failure == ""
    read = [tokenizer.decode(s.visible_tokens) for s in trajectory.segments if not s.is_sampled]
    return read[-len(calls) :], {name: value for name, value in trajectory.metrics.items() if value}


def test_a_reply_is_read_however_it_is_written(tokenizer: Tokenizer) -> None:
    ways = list(odd_mcp_server.WAYS)
    read, metrics = play(tokenizer, pg.McpTools(ODD, shared=True), *map(call, ways))
    expected = {"surrogate": "d\ufffdne", "latin1": "d\ufffdn"}
    for way, text in zip(ways, read, strict=True):
        assert expected.get(way, "done") in text, way
    assert metrics == {"calls": float(len(ways))}


def test_two_tools_of_one_name_are_refused_unless_others_are_named() -> None:
    twice = (*ODD, "plain", "bom", "plain")
    with (
        pytest.raises(pg.ConfigError, match="two tools named 'plain'"),
        pg.ToolUse((pg.McpTools(twice),)) as environment,
    ):
        asyncio.run(environment(QUESTION).reset())
    with pg.ToolUse((pg.McpTools(twice, names=("bom",)),)) as environment:
        environment(QUESTION)


@pytest.mark.full
def test_a_picture_is_described_to_a_model_that_reads_text(tokenizer: Tokenizer) -> None:
    server = pg.McpTools((sys.executable, mcp_server.__file__), names=("show",), shared=True)
    for listed in (True, False):
        read, metrics = play(
            tokenizer, server, call("show", kind="picture"), call("show", kind="broken"), tools_in_prompt=listed
        )
        assert f"a square:{UNSEEN_PICTURE}" in read[0].replace("\n", "")
        assert "cannot be decoded" in read[1]
        assert "object at 0x" not in read[1]
        assert metrics == {"calls": 2.0, "calls_raised": 1.0, "unseen_pictures": 1.0}


def test_a_whole_number_with_a_point_is_an_integer() -> None:
    def double(number: int) -> int:
        """Doubles.

        Args:
            number: A number.
        """
        assert isinstance(number, int)
        return 2 * number

    tool = Tool.from_function(double)
    assert asyncio.run(tool(ToolCall("double", {"number": 5.0}), 10)).text == "10"
    for value in (5.5, True, "5"):
        assert "of type integer" in asyncio.run(tool(ToolCall("double", {"number": value}), 10)).text


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of an application, served by a thread of this process."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class Compressing:
    """An application whose answers to calls are, or claim to be, compressed."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def mark(message: Any) -> None:
            if message["type"] == "http.response.start" and self.is_on:
                message = {**message, "headers": [*message["headers"], (b"content-encoding", b"gzip")]}
            await send(message)

        await self.app(scope, receive, mark)

    is_on = False


def test_a_message_over_http_is_limited_in_size_and_not_compressed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "MAX_MESSAGE_BYTES", 100_000)
    app = Compressing(mcp_server.server.streamable_http_app())
    with serving(app) as address:
        server = pg.McpTools(f"{address}/mcp")
        small, large = call("repeats", letters=40_000), call("repeats", letters=300_000)
        read, metrics = play(tokenizer, server, small, small, large, max_output_chars=10)
        assert ["error" in text for text in read] == [False, False, True]
        assert metrics["calls"] == 3.0
        assert metrics.get("calls_raised", 0) + metrics.get("calls_slow", 0) == 1.0
        app.is_on = True
        with pytest.raises(pg.EngineError, match="compressed"), server:
            pass
