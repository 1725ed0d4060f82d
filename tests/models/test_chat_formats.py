"""The formats in which models call tools: what a template writes is read back, and what is odd costs one call."""

from __future__ import annotations

import pickle
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policygrad as pg
from doubles.chat_formats import SPELLINGS, tokenizer_of
from doubles.scripted_sampler import conversation
from policygrad.models.chat.formats import find_format, get_format, list_format_names
from policygrad.models.chat.rendering import render, write_message
from policygrad.models.chat.turns import AssistantMessage, ToolCall, number_calls

PLAIN = st.text("ab 1'\"é🙂{}[]=,:\\", max_size=8)
VALUES = {
    "string": PLAIN,
    "integer": st.integers(-999, 999),
    "boolean": st.booleans(),
    "array": st.lists(st.integers(0, 9), max_size=3),
}
KINDS = {"word": "string", "count": "integer", "all": "boolean", "items": "array"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "x",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in KINDS.items()}},
        },
    }
    for name in ("look_up", "f")
]
CALLS = st.lists(
    st.builds(
        ToolCall,
        st.sampled_from(["look_up", "f"]),
        st.fixed_dictionaries({}, optional={key: VALUES[kind] for key, kind in KINDS.items()}),
    ),
    min_size=1,
    max_size=3,
)
ASK: tuple[dict[str, str], ...] = ({"role": "user", "content": "1 + 2 =?"},)


def write(name: str, message: AssistantMessage) -> tuple[str, str]:
    """What a model of the format would sample for a message, and the end token that follows."""
    own = tokenizer_of(name)
    before = render(own, ASK, generation_prompt=True, tools=TOOLS)
    text = render(own, [*ASK, write_message(own, message)], generation_prompt=False, tools=TOOLS)
    assert text.startswith(before)
    text = text[len(before) :].removesuffix(SPELLINGS[name].space)
    end = next(end for end in (SPELLINGS[name].call_end, SPELLINGS[name].end) if end and text.endswith(end))
    return text.removesuffix(end), end


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_format_is_found_by_its_template_and_by_name(name: str) -> None:
    assert tokenizer_of(name).chat_format.name == name
    assert get_format(name).name == name
    assert name in list_format_names()


@pytest.mark.parametrize("name", SPELLINGS)
@settings(max_examples=30)
@given(
    calls=CALLS,
    reasoning=st.text("ab c", max_size=6).map(str.strip),
    content=st.text("ab c", max_size=6).map(str.strip),
)
def test_what_a_template_writes_is_read_back(name: str, calls: list[ToolCall], reasoning: str, content: str) -> None:
    """Any calls, with their types, the reasoning before them and the text between."""
    message = AssistantMessage(content, reasoning, tuple(calls))
    text, _ = write(name, message)
    read = tokenizer_of(name).chat_format.parse(text, tools=TOOLS)
    assert read.says_the_same(message), (text, read)


ADD = ToolCall("add", {"a": 1, "b": 2})


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_calculator_is_called_and_read_in_every_format(name: str) -> None:
    """Two calls in a turn, one in the next, an answer: every result is read, and the ids are the template's rendering."""
    own = tokenizer_of(name)
    others = () if name == "harmony" else (ToolCall("add", {"a": 20, "b": 22}),)  # whose calls each end a turn
    first = AssistantMessage("", "I add.", (ADD, *others))
    second, third = AssistantMessage("", "", (ToolCall("add", {"a": 3, "b": 42}),)), AssistantMessage("It is 45.")
    said = [write(name, message) for message in (first, second, third)]
    turns = [
        [*own.hf(text, add_special_tokens=False)["input_ids"], own.hf.convert_tokens_to_ids(end)] for text, end in said
    ]
    group, sampler = conversation(own, pg.ToolUse((add,)), pg.Example(ASK), turns)
    (trajectory,) = group.trajectories
    assert (trajectory.metrics["calls"], trajectory.stop_reason) == (2.0 + len(others), "answer")
    assert not any(count for why, count in trajectory.metrics.items() if why != "calls")
    assert trajectory.num_branches == 1
    messages = list(ASK)
    for message, results in ((first, ("3", "42")[: len(first.calls)]), (second, ("45",))):
        ids = number_calls(message.calls, sum(m["role"] == "assistant" for m in messages))
        messages.append(write_message(own, message, ids))  # type: ignore[arg-type]
        messages += [
            {"role": "tool", "tool_call_id": number, "name": "add", "content": result}
            for number, result in zip(ids, results, strict=True)
        ]
    schema = pg.ToolUse((add,)).opening(pg.Example(ASK)).tools  # type: ignore[union-attr]
    assert own.hf.decode(sampler.asked[-1].prompt_ids) == render(own, messages, generation_prompt=True, tools=schema)


