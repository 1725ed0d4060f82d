"""OpenEnv's protocol, spoken with a connection that is handed in; the real server is in test_real_openenv.py."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policygrad as pg
from policygrad.environments.openenv import (
    SEED_BOUND,
    build_action_schema,
    extract_json_objects,
    parse_value,
    render_observation,
)

TEXT = pg.Example("1 + 1 =\n")
ADDRESS = "http://somewhere:1"
ACTION = {
    "properties": {"guess": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["guess"],
    "additionalProperties": False,
}


class Server:
    """A server's side of any number of connections: `answer(message)` is the reply, an exception hangs up, None says nothing."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.answer = answer
        self.heard: list[dict[str, Any]] = []
        self.addresses: list[str] = []
        self.open = self.farewells = 0

    async def connect(self, address: str, seconds: float) -> Server.Line:
        self.addresses.append(address)
        self.open += 1
        return Server.Line(self)

    class Line:
        def __init__(self, server: Server) -> None:
            self.server, self.replies = server, asyncio.Queue[Any]()

        async def send(self, message: str) -> None:
            received = json.loads(message)
            self.server.heard.append(received)
            if received["type"] == "close":
                self.replies.put_nowait(ConnectionResetError("bye"))
                return
            try:
                reply = self.server.answer(received)
            except ConnectionError as error:
                reply = error
            if reply is not None:
                self.replies.put_nowait(reply)

        async def recv(self) -> Any:
            reply = await self.replies.get()
            self.server.farewells += str(reply) == "bye"
            if isinstance(reply, Exception):
                raise reply
            return reply if isinstance(reply, str) else json.dumps(reply)

        async def close(self) -> None:
            self.server.open -= 1


def seen(observation: Mapping[str, Any], reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def error(message: str, code: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def guessing(message: dict[str, Any]) -> Any:
    """Finds 5; 9 is refused."""
    if message["type"] == "reset":
        return seen({"prompt": "A digit!", "tries": 3})
    guess = int(message["data"]["guess"])
    if guess == 9:
        return error("Invalid message", "VALIDATION_ERROR", errors=[{"loc": ["guess"], "msg": "too large"}])
    return seen({"prompt": "higher" if guess < 5 else "lower"}, reward=float(guess == 5), done=guess == 5)


def played(server: Server, *turns: str, seed: int = 0, **options: Any) -> tuple[Any, list[Any]]:
    given = {"text_field": "guess", "connect": server.connect} | options
    factory = pg.OpenEnv(given.pop("address", ADDRESS), **given)

    async def play() -> tuple[Any, list[Any]]:
        environment = factory(TEXT, seed=seed)
        try:
            first, steps = await environment.reset(), []
            for turn in turns:
                steps.append(await environment.step(pg.Action(turn)))
                if steps[-1].observation is None:
                    break
            return first, steps
        finally:
            await environment.close()

    return asyncio.run(play())


def test_an_episode_is_a_session() -> None:
    server = Server(guessing)
    first, steps = played(server, "3", "9", "5", seed=SEED_BOUND + 12, reset_options={"level": 2})
    assert first.content == "prompt: A digit!\ntries: 3\n"
    assert steps[0].observation.content == "\nhigher\n"
    assert steps[1].observation.content == "\nerror: Invalid message (guess: too large)\n"
    assert [step.metrics["refused"] for step in steps] == [0, 1, 0]
    assert (steps[2].reward, steps[2].stop_reason) == (1.0, "terminated")
    assert server.heard[0] == {"type": "reset", "data": {"level": 2, "seed": 12}}
    assert server.heard[1:] == [
        *({"type": "step", "data": {"guess": guess}} for guess in ("3", "9", "5")),
        {"type": "close"},
    ]
    assert server.addresses == ["ws://somewhere:1/ws"]
    assert server.open == 0
    assert server.farewells == 1  # waited for: then its place is free


def test_custom_action_names_and_turn_limits() -> None:
    _, steps = played(Server(guessing), "1", "2", "3", max_turns=2, describe=lambda o: o["prompt"].upper())
    assert steps[0].observation.content == "\nHIGHER\n"
    assert [(step.stop_reason, step.reward) for step in steps[1:]] == [("turns", 0.0)]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "much"])
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    with pytest.raises(
        pg.EngineError, match=r"somewhere:1 gives the reward (nan|inf|'much'): it must be a finite number"
    ):
        played(Server(lambda m: seen({"prompt": "?"}, reward=reward)), "1")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda m: None, r"http://somewhere:1 did not answer a reset within 0\.05 seconds"),
        (lambda m: ConnectionResetError("gone"), r"closed the connection during a reset \(gone\), in turn 0"),
        (lambda m: "no json", "answers a reset with a message that is not OpenEnv's"),
        (lambda m: {"type": "observation"}, "a message that is not OpenEnv's"),
        (lambda m: ["observation"], "a message that is not OpenEnv's"),
        (
            lambda m: {"type": "observation", "data": {"observation": "text"}},
            "returns the observation 'text': it must be an object",
        ),
        (lambda m: error("2 of 2", "CAPACITY_REACHED"), "no capacity for another session: 2 of 2.*max_concurrent_envs"),
        (lambda m: error("no key", "FACTORY_ERROR"), "cannot start a session: no key"),
        (lambda m: error("seed?", "EXECUTION_ERROR"), "refused to reset: seed?"),
    ],
)
def test_invalid_server_responses_are_reported(answer: Any, says: str) -> None:
    server = Server(answer)
    with pytest.raises(pg.EngineError, match=says):
        played(server, timeout=0.05)
    assert server.open == 0


