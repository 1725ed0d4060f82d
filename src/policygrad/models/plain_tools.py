"""Tools in the words of a conversation, for models whose chat template knows none, or that have no template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
_HOW = (
    'To call one, write <tool_call>{"name": "…", "arguments": {…}}</tool_call>. What it returns follows in '
    "<tool_response></tool_response>."
)


def tools_block(tools: Tools) -> str:
    """What tools there are, one JSON schema a line, and how they are called: the tags of Hermes and Qwen."""
    lines = (json.dumps(tool, ensure_ascii=False) for tool in tools)
    return "\n".join(["You can call these functions:", "<tools>", *lines, "</tools>", _HOW])


def tool_response(text: str) -> str:
    """What a tool returned, in the tags of Hermes and Qwen."""
    return f"<tool_response>\n{text}\n</tool_response>"


def without_tools(messages: Sequence[Message], tools: Tools) -> list[Message]:
    """The same conversation for a template without tools: they stand before the first message's text, and what they return is
    said by the user, all answers to one turn in one message."""
    found: list[Message] = []
    for is_tool, some in groupby(messages, lambda message: message.get("role") == "tool"):
        if is_tool:
            text = "\n".join(tool_response(str(message.get("content"))) for message in some)
            found.append({"role": "user", "content": text})
        else:
            found += some
    if not found:
        return found
    first = found[0]
    return [{**first, "content": f"{tools_block(tools)}\n\n{first.get('content')}"}, *found[1:]]
