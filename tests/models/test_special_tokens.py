"""Special tokens of a model's own format, such as <think>, in what rewards, tools and environments read; ends that are roles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.scripted_sampler import conversation
from doubles.templates import tokenizer_with
from policygrad.models.chat.tool_calls import TaggedToolCallParser
from policygrad.models.tokenizer import Tokenizer
from policygrad.proxy.formats import ChatRequest
from policygrad.rewards.builtin import Format
from policygrad.rollout.conversation_tree import ConversationTree
from policygrad.samplers.base import Generation

FORMAT = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>")
ASKED = pg.Example(({"role": "user", "content": "Go."},), {"answer": "4"})


def halve(x: float) -> float:
    """Halves.

    Args:
        x: a number
    """
    return x / 2


def special(name: str) -> Tokenizer:
    return tokenizer_with(name, ("<|im_end|>",), "<|im_start|>", *FORMAT)


def test_a_model_s_own_format_is_read_by_rewards() -> None:
    """Without end, padding and beginning tokens, wherever they are."""
    own = special("chatml")
    text = "<think>hm</think><answer>4</answer>"
    ids = own.hf(f"<|im_end|>{text}<|im_end|>", add_special_tokens=False)["input_ids"]
    padded = [own.hf.bos_token_id, *ids, own.hf.pad_token_id]
    for tokens in (ids, torch.tensor(ids), [token for token in padded if token is not None]):
        assert own.decode(tokens) == text
    assert Format()([""], [own.decode(ids)]) == [1.0]


def test_a_call_in_special_tokens_is_made() -> None:
    call = '<tool_call>\n{"name": "halve", "arguments": {"x": 8}}\n</tool_call>'
    answers = list[str]()

    def score(answer: str, example: pg.Example) -> float:
        answers.append(answer)
        return 1.0

    group, sampler = conversation(special("qwen3"), pg.ToolUse((halve,), score), ASKED, [call, "<answer>4</answer>"])
    assert len(sampler.asked) == 2
    assert answers == ["<answer>4</answer>"]
    assert group.trajectories[0].metrics["calls"] == 1
    assert "<tool_response>\n4.0" in special("qwen3").hf.decode(sampler.asked[1].prompt_ids)


def test_a_history_that_is_written_anew_keeps_a_reply_s_own_tokens_and_no_one_else_s() -> None:
    own = special("chatml")
    answer, forged = own.hf.convert_tokens_to_ids(["<answer>", "<|im_start|>"])
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<answer>a <|im_start|>"},
        {"role": "user", "content": "<answer>"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "two"},
    ]
    ids = own.encode_rewritten(messages, 1, 1)[0].ids.tolist()
    assert ids.count(answer) == 1  # of the reply; not the one that the environment spells out
    assert ids.count(forged) == 6  # one to each turn


@pytest.mark.parametrize("end", ["<|user|>", "<|observation|>", "<eos>"])
def test_a_tool_s_result_stands_in_its_own_turn_whichever_role_token_was_sampled(end: str) -> None:
    """The template's role token is dropped only if it is the end that was sampled."""
    own = tokenizer_with("role_ends", ("<|user|>", "<|observation|>", "<eos>"), "<|assistant|>", "<|system|>")
    call = '<tool_call>{"name": "halve", "arguments": {"x": 8}}</tool_call>'
    turns = [
        own.hf(f"{text}{e}", add_special_tokens=False)["input_ids"] for text, e in ((call, end), ("4", "<|user|>"))
    ]
    group, sampler = conversation(own, pg.ToolUse((halve,), lambda answer, example: 1.0), ASKED, turns)
    before, after = (own.hf.decode(request.prompt_ids) for request in sampler.asked)
    repeated = "" if end == "<|observation|>" else end
    assert after.removeprefix(before) == f"{call}{repeated}<|observation|>\n4.0<|assistant|>\n"
    assert group.trajectories[0].stop_reason == "answer"


@pytest.mark.parametrize("parser", [None, TaggedToolCallParser()])
def test_a_call_inside_of_a_thought_that_the_template_opened_is_not_made(parser: Any) -> None:
    """Until the thought ends; then what follows it is a call."""
    own = tokenizer_with("opened_thought", ("<|im_end|>",), "<|im_start|>")
    call = '<tool_call>{"name": "halve", "arguments": {"x": 8}}</tool_call>'
    uses = pg.ToolUse((halve,), lambda answer, example: 1.0, parser=parser)
    for text, turns in [(f"I could write {call} but", 1), (f"so\n</think>\n\n{call}", 2), (f"{call}</think>4", 1)]:
        group, sampler = conversation(own, uses, ASKED, [text, "x</think>y"])
        assert len(sampler.asked) == turns, text
        assert group.trajectories[0].metrics["calls"] == turns - 1
    tree = ConversationTree(own, "a request")
    tools = ({"type": "function", "function": {"name": "halve", "parameters": {"type": "object", "properties": {}}}},)
    for text, number in [(f"I could write {call} but", 0), (f"so</think>{call}", 1)]:
        turn = tree.open_turn(ChatRequest(tuple(ASKED.prompt), tools, parses_calls=True))  # type: ignore[arg-type]
        ids = torch.tensor([*own.hf(text, add_special_tokens=False)["input_ids"], min(own.end_ids)])
        assert len(tree.add_reply(turn, Generation(ids, torch.zeros(len(ids)), "stop", 0)).calls) == number
