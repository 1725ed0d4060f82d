"""An agent's requests as a tree of texts: every sampled token is trained in the context that it was sampled in."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import policygrad as pg
from doubles.templates import logp_of, random_model, tokenizer
from policygrad.learners.base import LearnerSpec
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.chat.rendering import render_ids
from policygrad.models.tokenizer import Tokenizer
from policygrad.proxy.formats import ApiError, ChatChoice, ChatRequest, parse_chat
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.conversation_tree import ConversationTree, _text_before_stop
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec, Trajectory
from policygrad.samplers.base import Generation
from policygrad.samplers.stop_texts import cut_at_stop

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"properties": {"a": {}, "b": {}}}},
}
TEMPLATES = ("chatml", "qwen3", "llama3", "gemma", "shouting")


class Recorder:
    """Answers requests with given texts, and notes the context of each sampled token sequence."""

    def __init__(self, encoder: Tokenizer) -> None:
        self.encoder, self.tree = encoder, ConversationTree(encoder, "a request")
        self.sampled: list[tuple[torch.Tensor, torch.Tensor]] = []  # (context, tokens up to the stop text)

    def ask(self, prompt: Any, reply: str, *, has_end: bool = True, **options: Any) -> ChatChoice:
        request = ChatRequest(prompt if isinstance(prompt, str) else tuple(prompt), **options)
        turn = self.tree.open_turn(request)
        ids = self.encoder.hf(reply, add_special_tokens=False)["input_ids"] + [min(self.encoder.end_ids)] * has_end
        tokens = torch.tensor(ids)
        logp = logp_of(torch.cat([turn.context_ids, tokens]), len(tokens)).float()
        choice = self.tree.add_reply(turn, Generation(tokens, logp, "stop" if has_end else "length", 0))
        self.sampled.append((turn.context_ids, tokens[: len(choice.token_ids)]))
        return choice


def chat(*turns: str) -> list[dict[str, Any]]:
    """Messages: the user's and the assistant's in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def make_group(*recorders: Recorder) -> EpisodeGroup:
    texts = [recorder.tree.first_text for recorder in recorders]
    length = min(map(len, texts))
    while not all(torch.equal(text[:length], texts[0][:length]) for text in texts):
        length -= 1
    trajectories = []
    for recorder in recorders:
        segments, states = recorder.tree.segments(length)
        assert len(states) == sum(s.is_sampled for s in segments)
        trajectories.append(Trajectory(segments, "", False, reward=1.0))
    spec = EpisodeSpec(pg.Example("x"), (0, TRAIN, 1, 0), 100)
    return EpisodeGroup(spec, texts[0][: max(length, 1)], tuple(trajectories))


def check(*recorders: Recorder) -> EpisodeGroup:
    """Contexts put together from the segments are those sampled from, each once; a learner computes the log-probabilities that
    were noted."""
    group = make_group(*recorders)
    for recorder, trajectory in zip(recorders, group.trajectories, strict=True):
        ids, seen = group.prompt_ids, []
        for segment in trajectory.segments:
            before = ids if segment.prefix_length is None else ids[: segment.prefix_length]
            if segment.is_sampled:
                seen.append((tuple(before.tolist()), tuple(segment.tokens.tolist())))
            ids = torch.cat([before, segment.tokens])
        expected = [(tuple(context.tolist()), tuple(tokens.tolist())) for context, tokens in recorder.sampled]
        assert sorted(seen) == sorted(expected)
    batch = batch_groups([group])
    learner = LocalLearner(random_model(), LearnerSpec(pg.DR_GRPO, lr=0.0, steps=1))
    recomputed = learner.evaluate(batch, frozenset({"logp_old"})).logp_old
    assert recomputed is not None
    assert batch.logp_sampler is not None
    assert torch.allclose(recomputed[batch.mask], batch.logp_sampler[batch.mask], atol=2e-4)
    return group


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_continues_the_sampled_tokens(name: str) -> None:
    recorder = Recorder(tokenizer(name))
    recorder.ask(chat("1 + 1 =?"), "two")
    recorder.ask(chat("1 + 1 =?", "two", "2 + 2 =?"), "four")
    recorder.ask(chat("1 + 1 =?", "two", "2 + 2 =?", "four", "so?"), "yes")
    (trajectory,) = check(recorder).trajectories
    assert trajectory.num_branches == (3 if name == "shouting" else 1)
    if name != "shouting":  # every context is what the template makes of the messages
        for number, (context, _) in enumerate(recorder.sampled):
            messages = chat("1 + 1 =?", "two", "2 + 2 =?", "four", "so?")[: 2 * number + 1]
            assert context.tolist() == render_ids(tokenizer(name), messages, generation_prompt=True)