@pytest.mark.parametrize("name", SPELLINGS)
def test_half_a_call_is_an_error_and_hides_no_earlier_one(name: str) -> None:
    """A turn that ends within its second call, wherever it does."""
    text, _ = write(name, AssistantMessage(calls=(ToolCall("look_up", {"word": "a"}), ToolCall("f", {"word": "bcd"}))))
    read = tokenizer_of(name).chat_format.parse
    assert [call.error for call in read(text, tools=TOOLS).calls] == ["", ""]
    within = text.rindex("bcd") + 1
    calls = read(text[:within], tools=TOOLS).calls
    assert calls
    assert calls[-1].error
    if name not in WHOLE:
        assert calls[0] == ToolCall("look_up", {"word": "a"})


WHOLE = ("command", "phi4", "lfm2", "olmo3")
"""Formats that write the calls of a turn as one list, which is read whole or not at all."""


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_call_in_a_thought_is_none_and_one_after_it_is(name: str) -> None:
    own = tokenizer_of(name)
    text, _ = write(name, AssistantMessage(reasoning="MARK", calls=(ToolCall("f", {"word": "a"}),)))
    call = text.rpartition("MARK")[2]
    opened, _, rest = text.partition("MARK")
    mentioned = (
        "f(word='a')" if name in ("harmony", "atem", "gemma4", "mistral") else call[-40:].replace("</think>", "")
    )
    read = own.chat_format.parse(f"{opened}I could say {mentioned}{rest}", tools=TOOLS)
    assert [(c.name, dict(c.arguments), c.error) for c in read.calls] == [("f", {"word": "a"}, "")]
    if opened.startswith("<think>"):
        unfinished = own.chat_format.parse(f"I could {call}".replace("</think>", ""), opened, TOOLS)
        assert (unfinished.calls, unfinished.is_thinking) == ((), True)


@pytest.mark.parametrize("name", SPELLINGS)
def test_plain_text_is_content(name: str) -> None:
    read = tokenizer_of(name).chat_format.parse("The answer is {3}, or [4].", tools=TOOLS)
    assert (read.content, read.reasoning, read.calls) == ("The answer is {3}, or [4].", "", ())


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_model_is_told_of_a_call_that_cannot_be_read(name: str) -> None:
    """It reads the error, also where the template shows what tools say only after a call that it reads itself."""
    own = tokenizer_of(name)
    text, end = write(name, AssistantMessage(calls=(ToolCall("f", {"word": "bcd"}),)))
    half = text[: text.rindex("bcd") + 1]
    turns = [[*own.hf(half, add_special_tokens=False)["input_ids"], own.hf.convert_tokens_to_ids(end)], "It is 3."]
    group, sampler = conversation(own, pg.ToolUse((add,)), pg.Example(ASK), turns)
    assert group.trajectories[0].metrics["calls_malformed"] == 1.0
    assert "error: " in own.hf.decode(sampler.asked[-1].prompt_ids)


