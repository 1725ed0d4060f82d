"""Conversations in token ids: what is trained on is what was sampled, whatever the template and the tools say."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import policygrad as pg
from doubles.scripted_sampler import conversation
from doubles.templates import ENDS, random_model, tokenizer
from policygrad.environments.tools import Tool
from policygrad.models.chat.rendering import render
from policygrad.rollout.episodes import run_episodes
from policygrad.rollout.trajectory import TRAIN, EpisodeSpec

REWRITES = {"reasoning", "mistral_tools"}
"""Templates that refuse some of these conversations, by name: see the last test, and test_chat."""
WORDS = st.text("abc 123+=\n.,é🙂", min_size=1, max_size=12).map(str.strip).filter(bool)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


CALLS = {
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama31": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "transformers:llama4/processing_llama4.py": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral_tools": '[{"name": "add", "arguments": {"a": 1, "b": 2}}]',
}
"""As the models of these templates write one; all others are asked for the tags."""
ASKED = pg.Example(({"role": "user", "content": "1 + 2 =?"},), {"answer": "3"})


class Says:
    """Says what is written for it, in turn, whatever the policy says."""

    def __init__(self, first: str, said: list[tuple[str, str]], chat: bool) -> None:
        self.first, self.said, self.chat = first, said, chat

    def observed(self, role: str, text: str) -> pg.Observation:
        return pg.Observation(({"role": role, "content": text},) if self.chat else text)

    async def reset(self) -> pg.Observation:
        return self.observed("user", self.first)

    async def step(self, action: pg.Action) -> pg.Step:
        if not self.said:
            return pg.Step(reward=1.0)
        (role, text), *self.said = self.said
        return pg.Step(self.observed(role, text))


def tokens_that_end(name: str) -> frozenset[int]:
    """The template's own end, and so many others that a random model often says one."""
    own = tokenizer(name)
    return own.end_ids | frozenset(range(40, 120))


@pytest.mark.parametrize("name", sorted(set(ENDS) - REWRITES))
@settings(max_examples=3)
@given(first=WORDS, said=st.lists(WORDS, max_size=3), key=st.integers(0, 2**40), chat=st.booleans())
def test_log_probabilities_of_the_whole_are_those_while_it_was_sampled(
    name: str, first: str, said: list[str], key: int, chat: bool
) -> None:
    encoder = replace(tokenizer(name), end_ids=tokens_that_end(name), context_length=1024)
    sampler = pg.LocalSampler.from_tokenizer(random_model(), encoder)
    environment = lambda example: Says(first, [("user", text) for text in said], chat)  # noqa: E731
    start = EpisodeSpec(pg.Example(first), (key, TRAIN, 1, 0), 24)
    work = run_episodes(
        [start], 2, pg.SamplingParams(max_tokens=24), sampler=sampler, encoder=encoder, environment=environment
    )
    (group,) = asyncio.run(work)
    for trajectory in group.trajectories:
        ids = torch.cat([group.prompt_ids, trajectory.tokens])
        with torch.no_grad():
            logits = random_model()(ids[None]).logits[0].double()
        recomputed = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0][len(group.prompt_ids) - 1 :]
        mask = trajectory.mask
        assert torch.allclose(recomputed[mask], trajectory.logp[mask].double(), atol=2e-4)
        assert not trajectory.logp[~mask].any()
        assert (
            int(mask.sum())
            == trajectory.num_sampled_tokens
            == sum(len(s.tokens) for s in trajectory.segments if s.is_sampled)
        )
        assert [s.is_sampled for s in trajectory.segments] == [i % 2 == 0 for i in range(len(trajectory.segments))]


def played(name: str, *turns: str, **options: Any) -> tuple[Any, Any]:
    return conversation(tokenizer(name), pg.ToolUse((add,), **options), ASKED, turns)


@pytest.mark.parametrize("name", sorted(set(ENDS) - {"reasoning"}))
def test_a_tool_is_called_and_answered_in_the_template_s_own_words(name: str) -> None:
    """What the policy has read in the end is what the template makes of the conversation, and each prompt continues the last."""
    own, call = tokenizer(name), CALLS.get(name, "<tool_call>add(1, 2)</tool_call>")
    call, last = (f" {text}" if name.startswith("mistral") else text for text in (call, "It is 3."))
    group, sampler = played(name, call, last)
    (trajectory,) = group.trajectories
    assert trajectory.metrics["calls"] == 1.0
    assert not any(count for why, count in trajectory.metrics.items() if why != "calls")
    first, answer, second = trajectory.segments
    assert (first.is_sampled, answer.is_sampled, second.is_sampled) == (True, False, True)
    assert trajectory.mask.tolist() == [True] * len(first.tokens) + [False] * len(answer.tokens) + [True] * len(
        second.tokens
    )
    before, after = (request.prompt_ids for request in sampler.asked)
    assert torch.equal(after, torch.cat([before, first.tokens, answer.tokens]))
    schema = Tool.from_function(add).schema
    assert all(f'"{word}"' in own.hf.decode(before) for word in schema["function"]["parameters"]["properties"])
    messages = [*ASKED.prompt, {"role": "assistant", "content": call}, {"role": "tool", "content": "3"}]
    assert own.hf.decode(after) == render(own, messages, generation_prompt=True, tools=[schema])  # type: ignore[arg-type]


def test_reasoning_stays_while_tools_are_called() -> None:
    thought = f"<think>\nI add.\n</think>\n\n{CALLS['qwen3']}"
    group, sampler = played("qwen3", thought, thought, "<think>\nDone.\n</think>\n\n3")
    assert group.trajectories[0].metrics["calls"] == 2.0
    read = tokenizer("qwen3").hf.decode(sampler.asked[-1].prompt_ids)
    assert read.count("I add.") == 2
    assert "<tool_response>\n3\n</tool_response>" in read


def test_a_template_that_cannot_go_on_is_refused_by_name() -> None:
    """Mistral's wants calls as data, which are not the text that was sampled: it takes one round of calls, and no second."""
    call = f" {CALLS['mistral_tools']}"
    assert played("mistral_tools", call, " 3")[0].trajectories[0].stop_reason == "answer"
    with pytest.raises(pg.ModelError, match="'mistral_tools' refuses the messages"):
        played("mistral_tools", call, call, " 3")
