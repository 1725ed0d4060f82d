"""One renderer of chat messages, and conversations that go on from the very ids that were sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.models import changed_copy
from doubles.templates import ENDS, tokenizer
from policygrad.errors import DataError, ModelError
from policygrad.models.chat.rendering import render
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
WORDS = st.text("abc 123+=\n.,é🙂", min_size=1, max_size=20).map(str.strip).filter(bool)


def encode_continuation(own: Tokenizer, *args: Any, **options: Any) -> list[int]:
    ids: list[int] = own.encode_continuation(*args, **options).ids.tolist()
    return ids


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def play(name: str, first: str, turns: list[tuple[str, str]], **options: Any) -> tuple[list[int], list[dict[str, str]]]:
    """The ids of a conversation as a policy meets them: prompt, what it samples, what follows, …; and its messages."""
    own = tokenizer(name)
    messages = [says("user", first)]
    ids = own.encode(messages, 0, **options).ids.tolist()
    for reply, answer in turns:
        new = [says("user", answer)]
        ids += own.hf(reply, add_special_tokens=False)["input_ids"] + list(own.end_ids)
        ids += encode_continuation(own, messages, reply, new, **options)
        messages += [says("assistant", reply), *new]
    return ids, messages


@pytest.mark.parametrize("name", ENDS)
@settings(max_examples=25)
@given(first=WORDS, turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3))
def test_a_conversation_in_ids_is_what_the_template_makes_of_it(
    name: str, first: str, turns: list[tuple[str, str]]
) -> None:
    """But for the space that Mistral's templates write before a reply, which its models sample themselves."""
    own = tokenizer(name)
    sampled = [(f" {reply}" if name.startswith("mistral") else reply, answer) for reply, answer in turns]
    ids, messages = play(name, first, sampled)
    assert own.hf.decode(ids) == render(own, messages, generation_prompt=True)


@pytest.mark.parametrize("reply", ["", " 2", "2\n\n", "one PLACEHOLDER0X two", "<b>{{ x }}</b>", "\\n \"'"])
@pytest.mark.parametrize("name", ENDS)
def test_a_reply_is_never_tokenized_again(name: str, reply: str) -> None:
    """White space at its ends stays as it was sampled, also where a template would trim it."""
    own = tokenizer(name)
    ids, messages = play(name, "1 + 1 =", [(reply, "go on")])
    text = own.hf.decode(ids)
    assert f"{reply}{ENDS[name]}" in text
    assert "".join(text.split()) == "".join(render(own, messages, generation_prompt=True).split())


def test_the_first_ids_are_sampling_s_own_and_stay() -> None:
    ids, messages = play("chatml", "1 + 1 =", [("2", "2 + 2 =")])
    prompt = tokenizer("chatml").encode(messages[:1], 0).ids.tolist()
    assert ids[: len(prompt)] == prompt
    assert tokenizer("chatml").hf.decode(ids[len(prompt) :]) == (
        "2<|im_end|>\n<|im_start|>user\n2 + 2 =<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("thought", ["<think>\nhm\n</think>\n\n2", "<think></think>2"])
def test_a_template_that_drops_earlier_reasoning_is_refused(thought: str) -> None:
    own, first = tokenizer("reasoning"), [says("user", "1 + 1 =")]
    with pytest.raises(ModelError, match=r"^x:3: .*'reasoning' rewrites earlier turns .*: begin a new trajectory at"):
        encode_continuation(own, first, thought, [says("user", "2 + 2 =")], source="x:3")
    assert encode_continuation(own, first, "2", [says("user", "2 + 2 =")])


def test_reasoning_stays_while_tools_answer_and_is_refused_when_the_user_speaks_again() -> None:
    """An earlier turn that a later message shortens is found too, not the last one alone."""
    own = tokenizer("reasoning")
    messages, call = [says("user", "1 + 1 =")], "<think>\nadd\n</think>\n\n<tool_call>add</tool_call>"
    ids = own.encode(messages, 0, tools=TOOLS).ids.tolist()
    ids += own.hf(call)["input_ids"] + list(own.end_ids)
    ids += encode_continuation(own, messages, call, [says("tool", "2")], tools=TOOLS)
    messages += [says("assistant", call), says("tool", "2")]
    assert own.hf.decode(ids) == render(own, messages, generation_prompt=True, tools=TOOLS)
    assert '"name": "add"' in own.hf.decode(ids)
    with pytest.raises(ModelError, match="rewrites earlier turns"):
        encode_continuation(own, messages, "It is 2.", [says("user", "2 + 2 =")], tools=TOOLS)


def test_a_sampled_end_token_that_the_template_omits_is_retained() -> None:
    """Closed by <eos> where the template writes <|im_end|>: only what was really sampled is taken away."""
    own = tokenizer("chatml")
    new = [says("user", "2")]
    ends = [own.hf.eos_token_id]
    closed_by_eos = replace(own, end_ids=frozenset(ends))
    ids = encode_continuation(closed_by_eos, [says("user", "1")], "a", new)
    assert own.hf.decode(ids).startswith("<|im_end|>\n<|im_start|>user")
    both = encode_continuation(replace(own, end_ids=own.end_ids.union(ends)), [says("user", "1")], "a", new)
    assert own.hf.decode(both).startswith("\n<|im_start|>user")


def test_text_is_continued_by_text() -> None:
    own = tokenizer("chatml")
    assert (
        encode_continuation(own, "1 +", " 1 =", "\nnext: ") == own.hf("\nnext: ", add_special_tokens=False)["input_ids"]
    )
    for so_far, new in (("1 +", [says("user", "2")]), ([says("user", "2")], "text")):
        with pytest.raises(DataError, match="a text must be continued by text"):
            encode_continuation(own, so_far, "a", new)


def test_messages_refused_by_a_template() -> None:
    gemma = tokenizer("gemma")
    with pytest.raises(
        ModelError, match=r"^a prompt: the chat template of 'gemma' .*\(roles: system\): System role not"
    ):
        render(gemma, [says("system", "a")], generation_prompt=True)
    with pytest.raises(ModelError, match=r"roles: user, assistant, assistant"):
        encode_continuation(gemma, [says("user", "a")], "b", [says("assistant", "c")])


def test_a_chat_template_that_raises_is_refused_with_the_line(random_model: Path, tmp_path: Path) -> None:
    model = changed_copy(random_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role.') }}{% endif %}{{ messages[0].nobody.x }}"
    )
    tokenizer = load_tokenizer(str(model), load_model(str(model)))
    system = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    with pytest.raises(ModelError, match=r"rows\.jsonl:7: .*\(roles: system, user\): no system role\. C"):
        tokenizer.encode(system, 4, "rows.jsonl:7")
    with pytest.raises(ModelError, match=r"rows\.jsonl:8: .*give the prompt as a string"):
        tokenizer.encode(system[1:], 4, "rows.jsonl:8")
