"""Chat messages and tools of rows, as logs of agents and tables hold them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import write_rows
from doubles.templates import tokenizer
from policygrad.errors import DataError
from policygrad.rollout.environment import SingleTurn
from policygrad.tasks import load_task
from policygrad.tasks.base import Example

READ = {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
WAIT = {"name": "wait", "description": "Waits.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": READ}, {"type": "function", "function": WAIT}]


def log(number: int, arguments: Any) -> list[dict[str, Any]]:
    """An agent's messages, as OpenAI's API has them."""
    name = ("read", "wait")[number % 2]
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": f"Task {number}."},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "text", "tool_call_id": "a", "name": name},
        {"role": "user", "content": "So?", "name": None},
    ]


def rows(as_text: bool) -> list[dict[str, Any]]:
    given = [({"path": "a", "lines": 3}, {"seconds": 1})[number % 2] for number in range(4)]
    return [
        {"prompt": log(n, json.dumps(x) if as_text else x), "answer": "yes", "tools": TOOLS}
        for n, x in enumerate(given)
    ]


def read(path: str) -> list[Example]:
    return list(load_task(path).rows)


def test_the_same_log_is_the_same_prompt_from_text_objects_and_tables(tmp_path: Path) -> None:
    """A table gives every object all keys of all rows, with null where there was none."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows(False)), tmp_path / "c.parquet")
    texts = write_rows(tmp_path / "a.jsonl", rows(True))
    objects = write_rows(tmp_path / "b.jsonl", rows(False))
    first, *others = (read(str(path)) for path in (texts, objects, tmp_path / "c.parquet"))
    for example, *same in zip(first, *others, strict=True):
        own = tokenizer("qwen3")
        expected = own.encode(example.prompt, 0, tools=example.tools).ids.tolist()
        assert [own.encode(e.prompt, 0, tools=example.tools).ids.tolist() for e in same] == [expected] * 2
        assert [list(e.tools) for e in same] == [TOOLS] * 2
        assert [e.prompt for e in same] == [example.prompt] * 2
    shown = tokenizer("qwen3").hf.decode(tokenizer("qwen3").encode(first[0].prompt, 0).ids)
    assert '<tool_call>\n{"name": "read", "arguments": {"path": "a", "lines": 3}}\n</tool_call><|im_end|>' in shown
    assert "None" not in shown
    assert "null" not in shown


def test_a_row_s_tools_are_shown_in_training(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows(True))
    example = read(path)[0]
    assert example.columns["tools"] == TOOLS  # and rewards still have them
    observation = asyncio.run(SingleTurn(example).reset())
    assert list(observation.tools) == TOOLS
    (again, *_) = load_task([pg.Example(example.prompt, {"answer": "yes"}, tools=example.tools)]).rows
    assert list(again.tools) == TOOLS
    text = {"prompt": "a text", "answer": "yes", "tools": ["a column like any other"]}
    assert read(write_rows(tmp_path / "text.jsonl", [text]))[0].tools == ()
    bad = write_rows(tmp_path / "bad.jsonl", [rows(True)[0] | {"tools": ["read"]}])
    with pytest.raises(
        DataError, match=r"bad\.jsonl:1: 'tools' must be a list of functions' schemas.*entry 1 is read\. Rename"
    ):
        load_task(bad)