def test_a_lost_connection_is_reported_with_the_turn() -> None:
    def lost(message: dict[str, Any]) -> Any:
        if message["type"] == "step":
            raise ConnectionResetError("the server died")
        return seen({"prompt": "A digit!"})

    with pytest.raises(pg.EngineError, match=r"closed the connection during a step \(the server died\), in turn 1"):
        played(Server(lost), "1")


def test_a_missing_server_is_refused() -> None:
    async def nobody(address: str, seconds: float) -> Any:
        raise ConnectionRefusedError("refused")

    factory = pg.OpenEnv(ADDRESS, text_field="guess", connect=nobody)
    with pytest.raises(pg.EngineError, match="there is no OpenEnv server at ws://somewhere:1/ws"):
        asyncio.run(factory(TEXT).reset())


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"timeout": 0.0}, {"connect_timeout": -1.0}, {"address": ""}])
def test_invalid_limits_are_refused(options: dict[str, Any]) -> None:
    given = {"address": ADDRESS, "connect": Server(guessing).connect} | options
    with pytest.raises(pg.ConfigError, match="OpenEnv needs an address"):
        pg.OpenEnv(**given)


# --- the schema


@pytest.fixture
def schema() -> Iterator[tuple[str, list[Any]]]:
    """(the address of a server that tells its schema, what it tells)."""
    said: list[Any] = [{"action": ACTION}]

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/schema" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(said[0]).encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", said
    server.shutdown()
    server.server_close()


def test_the_server_s_schema_says_what_an_action_is(schema: tuple[str, list[Any]]) -> None:
    server = Server(guessing)
    _, steps = played(server, "I guess 3.", "none", "it is 5", address=schema[0], text_field=None)
    assert [m["data"] for m in server.heard if m["type"] == "step"] == [{"guess": 3}, {"guess": 5}]
    assert steps[1].observation.content == "\nerror: answer with a whole number\n"
    assert [step.metrics["malformed"] for step in steps] == [0, 1, 0]
    assert steps[2].reward == 1.0


@pytest.mark.parametrize("said", [{}, [], {"action": 3}])
def test_a_server_without_a_schema(schema: tuple[str, list[Any]], said: Any) -> None:
    schema[1][0] = said
    with pytest.raises(pg.EngineError, match=r"/schema does not describe an action"):
        played(Server(guessing), "3", address=schema[0], text_field=None)


def field(kind: Any) -> dict[str, Any]:
    return kind if isinstance(kind, dict) else {"type": kind}