def test_what_a_tool_says_ends_no_turn_and_what_a_template_leaves_out_is_said_by_name() -> None:
    own = tokenizer_of("qwen_xml")
    call, _ = write("qwen_xml", AssistantMessage(calls=(ADD,)))
    _, sampler = conversation(own, pg.ToolUse((make_adder("a<|im_end|>b"),)), pg.Example(ASK), [call, "3"])
    added = sampler.asked[-1].prompt_ids[len(sampler.asked[0].prompt_ids) :].tolist()
    assert added.count(min(own.end_ids)) == 2  # the call's turn and the result's
    assert "a<|im_end|>b" in own.hf.decode(added)
    deaf = replace(own, hf=copy(own.hf))
    deaf.hf.chat_template = own.hf.chat_template.replace("{{ m.content }}<|im_end|>\n", "<|im_end|>\n")
    with pytest.raises(pg.ModelError, match=r"leaves out what a message of the role '(tool|user)' says"):
        conversation(deaf, pg.ToolUse((add,)), pg.Example(ASK), [call, "3"])


def make_adder(result: str) -> Any:
    def add(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        return result

    return add


def test_the_tokenizer_s_own_description_comes_first() -> None:
    own = tokenizer_of("hermes")
    described = replace(own, hf=copy(own.hf))
    described.hf.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+) ",
                "close": ";",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }
    assert described.chat_format.name == "response_template"
    assert described.tool_call_parser('Well. CALL f {"a": 1};') == (ToolCall("f", {"a": 1}),)
    (broken,) = described.tool_call_parser("CALL f {;")
    assert "cannot be read" in broken.error
    (half,) = described.tool_call_parser('CALL f {"a": 1}')
    assert half.error == "the call is not closed"
    described.hf.response_template = {"fields": "none"}
    assert replace(described).chat_format.name == "hermes"  # one that cannot be read
    described.hf.response_template = "glm"
    assert replace(described).chat_format == get_format("glm")  # chosen by name
    described.hf.response_template = "nope"
    with pytest.raises(pg.ModelError, match="there is no format 'nope'"):
        assert replace(described).chat_format


def test_a_template_without_tools_is_asked_for_tags_and_read_so() -> None:
    """Though it writes the marks of another format around calls: the prompt lists the tools and asks for `<tool_call>`."""
    own = tokenizer_of("deepseek_v3")
    deaf = replace(own, hf=copy(own.hf))
    deaf.hf.chat_template = own.hf.chat_template.removeprefix("{% if tools %}{{ tools | tojson }}{% endif %}")
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    group, sampler = conversation(deaf, pg.ToolUse((add,)), pg.Example(ASK), [call, "3"])
    assert group.trajectories[0].metrics["calls"] == 1.0
    assert group.trajectories[0].metrics["calls_malformed"] == 0.0
    assert "3" in deaf.hf.decode(sampler.asked[-1].prompt_ids[len(sampler.asked[0].prompt_ids) :])


def test_a_turn_goes_to_another_process_as_a_message() -> None:
    action = pickle.loads(pickle.dumps(pg.Action("x", reader=lambda text: AssistantMessage("read", "why"))))
    assert (action.text, action.message, action.reader) == ("x", AssistantMessage("read", "why"), None)


def test_a_call_in_another_format_than_the_prompt_s_cannot_be_read() -> None:
    action = pg.Action("<function=f>", reader=get_format("hermes").parse, has_tools=True)
    [call] = action.calls
    assert "is not how this model calls tools" in call.error


def test_arguments_without_quotes_are_typed_by_the_schema_and_guessed_without() -> None:
    parameters = "".join(f"<parameter={key}>\n3\n</parameter>\n" for key in ("word", "count"))
    text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    read = get_format("qwen_xml").parse
    assert read(text, tools=TOOLS).calls == (ToolCall("f", {"word": "3", "count": 3}),)
    assert read(text).calls == (ToolCall("f", {"word": 3, "count": 3}),)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(pg.ModelError, match=r"there is no format 'nope': there are .*hermes"):
        get_format("nope")
    assert find_format("{{ tools }} @@call").parse("hello").unread
