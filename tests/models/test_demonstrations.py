"""Demonstrations as token ids: which turns are learned, in which context, and with which end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.files import write_rows
from doubles.templates import tokenizer, tokenizer_with
from policygrad.errors import DataError, ModelError
from policygrad.models.tokenizer import Tokenizer
from policygrad.tasks.preferences import read_demonstrations
from policygrad.training.sft import tokenise_demonstration

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}]


def says(role: str, content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def call(**arguments: Any) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "read", "arguments": arguments}}


def look(tmp_path: Path, own: Tokenizer, row: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Each text of a row: what is read before the first token that is learned, and the runs of those that are."""
    [demonstration] = read_demonstrations(write_rows(tmp_path / "one.jsonl", [row]))
    texts = []
    for example in tokenise_demonstration(demonstration, own):
        runs: list[list[int]] = []
        before = False
        for token, is_learned in zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True):
            if is_learned:
                runs = runs if before else [*runs, []]
                runs[-1].append(token)
            before = is_learned
        texts.append((own.hf.decode(example.prompt_ids), [own.hf.decode(run) for run in runs]))
    return texts


SPLIT = {
    "prompt": [says("user", "A colour."), says("assistant", "Rde."), says("user", "Again?")],
    "completion": [says("assistant", "Red.")],
}


@pytest.mark.parametrize("completion", [SPLIT["completion"], SPLIT["completion"][0], "Red."])
def test_a_turn_of_the_prompt_is_read_and_not_learned(tmp_path: Path, completion: Any) -> None:
    [(prompt, runs)] = look(tmp_path, tokenizer("chatml"), SPLIT | {"completion": completion})
    assert runs == ["Red.<|im_end|>"]
    assert "Rde.<|im_end|>" in prompt
    with pytest.raises(DataError, match=r"'completion'.*|no assistant turn to learn from \(roles: user\)"):
        look(tmp_path, tokenizer("chatml"), SPLIT | {"completion": [says("user", "x")]})


def test_a_template_that_rewrites_history_learns_each_turn_where_it_would_be_sampled(tmp_path: Path) -> None:
    """The prompt of each text is what the sampler would read."""
    own = tokenizer("reasoning")
    first = "<think>\nhm\n</think>\n\n2"
    messages = [says("user", "1 + 1 ="), says("assistant", first), says("user", "2 + 2 ="), says("assistant", "4")]
    texts = look(tmp_path, own, {"messages": messages})
    assert [runs for _, runs in texts] == [[f"{first}<|im_end|>"], ["4<|im_end|>"]]
    assert [prompt for prompt, _ in texts] == [own.hf.decode(own.encode(messages[:n], 0).ids) for n in (1, 3)]
    assert "hm" not in texts[1][0]
    [(prompt, runs)] = look(tmp_path, own, {"prompt": messages[:3], "completion": "4"})
    assert (prompt, runs) == texts[1]


def test_a_thought_that_the_template_opens_is_continued(tmp_path: Path) -> None:
    """As the message has it, or closed at once; what was opened is never learned."""
    own, user = tokenizer_with("opened_thought", ("<|im_end|>",), "<|im_start|>"), says("user", "2+2?")
    sampled = own.hf.decode(own.encode([user], 0).ids)
    assert sampled.endswith("<think>\n")
    for said, learned in [
        (says("assistant", "<think>\neasy\n</think>\n\n4"), "easy\n</think>\n\n4<|im_end|>"),
        (says("assistant", "easy</think>4"), "easy</think>4<|im_end|>"),
        (says("assistant", "4", reasoning_content="easy"), "easy\n</think>\n\n4<|im_end|>"),
        (says("assistant", "4"), "\n</think>\n\n4<|im_end|>"),
    ]:
        assert look(tmp_path, own, {"messages": [user, said]}) == [(sampled, [learned])]
    texts = look(
        tmp_path, own, {"messages": [user, says("assistant", "4"), says("user", "Sure?"), says("assistant", "Yes")]}
    )
    assert [runs for _, runs in texts] == [["\n</think>\n\n4<|im_end|>"], ["\n</think>\n\nYes<|im_end|>"]]


def test_a_thought_that_the_template_leaves_out_is_learned_all_the_same(tmp_path: Path) -> None:
    """It is what the policy would have written, and what the next turn reads is the template's."""
    own, user = tokenizer_with("opened_thought", ("<|im_end|>",), "<|im_start|>"), says("user", "2+2?")
    own.hf.chat_template = own.hf.chat_template.replace("<think>\\n", "")
    said = "<think>\neasy\n</think>\n\n4"
    row = {"messages": [user, says("assistant", said), user, says("assistant", "Four.")]}
    texts = look(tmp_path, own, row)
    assert [runs for _, runs in texts] == [[f"{said}<|im_end|>"], ["Four.<|im_end|>"]]
    assert [prompt.count("easy") for prompt, _ in texts] == [0, 0]


