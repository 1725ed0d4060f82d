"""A turn of the assistant as a message: what it says, what it thinks, and which tools it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policygrad.models.chat.control_tokens import replace_surrogates

THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
"""What most models write around their reasoning."""


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it, with lone surrogates replaced by U+FFFD."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()
    """Arguments without a name, which come first."""
    error: str = ""
    """Why the call cannot be parsed; "" = it can."""

    def __post_init__(self) -> None:
        for name in ("name", "arguments", "positional", "error"):
            object.__setattr__(self, name, replace_surrogates(getattr(self, name)))


ToolCallParser = Callable[[str], tuple[ToolCall, ...]]
"""Returns the calls in the text of a turn, in order; those that cannot be parsed carry an error. () = no calls."""


@dataclass(frozen=True)
class AssistantMessage:
    """A turn of the assistant, as its model's format reads it."""

    content: str = ""
    """What it says, without its reasoning and its calls."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    is_thinking: bool = False
    """True when the turn ended within its reasoning: it says and calls nothing."""
    unread: str = ""
    """Why its calls cannot be read, whatever they are; "" = they can."""

    @property
    def is_complete(self) -> bool:
        """Return True when all calls can be written down again."""
        return not self.unread and not any(call.error or call.positional for call in self.calls)

    def says_the_same(self, other: AssistantMessage) -> bool:
        """Return True when two messages differ in white space at the ends of their texts at most."""
        return (self.content.strip(), self.reasoning.strip(), self.calls) == (
            other.content.strip(),
            other.reasoning.strip(),
            other.calls,
        )


def number_calls(calls: Sequence[ToolCall], turn: int) -> tuple[str, ...]:
    """Return the ids of a turn's calls: nine letters and digits, which is what Mistral's templates ask for."""
    return tuple(f"c{turn % 10_000:04d}{number % 10_000:04d}" for number in range(len(calls)))


def split_thought(text: str, *, opened: bool = False) -> AssistantMessage:
    """Split a text at its last `</think>`; without one it is an answer, or a thought that has not ended."""
    thought, closed, answer = text.rpartition(END_OF_THOUGHT)
    if closed:
        return AssistantMessage(answer, thought.lstrip().removeprefix(THOUGHT))
    if opened or text.lstrip().startswith(THOUGHT):
        return AssistantMessage(reasoning=text.lstrip().removeprefix(THOUGHT), is_thinking=True)
    return AssistantMessage(text)
