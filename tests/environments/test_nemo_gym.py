"""examples/nemo_gym.py: a resources server's tools are called within its session, and its verifier's numbers are the episode's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

import policygrad as pg
from doubles.scripted_sampler import ScriptedSampler
from policygrad.environments.agent_episodes import run_agent_episodes
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.rollout.trajectory import TRAIN, EpisodeSpec
from policygrad.utils.user_code import load_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "nemo_gym.py"
TOOL = {
    "type": "function",
    "name": "double",
    "description": "Double a number.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "strict": True,
}
ROW = {
    "id": 7,
    "expected": 42,
    "responses_create_params": {"input": [{"role": "user", "content": "Double 21."}], "tools": [TOOL]},
}


class ResourcesServer(BaseHTTPRequestHandler):
    """What a resources server of NeMo Gym answers: a session by a cookie, a tool as an endpoint, and a verifier."""

    sessions: ClassVar[dict[str, list[str]]] = {}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = (self.headers["Cookie"] or "").removeprefix("session=")
        if self.path == "/seed_session":
            session = f"s{len(self.sessions)}"
            self.sessions[session] = []
            return self.answer(200, {}, session)
        self.sessions[session].append(self.path)  # a request without its session ends the connection
        if self.path == "/double":
            is_valid = isinstance(body.get("x"), int)
            return self.answer(
                200 if is_valid else 422, {"doubled": 2 * body["x"]} if is_valid else {"detail": "x is missing"}
            )
        calls = [item for item in body["response"]["output"] if item["type"] == "function_call_output"]
        solved = any(json.loads(call["output"]).get("doubled") == body["expected"] for call in calls)
        return self.answer(200, {**body, "reward": float(solved), "num_calls": len(calls), "exact": solved})

    def answer(self, status: int, value: dict[str, Any], session: str = "") -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if session:
            self.send_header("Set-Cookie", f"session={session}")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    ResourcesServer.sessions.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), ResourcesServer) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


@pytest.mark.parametrize(
    ("arguments", "reward"),
    [({"x": 21}, 1.0), ({"x": 20}, 0.0), ({"y": 21}, 0.0)],
    ids=["right", "wrong", "an error of the server"],
)
def test_an_episode_on_a_resources_server(server: str, arguments: dict[str, int], reward: float) -> None:
    model = load_model("tiny")
    tokenizer = load_tokenizer("tiny", model)
    row = load_file(str(EXAMPLE)).read_row(ROW)
    assert row["prompt"] == "Double 21."
    call = "<tool_call>" + json.dumps({"name": "double", "arguments": arguments}) + "</tool_call>"
    sampler = ScriptedSampler(
        tokenizer, lambda key, context: "It is done." if "doubled" in context or "detail" in context else call
    )
    example = pg.Example(row["prompt"], columns={name: value for name, value in row.items() if name != "prompt"})
    program = pg.AgentProgram(function=f"{EXAMPLE}:main", variables={"NEMO_GYM": server})
    work = run_agent_episodes(
        [EpisodeSpec(example, (0, TRAIN, 1, 0), 400)],
        2,
        pg.SamplingParams(max_tokens=400),
        sampler=sampler,
        encoder=tokenizer,
        program=program,
    )
    (group,) = asyncio.run(work)
    for trajectory in group.trajectories:
        assert (trajectory.failure, trajectory.reward) == ("", reward)
        assert trajectory.metrics["num_calls"] == 1
        assert trajectory.metrics["exact"] == reward
    assert [*ResourcesServer.sessions.values()] == [["/double", "/verify"]] * 2
