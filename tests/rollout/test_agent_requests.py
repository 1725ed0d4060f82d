"""Requests of programs, whatever they are: they cost themselves, are counted, and are named in the step's notes."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from policygrad.environments import agent_episodes
from policygrad.environments.agent_episodes import run_agent_episodes
from policygrad.environments.agent_program import AgentProgram
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rollout.conversation_tree import ConversationTree, check_length
from policygrad.rollout.scoring import score_groups
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec
from policygrad.samplers.base import Generation, Request

AGENT = """
import json, os, socket, urllib.error, urllib.request
from pathlib import Path

USER = [{"role": "user", "content": "1 + 1"}]
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


def send(path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    try:
        with urllib.request.urlopen(urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + path, data, headers)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def odd(example):
    deep = {}
    for _ in range(400):
        deep = {"properties": {"a": deep}}
    one = {"max_tokens": 1}
    answers = {
        "surrogate": send(CHAT, b'{"messages": [{"role": "user", "content": "a\\\\ud83d b"}], "max_tokens": 1}'),
        "large id": send(TEXT, {"prompt": [2**70], **one}),
        "deep": send(CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]}),
        "long": send(CHAT, {"messages": [{"role": "user", "content": "1 + 1 = 2. " * 10**5}], **one}),
        "echo": send(TEXT, {"prompt": "1 + 1", "echo": True, "logprobs": 1, **one}),
        "top": send(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 3, **one}),
        "guided": send(CHAT, {"messages": USER, "guided_json": {}, **one}),
        "path": send("/v1/embeddings", {}),
        "count": send(MESSAGES + "/count_tokens", {"messages": USER}),
        "other": send(CHAT, {"messages": USER, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "reasoning_effort": "low", **one}),
        "same": send(CHAT, {"messages": USER, "temperature": 1, "top_p": 1, "top_k": -1, **one}),
        "prompts": send(TEXT, {"prompt": ["1 + 1", "2 + 2"], "logprobs": 1, **one}),
    }
    return {"reward": 1, "answer": json.dumps(answers)}


def answer_alone(example):
    send(CHAT, {"messages": USER, "max_tokens": 1})
    return "an answer"


def leave(example):
    data = json.dumps({"messages": USER, "max_tokens": 4}).encode()
    host, port = os.environ["ANTHROPIC_BASE_URL"].removeprefix("http://").split(":")
    left = socket.create_connection((host, int(port)))
    key = os.environ["OPENAI_API_KEY"]
    lines = [f"POST {CHAT} HTTP/1.1", "host: x", f"authorization: Bearer {key}", f"content-length: {len(data)}"]
    head = "".join(line + "\\r\\n" for line in [*lines, ""])
    left.sendall(head.encode() + data)
    with open(os.environ["SAMPLING"]) as fifo:  # until it is being sampled
        fifo.read()
    left.close()
    return float(send(CHAT, {"messages": USER, "max_tokens": 3})[0] == 200)
