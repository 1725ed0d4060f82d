"""System messages elsewhere than at the beginning, which agents send and many chat templates refuse, or leave out without a word.

Claude Code describes its environment in one after the user's first message, Codex sends several at the beginning. Where a template
does not show them, those at the beginning become one, and a later one a message of the user, of its own or with its neighbour's.
What a message becomes depends on those before it alone, so that a conversation that goes on is rendered as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Any

Conversation = Sequence[dict[str, Any]]
_FORMS: tuple[Callable[[Conversation], list[dict[str, Any]]], ...]
_found: dict[Hashable, int] = {}


def place_system_messages(
    messages: Conversation, show: Callable[[Conversation], str], key: Hashable
) -> list[dict[str, Any]]:
    """Return messages in the first form in which a template shows a conversation with several system messages.

    Args:
        show: Renders messages, and may raise anything.
        key: Names the template and its options.
    """
    if key not in _found:
        _found[key] = next((n for n, form in enumerate(_FORMS) if _is_shown(form, messages, show)), 0)
    return _FORMS[_found[key]](messages)


def _is_shown(form: Callable[[Conversation], Conversation], messages: Conversation, show: Callable[[Any], str]) -> bool:
    """Try a form on a conversation with system messages in every place."""
    roles = ("system", "system", "user", "system", "assistant", "system", "user")
    words = [f"PLACED{number}X" for number in range(len(roles))]
    is_text = isinstance(messages[-1].get("content"), str)
    contents = words if is_text else [[{"type": "text", "text": word}] for word in words]
    tried = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    try:
        shown = show(form(tried))
    except Exception:  # it does not read this form; why it refuses a message is told when that is rendered
        return False
    return all(word in shown for word in words)


def _keep(messages: Conversation) -> list[dict[str, Any]]:
    return list(messages)


def _join_first(messages: Conversation) -> list[dict[str, Any]]:
    """Join the system messages at the beginning, and give later ones to the user."""
    first = next((number for number, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    later = [
        {**message, "role": "user"} if message.get("role") == "system" else message for message in messages[first:]
    ]
    return [*_join(messages[:first]), *later]


def _join_all(messages: Conversation) -> list[dict[str, Any]]:
    """The same, with the user's messages that follow one another joined, for a template whose roles alternate."""
    joined = list[dict[str, Any]]()
    for role, group in groupby(_join_first(messages), lambda message: message.get("role")):
        same = list(group)
        joined += _join(same) if role == "user" else same
    return joined


_FORMS = (_keep, _join_first, _join_all)


def _join(messages: Conversation) -> list[dict[str, Any]]:
    """Join the contents of messages of one role."""
    if len(messages) < 2:
        return list(messages)
    contents = [message.get("content") or "" for message in messages]
    if all(isinstance(content, str) for content in contents):
        return [{**messages[0], "content": "\n\n".join(contents)}]
    parts = [[{"type": "text", "text": c}] if isinstance(c, str) else list(c) for c in contents]
    between = {"type": "text", "text": "\n\n"}
    return [{**messages[0], "content": [*parts[0], *(p for inner in parts[1:] for p in (between, *inner))]}]