def test_a_main_conversation_goes_on_after_its_sub_agents() -> None:
    recorder = Recorder(tokenizer("chatml"))
    recorder.ask(chat("plan"), "ask two")
    recorder.ask([{"role": "system", "content": "You help."}, *chat("first")], "one")
    recorder.ask(chat("plan it better"), "two")
    recorder.ask(chat("plan", "ask two", "one, two"), "done")
    recorder.ask([{"role": "system", "content": "You help."}, *chat("first", "one", "more")], "three")
    (trajectory,) = check(recorder).trajectories
    assert trajectory.num_branches == 3
    sampled = [recorder.encoder.decode(s.tokens) for s in trajectory.segments if s.is_sampled]
    assert sampled == ["ask two", "done", "two", "one", "three"]  # each text is followed by what goes on from it


def test_several_answers_to_one_request_and_a_repeated_request_are_branches() -> None:
    recorder = Recorder(tokenizer("chatml"))
    for reply in ("a b", "c d", "a b"):
        recorder.ask(chat("x"), reply)
    recorder.ask(chat("x", "c d", "y"), "e")
    recorder.ask(chat("x", "c d", "y"), "f")
    check(recorder)


def test_a_changed_history_shares_what_both_begin_with() -> None:
    recorder = Recorder(tokenizer("chatml"))
    recorder.ask(chat("x"), "a long answer of the policy")
    recorder.ask(chat("x", "a long answer, shortened", "y"), "b")
    (trajectory,) = check(recorder).trajectories
    branch = next(s for s in trajectory.segments if s.prefix_length is not None)
    assert branch.prefix_length is not None
    assert branch.prefix_length >= len(recorder.sampled[0][0])  # within the sampled answer, or at its beginning
    assert recorder.encoder.hf.decode(branch.visible_tokens).count("shortened") == 0  # the new message alone


def test_reasoning_is_received_apart_and_the_conversation_goes_on_from_what_was_sampled() -> None:
    """A program sends back the answer alone, and the policy's context keeps its thought."""
    recorder = Recorder(tokenizer("chatml"))
    choice = recorder.ask(chat("x"), "<think>hm</think>4")
    assert (choice.reasoning, choice.content, choice.text) == ("hm", "4", "<think>hm</think>4")
    recorder.ask(chat("x", "4", "why?"), "so")
    (trajectory,) = check(recorder).trajectories
    assert trajectory.num_branches == 1


def test_a_turn_cut_at_a_stop_text_goes_on_before_it() -> None:
    recorder = Recorder(tokenizer("chatml"))
    choice = recorder.ask(chat("x"), "think Observation: invented", stop=("Observation:",))
    assert choice.text == "think "
    assert choice.stopped_by == "Observation:"
    assert recorder.encoder.decode(torch.tensor(choice.token_ids)).rstrip().endswith("Observation:")
    recorder.ask(chat("x", "think", "real"), "good")
    check(recorder)
    assert recorder.encoder.hf.decode(recorder.sampled[1][0]).count("Observation") == 0
    ids = recorder.sampled[1][0].tolist()
    assert ids.count(min(recorder.encoder.end_ids)) == 3  # the template closes the turn that was cut


def test_a_turn_cut_by_its_limit_is_closed_by_the_template() -> None:
    recorder = Recorder(tokenizer("chatml"))
    recorder.ask(chat("x"), "half an", has_end=False)
    recorder.ask(chat("x", "half an", "go on"), "answer")
    check(recorder)
    assert recorder.sampled[1][0].tolist() == render_ids(
        tokenizer("chatml"), chat("x", "half an", "go on"), generation_prompt=True
    )


def test_tool_calls_are_returned_as_objects_and_go_on_as_sampled() -> None:
    recorder = Recorder(tokenizer("chatml"))
    written = 'Let me see. <tool_call>\n{"name":   "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    choice = recorder.ask(chat("1 + 2"), written, tools=(TOOL,), parses_calls=True)
    assert choice.finish_reason == "tool_calls"
    assert (choice.content, choice.calls[0].name, choice.calls[0].arguments) == ("Let me see.", "add", {"a": 1, "b": 2})
    body = {
        "messages": [
            *chat("1 + 2"),
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "3"},
        ],
        "tools": [TOOL],
    }
    again = parse_chat(body)
    recorder.ask(again.prompt, "It is 3.", tools=again.tools)
    (trajectory,) = check(recorder).trajectories
    assert trajectory.num_branches == 1
    assert '{"name":   "add"' in recorder.encoder.hf.decode(recorder.sampled[1][0])