def asked(required: tuple[str, ...] = (), fixed: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    properties = {name: field(kind) for name, kind in fields.items()} | {"metadata": {"type": "object"}}
    defs = {"Way": {"enum": ["left", "right"], "type": "string"}}
    return build_action_schema(
        {"properties": properties, "required": list(required), "$defs": defs}, fixed or {}, ADDRESS
    )


@pytest.mark.parametrize(
    ("action", "text", "read"),
    [
        (asked(message="string"), " hello\n", {"message": "hello"}),
        (asked(message="string", speed="integer"), "hello", {"message": "hello"}),  # the one text
        (asked(("speed",), message="string", speed="integer"), "at 12 please", {"speed": 12}),
        (asked(speed="number"), "-1.5", {"speed": -1.5}),
        (asked(speed="integer"), "1.5", "answer with a whole number"),
        (asked(yes="boolean"), "Yes!", {"yes": True}),
        (asked(yes="boolean"), "no, false", {"yes": False}),
        (asked(yes="boolean"), "maybe", "answer with yes or no"),
        (asked(way={"$ref": "#/$defs/Way"}), "turn left", {"way": "left"}),
        (asked(way={"$ref": "#/$defs/Way"}), "0", "answer with one of left, right"),
        (asked(n={"enum": [1, 2]}), "2", {"n": 2}),
        (asked(text={"anyOf": [{"type": "string"}, {"type": "null"}]}), "a", {"text": "a"}),
        (asked(fixed={"kind": "move"}, kind="string", text="string"), "a", {"kind": "move", "text": "a"}),
        (asked(("x", "y"), x="integer", y="integer"), 'so {"x": 1, "y": 2}', {"x": 1, "y": 2}),
        (
            asked(("x", "y"), x="integer", y="integer"),
            "1 2",
            "answer with a JSON object with x, a whole number, y, a whole number",
        ),
        (asked(("x", "y"), x="integer", y="integer"), '{"z": 1}', "there is no field 'z', there are x, y"),
        (asked(("at",), at="object"), '{"at": {"x": 1}}', {"at": {"x": 1}}),
    ],
)
def test_a_turn_becomes_an_action(action: Any, text: str, read: Any) -> None:
    assert action.parse(text) == read


def test_an_ambiguous_text_field_is_refused() -> None:
    with pytest.raises(
        pg.ConfigError, match=r"fields a, b, and it is unclear which one takes the text: .*give text_field="
    ):
        asked(a="string", b="string")
    with pytest.raises(pg.ConfigError, match="fields none"):
        asked()
    with pytest.raises(pg.ConfigError, match="no field 'c', it has a"):
        asked(fixed={"c": 1}, a="string")


def test_the_objects_of_a_text() -> None:
    assert extract_json_objects('{"a": {"b": 1}} and {"c": 2} {') == [{"a": {"b": 1}}, {"c": 2}]
    assert extract_json_objects("{" * 2000) == []


@given(st.text(max_size=80))
def test_any_text_gives_an_action_or_an_error(text: str) -> None:
    full = asked(("x", "y"), x="integer", y="string")
    for action in (asked(a="string"), asked(a="integer"), asked(a="number"), asked(a="boolean"), full):
        json.dumps(action.parse(text), allow_nan=False)


def test_a_number_of_many_digits_is_refused() -> None:
    assert parse_value("9" * 5000, {"type": "integer"}) is None


# --- tools

CALL = {
    "properties": {
        "metadata": {"type": "object"},
        "type": {"const": "call_tool", "default": "call_tool", "type": "string"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["tool_name"],
}
ECHO = {
    "name": "echo",
    "description": "Says it again.",
    "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
RESULTS = {
    "again": {"result": {"content": [{"type": "text", "text": "again"}], "is_error": False}, "error": None},
    "failed": {"result": {"content": [{"type": "text", "text": "no"}], "is_error": True}, "error": None},
    "odd": {"result": None, "error": {"error_type": "execution_error", "message": "a bug"}},
    "plain": {"result": {"said": 1}, "error": None},
    "other": {"board": "x"},
    "end": {"result": "over", "error": None},
}


def tool_server(message: dict[str, Any]) -> Any:
    """Gives half a point for each call that is heard, and ends with `end`."""
    if message["type"] == "reset":
        return seen({})
    if message["data"]["type"] == "list_tools":
        return seen({"tools": [ECHO]})
    text = message["data"]["arguments"]["text"]
    if text == "refused":
        return error("not now", "EXECUTION_ERROR")
    return seen({"tool_name": "echo", **RESULTS[text]}, reward=0.5, done=text == "end")


def says(*texts: str) -> str:
    return "".join(f'<tool_call>{{"name": "echo", "arguments": {{"text": "{text}"}}}}</tool_call>' for text in texts)


def replies(step: Any) -> list[str]:
    lines = str(step.observation.content).replace("<tool_response>", "").replace("</tool_response>", "").splitlines()
    return [line for line in lines if line]


def test_the_tools_of_a_server_are_called_as_tools(schema: tuple[str, list[Any]]) -> None:
    """The whole text became the name of a tool, which no server has."""
    schema[1][0] = {"action": CALL}
    server = Server(tool_server)
    turns = (says("again"), says("failed", "odd", "plain"), says("other", "refused"), says("end", "again"), "more")
    first, steps = played(server, *turns, address=schema[0], text_field=None)
    assert first.content == TEXT.prompt  # the server shows nothing at the beginning
    assert [tool["function"]["name"] for tool in first.tools] == ["echo"]
    assert first.tools[0]["function"]["parameters"] == ECHO["input_schema"]
    assert [message["type"] for message in server.heard[:2]] == ["step", "reset"]
    assert server.heard[2] == {
        "type": "step",
        "data": {"type": "call_tool", "tool_name": "echo", "arguments": {"text": "again"}},
    }
    assert [replies(step) for step in steps[:3]] == [
        ["again"],
        ["error: no", "error: a bug", '{"said": 1}'],
        ["tool_name: echo", "board: x", "error: not now"],
    ]
    assert [step.reward for step in steps] == [0.5, 1.5, 0.5, 0.5]  # what follows the end is not sent
    assert [step.metrics["calls_raised"] for step in steps] == [0, 2, 1, 1]
    assert (len(steps), steps[-1].observation, steps[-1].stop_reason) == (4, None, "terminated")


def test_a_turn_without_a_call_and_the_last_turn_end_an_episode_with_tools(schema: tuple[str, list[Any]]) -> None:
    schema[1][0] = {"action": CALL}
    _, steps = played(Server(tool_server), "I am done.", address=schema[0], text_field=None)
    assert (steps[0].reward, steps[0].stop_reason, steps[0].metrics["calls"]) == (0.0, "answer", 0)
    server = Server(tool_server)
    _, steps = played(server, says("again"), says("again"), "", address=schema[0], text_field=None, max_turns=2)
    assert [(step.reward, step.stop_reason) for step in steps] == [(0.5, "environment"), (0.5, "turns")]
    first, _ = played(Server(tool_server), address=schema[0], text_field=None, instructions="Say it.")
    assert first.content == "Say it.\n"


def test_tools_that_are_listed_otherwise_or_not_at_all(schema: tuple[str, list[Any]]) -> None:
    """By the protocol's own message where no step precedes the reset; an action may leave its fields open."""
    schema[1][0] = {"action": {"properties": {"metadata": {"type": "object"}}}}

    def listing(tools: list[Any]) -> Callable[[dict[str, Any]], Any]:
        def answer(message: dict[str, Any]) -> Any:
            if message["type"] == "mcp":
                return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "result": {"tools": tools}}}
            if message["type"] == "step" and message["data"]["type"] == "list_tools":
                return error("reset first", "EXECUTION_ERROR")
            return tool_server(message)

        return answer

    first, (step,) = played(Server(listing([{"name": "echo"}])), says("again"), address=schema[0], text_field=None)
    assert first.tools[0]["function"] == {
        "name": "echo",
        "description": "",
        "parameters": {"type": "object", "additionalProperties": True},
    }
    assert replies(step) == ["again"]
    for tools in ([], [{"title": "no name"}], "tools"):
        with pytest.raises(
            pg.ConfigError, match="is the call of a tool, and it lists none: from Python, give text_field="
        ):
            played(Server(listing(tools)), address=schema[0], text_field=None)  # type: ignore[arg-type]


def test_fixed_fields_make_a_call_an_action_of_the_rest(schema: tuple[str, list[Any]]) -> None:
    schema[1][0] = {"action": CALL}
    server, fixed = Server(tool_server), {"type": "call_tool", "tool_name": "echo"}
    played(server, '{"arguments": {"text": "again"}}', address=schema[0], text_field=None, constant_fields=fixed)
    assert server.heard[1]["data"] == {**fixed, "arguments": {"text": "again"}}


# --- observations


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        ({"echoed": "hi", "metadata": {"a": 1}, "done": False, "reward": 1.0}, "hi"),
        ({"board": [[0, 1]], "hint": None, "text": ""}, "[[0, 1]]"),
        ({"text": "ö", "left": 3, "over": False}, "text: ö\nleft: 3\nover: false"),
        ({}, ""),
    ],
)
def test_observations_are_rendered_as_text(observation: dict[str, Any], words: str) -> None:
    assert render_observation(observation) == words
