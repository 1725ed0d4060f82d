"""Contents of chat messages: a text, or parts that are texts and pictures. No picture is opened here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policygrad.utils.pictures import Picture

UNSEEN_PICTURE = "[a picture, which cannot be shown here]"


def describe_pictures(messages: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return messages with a text in the place of each picture, for a model that reads text alone."""

    def describe(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "text", "text": UNSEEN_PICTURE} if part["type"] == "image" else part

    contents = [message.get("content") for message in messages]
    return tuple(
        {**m, "content": content_text(map(describe, c))} if isinstance(c, list | tuple) else m
        for m, c in zip(messages, contents, strict=True)
    )


def list_pictures(prompt: str | Iterable[Mapping[str, Any]]) -> Iterator[Picture]:
    """Yield the pictures of a prompt in order."""
    messages: Iterable[Mapping[str, Any]] = () if isinstance(prompt, str) else prompt
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            if part["type"] == "image":
                yield part["image"]


def content_text(content: str | Iterable[Mapping[str, Any]]) -> str:
    """Return a message's content as text, each picture as `[image]`."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "[image]" for part in content)


def to_plain(prompt: Any) -> Any:
    """Return a prompt as JSON can hold it: each picture as `{"type": "image", "sha256": ...}`."""
    if isinstance(prompt, str):
        return prompt
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [_plain_part(part) for part in message["content"]]}
        for message in prompt
    ]


def _plain_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return part if part["type"] == "text" else {"type": "image", "sha256": part["image"].digest}