def test_a_turn_of_a_template_that_does_not_close_it_ends_with_the_next_turn_s_token(tmp_path: Path) -> None:
    own = tokenizer_with("role_ends", ("<|user|>", "<|observation|>", "<eos>"), "<|assistant|>", "<|system|>")
    messages = [
        says("user", "Read a."),
        says("assistant", '<tool_call>{"name": "read", "arguments": {}}</tool_call>'),
        says("tool", "text"),
        says("assistant", "Done."),
    ]
    [(_, runs)] = look(tmp_path, own, {"messages": messages, "tools": TOOLS})
    assert runs == [f"{messages[1]['content']}<|observation|>", "Done.<|user|>"]


@pytest.mark.parametrize("tools", [TOOLS, '[{"name": "read", "parameters": {}}]', [TOOLS[0]["function"]]])
def test_the_template_shows_a_row_s_tools(tmp_path: Path, tools: Any) -> None:
    row = {"messages": [says("user", "Read a."), says("assistant", "Done.")]}
    [(with_tools, runs)] = look(tmp_path, tokenizer("qwen3"), row | {"tools": tools})
    assert '"name": "read"' in with_tools
    assert "Done.<|im_end|>" in runs[0]
    assert '"name": "read"' not in look(tmp_path, tokenizer("qwen3"), row | {"tools": None})[0][0]
    assert look(tmp_path, tokenizer("chatml"), row | {"tools": tools})[0][0].count('"name": "read"') == 1
    with pytest.raises(DataError, match=r"'tools' must be a list of functions' schemas.*Rename a"):
        look(tmp_path, tokenizer("qwen3"), row | {"tools": ["read"]})
    with pytest.raises(DataError, match="'prompt' is text"):
        look(tmp_path, tokenizer("qwen3"), {"prompt": "a", "completion": "b", "tools": tools})


@pytest.mark.parametrize("arguments", [{"path": "a"}, '{"path": "a"}'])
@pytest.mark.parametrize("content", [None, ""])
def test_logs_of_agents_are_demonstrations(tmp_path: Path, arguments: Any, content: str | None) -> None:
    """Calls as a list, in the form of each template, and as text where it shows none."""
    made = call() | {"function": {"name": "read", "arguments": arguments}}
    messages = [
        says("user", "Read a.", name=None),
        says("assistant", content, tool_calls=[made], refusal=None),
        says("tool", "text", tool_call_id="a", tool_calls=None),
        says("assistant", "Done."),
    ]
    for name in ("qwen3", "chatml"):
        texts = look(tmp_path, tokenizer(name), {"messages": messages, "tools": TOOLS})
        learned = [run for _, runs in texts for run in runs]
        assert '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call><|im_end|>' in learned[0], name
        assert "Done.<|im_end|>" in learned[-1]
    own = tokenizer("llama31")
    [(prompt, runs)] = look(tmp_path, own, {"prompt": messages[:3], "completion": "Done.", "tools": TOOLS})
    assert '{"name": "read", "parameters": {"path": "a"}}' in prompt
    assert runs == ["Done.<|eot_id|>"]


def test_calls_that_a_template_leaves_out_are_written_as_the_model_writes_them(tmp_path: Path) -> None:
    own = tokenizer_with("role_ends", ("<|user|>", "<|observation|>", "<eos>"), "<|assistant|>", "<|system|>")
    messages = [says("user", "Read a."), says("assistant", "I see.", tool_calls=[call(path="a")]), says("tool", "text")]
    row = {"prompt": messages, "completion": "Done."}
    [(prompt, _)] = look(tmp_path, own, row)
    assert 'I see.\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call><|observation|>' in prompt
    own.hf.chat_template = own.hf.chat_template.replace("<tool_call>", "<call>")
    with pytest.raises(ModelError, match=r"does not show the calls of a message, such as 'read', and"):
        look(tmp_path, replace(own), row)


def test_malformed_messages_are_refused(tmp_path: Path) -> None:
    for message, reason in [
        (says("assistant", None), "'content' must be text, got NoneType"),
        (says("assistant", "", tool_calls={"name": "f"}), "'tool_calls' must be a list"),
        (says("assistant", "", tool_calls=[{"id": "a"}]), "call 1 must be an object"),
        (says("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "call 1 are no JSON"),
        (says("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": [1]}}]), "must be an object"),
        (says("assistant", "a", weight=0.5), "'weight' must be 0"),
        (says("assistant", "a", note={"x": "\ud800"}), "half a surrogate pair"),
        (says("assistant", "a", weight=0), "all have the weight 0"),
    ]:
        with pytest.raises(DataError, match=reason):
            look(tmp_path, tokenizer("chatml"), {"messages": [says("user", "a"), message]})