"""


@cache
def loaded() -> tuple[Any, Tokenizer]:
    from policygrad.models.loading import load_model

    model = load_model("tiny")
    return model, load_tokenizer("tiny", model)


def play(folder: Path, name: str, sampler: Any = None, **options: Any) -> EpisodeGroup:
    (folder / "agent.py").write_text(AGENT)
    model, encoder = loaded()
    program = AgentProgram(function=f"{folder / 'agent.py'}:{name}", **options)
    spec = EpisodeSpec(pg.Example("x"), (0, TRAIN, 1, 0), 64)
    sampling, sampler = pg.SamplingParams(max_tokens=64), sampler or pg.LocalSampler.from_tokenizer(model, encoder)
    try:
        (group,) = asyncio.run(
            run_agent_episodes([spec], 1, sampling, sampler=sampler, encoder=encoder, program=program)
        )
    finally:
        program.close()
    return group


def test_odd_requests_cost_themselves_and_are_counted(tmp_path: Path) -> None:
    (trajectory,) = play(tmp_path, "odd").trajectories
    answers = json.loads(trajectory.text)
    refused = ("large id", "deep", "long", "echo", "top", "guided")
    expected = dict.fromkeys(refused, 400) | {"path": 404}
    assert {name: status for name, (status, _) in answers.items()} == {
        name: expected.get(name, 200) for name in answers
    }
    assert "token id 1180591620717411303424" in answers["large id"][1]["error"]["message"]
    assert answers["long"][1]["error"]["code"] == "context_length_exceeded"
    assert "policygrad proxy" in answers["echo"][1]["error"]["message"]
    assert answers["count"][1]["input_tokens"] > 3
    counted = {"other_temperature": 1.0, "other_top_p": 1.0, "other_top_k": 1.0, "other_fields": 1.0}
    assert trajectory.metrics == {"calls": 5.0, "refused": 7.0, **counted}  # two of the calls are of one request
    assert (trajectory.reward, trajectory.stop_reason, trajectory.failure) == (1.0, "finished", "")
    notes = "\n".join(trajectory.notes)
    assert "was answered with status 400" in notes
    assert "was answered with status 404: POST /v1/embeddings" in notes
    assert "was answered without reasoning_effort" in notes
    assert set(trajectory.notes) <= set(score_groups([_group(trajectory)], None)[1].messages)


def _group(*trajectories: Any) -> EpisodeGroup:
    return EpisodeGroup(EpisodeSpec(pg.Example("x"), (0, TRAIN, 1, 0), 64), torch.tensor([1]), trajectories)


def test_a_fault_of_ours_costs_its_request_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tree: ConversationTree, *args: Any) -> Any:
        raise KeyError("a fault")

    monkeypatch.setattr(ConversationTree, "add_reply", fail)
    with pytest.raises(pg.EngineError, match=r"no request of .* was answered .*: the last one with status 500: "):
        play(tmp_path, "answer_alone")  # the program's own failure, since it needs its answer
    monkeypatch.undo()
    open_turn, calls = ConversationTree.open_turn, iter(range(9))
    monkeypatch.setattr(
        ConversationTree, "open_turn", lambda tree, request: open_turn(tree, request) if next(calls) else fail(tree)
    )
    (trajectory,) = play(tmp_path, "odd").trajectories
    assert trajectory.metrics["request_failed"] == 1.0
    assert any("status 500" in note and "KeyError: 'a fault'" in note for note in trajectory.notes)


def test_an_answer_without_a_reward_is_told_what_a_program_does_for_one(tmp_path: Path) -> None:
    (trajectory,) = play(tmp_path, "answer_alone").trajectories
    (message,) = score_groups([_group(trajectory)], None)[1].messages
    assert "reward_command" in message
    assert "Step(" not in message


def test_what_an_abandoned_request_sampled_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo, left = tmp_path / "sampling", asyncio.Event()
    os.mkfifo(fifo)
    abandon = agent_episodes._Call.abandon

    def notice(call: Any) -> None:
        abandon(call)
        left.set()

    class Waiting(pg.LocalSampler):
        serves_concurrently = True
        calls = 0

        async def generate(self, requests: Sequence[Request]) -> list[Generation]:
            self.calls += 1
            generations = await super().generate(requests)
            if self.calls == 1:
                fifo.open("w").close()
                await left.wait()
            return generations

    monkeypatch.setattr(agent_episodes._Call, "abandon", notice)
    model, encoder = loaded()
    sampler = Waiting.from_tokenizer(model, encoder)
    (trajectory,) = play(tmp_path, "leave", sampler, variables={"SAMPLING": str(fifo)}).trajectories
    assert trajectory.reward == 1.0
    assert trajectory.metrics == {"calls": 2.0, "abandoned": 1.0}
    (sampled,) = [s for s in trajectory.segments if s.is_sampled]
    assert len(sampled.tokens) <= 3  # of the second request
    assert trajectory.num_branches == 1


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized_and_text_that_fits_is_not() -> None:
    from dataclasses import replace

    from policygrad.proxy.formats import ApiError, ChatRequest

    encoder, seen = replace(loaded()[1], context_length=20_000), list[int]()

    class Counting:
        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return encoder.hf(text, **options)

    counting = replace(encoder, hf=Counting())
    message = {"role": "user", "content": "word " * 4_000_000}
    for prompt in ((message,), message["content"]):
        seen.clear()
        with pytest.raises(ApiError, match="more than 20000 tokens"):
            check_length(counting, ChatRequest(prompt))
        assert sum(seen) < 10 * 2**16  # of 20 million characters
    with pytest.raises(ApiError, match="more than 1048576 tokens"):
        check_length(replace(counting, context_length=None), ChatRequest("word " * 2_000_000))
    seen.clear()
    with pytest.raises(ApiError, match="20001 messages"):
        check_length(counting, ChatRequest(({"role": "user", "content": "x"},) * 20_001))
    check_length(counting, ChatRequest("word " * 13_000))
    assert not seen
    tokens = len(encoder.hf("answer " * 12_000, add_special_tokens=False)["input_ids"])
    check_length(replace(encoder, context_length=tokens), ChatRequest("answer " * 12_000))


def test_a_conversation_may_have_more_turns_than_functions_may_call_each_other() -> None:
    from policygrad.proxy.formats import ChatRequest

    encoder = loaded()[1]
    tree, text = ConversationTree(encoder, "a request"), "x"
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        for _ in range(300):
            turn = tree.open_turn(ChatRequest(text))
            choice = tree.add_reply(turn, Generation(torch.tensor([300]), torch.tensor([-1.0]), "length", 0))
            text += choice.text + " y"
        segments, states = tree.segments(0)
    finally:
        sys.setrecursionlimit(limit)
    assert len(states) == sum(s.is_sampled for s in segments) == 300