def test_ids_of_calls_are_those_of_a_run_that_is_repeated_and_differ_otherwise() -> None:
    """smolagents writes them into the text that the policy reads next."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    def play() -> list[str]:
        recorder = Recorder(tokenizer("chatml"))
        choices = [recorder.ask(chat(asked), call * 2, tools=(TOOL,)) for asked in ("1 + 2", "1 + 2", "2 + 1")]
        return [number for choice in choices for number in choice.call_ids]

    first = play()
    assert first == play()
    assert len({*first}) == len(first) == 6


def test_a_call_that_is_repeated_with_the_defaults_filled_in_goes_on_as_sampled() -> None:
    """As Claude Code does with `replace_all` of its editor."""
    properties = {"a": {}, "all": {"type": "boolean", "default": False}}
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "", "parameters": {"properties": properties}},
    }
    for filled, branches in ({"all": False}, 1), ({"all": True}, 2), ({"b": False}, 2):
        recorder = Recorder(tokenizer("chatml"))
        written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        recorder.ask(chat("1 + 2"), written, tools=(tool,))
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, **filled}}}
        repeated = {"role": "assistant", "content": "", "tool_calls": [call]}
        recorder.ask([*chat("1 + 2"), repeated, {"role": "tool", "content": "3"}], "It is 3.", tools=(tool,))
        (trajectory,) = check(recorder).trajectories
        assert trajectory.num_branches == branches


def test_calls_by_position_get_the_names_of_the_schema_and_broken_ones_stay_text() -> None:
    recorder = Recorder(tokenizer("chatml"))
    choice = recorder.ask(chat("x"), "<tool_call>add(1, b=2)</tool_call>", tools=(TOOL,))
    assert choice.calls[0].arguments == {"a": 1, "b": 2}
    broken = recorder.ask(chat("y"), "<tool_call>{add</tool_call>", tools=(TOOL,))
    assert (broken.calls, broken.finish_reason, broken.content) == ((), "stop", "<tool_call>{add</tool_call>")


def test_prompts_of_text_and_of_token_ids() -> None:
    recorder = Recorder(tokenizer("chatml"))
    first = recorder.ask("once upon", " a time")
    recorder.ask("once upon a time there", " was")
    ids = (*recorder.sampled[0][0].tolist(), *first.token_ids, 5, 6)
    recorder.ask(ids, " end")
    (trajectory,) = check(recorder).trajectories
    assert recorder.sampled[2][0].tolist() == list(ids)
    assert trajectory.num_branches == 2
    with pytest.raises(ApiError, match="token id 99999"):
        recorder.ask((99999,), "x")


def test_a_group_without_a_common_prompt_begins_with_what_is_common() -> None:
    one, two, three = (Recorder(tokenizer("chatml")) for _ in range(3))
    one.ask(chat("the time is 1"), "a")
    two.ask(chat("the time is 2"), "b")
    two.ask(chat("the time is 2", "b", "c"), "d")
    three.ask(chat("the time is 1"), "e")
    group = check(one, two, three)
    assert group.prompt_ids.tolist() == one.sampled[0][0].tolist()[: len(group.prompt_ids)]
    assert len(group.prompt_ids) > 1


def test_a_group_with_nothing_in_common_is_exact_too() -> None:
    one, two = Recorder(tokenizer("chatml")), Recorder(tokenizer("chatml"))
    one.ask((5, 6, 7), "a")
    two.ask((8, 9), "b")
    two.ask((8, 4), "c")
    check(one, two)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(TEMPLATES))
def test_any_mix_of_conversations_is_trained_where_it_was_sampled(seed: int, name: str) -> None:
    random, recorders = Random(seed), []
    for _ in range(2):
        recorder, conversations = Recorder(tokenizer(name)), [chat("plan")]
        for number in range(random.randrange(1, 7)):
            kind = random.randrange(4)
            if kind == 0:
                conversations.append(chat(f"help {random.randrange(3)}"))
            messages = random.choice(conversations)
            if kind == 1 and len(messages) > 1:
                messages = [{**messages[0], "content": "rewritten"}, *messages[1:]]
            options = {"stop": ("!",)} if kind == 2 else {}
            choice = recorder.ask(
                messages, f"{'abc'[random.randrange(3)]} {number}! no", has_end=random.random() < 0.7, **options
            )
            reply = {"role": "assistant", "content": choice.content}
            conversations.append([*messages, reply, {"role": "user", "content": f"u{random.randrange(2)}"}])
        recorders.append(recorder)
    check(*recorders)


def test_a_stop_text_in_the_middle_of_a_token_is_found() -> None:
    encoder = tokenizer("chatml")
    text = "It is 7, I am sure of that."
    tokens = torch.tensor(encoder.hf(text, add_special_tokens=False)["input_ids"])
    whole = Generation(tokens, torch.zeros(len(tokens)), "stop", 0)
    for stop in ("7", "is", "sure", "t"):
        cut = cut_at_stop(whole, (stop,), encoder.decode)
        before, word, length = _text_before_stop(encoder, cut, (stop,))
        assert (before, word) == (text[: text.index(stop)], stop)
        assert stop in encoder.decode(cut.tokens)
        assert stop not in encoder.decode(cut.tokens[:-1])
        assert before.startswith(encoder.decode(cut.tokens[:length]))
    assert cut_at_stop(whole, ("never",), encoder.decode) is whole
