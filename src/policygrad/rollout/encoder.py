"""What episodes need of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from policygrad.models.chat import Message, Tools
from policygrad.models.tool_calls import CallForm
from policygrad.tasks.types import Prompt


class Encoder(Protocol):
    """Text to tokens and back."""

    @property
    def context(self) -> int | None:
        """Positions of the model, in tokens."""
        ...

    @property
    def form(self) -> CallForm:
        """How the model writes calls of tools."""
        ...

    def encode(self, prompt: Prompt, max_tokens: int, source: str = ..., tools: Tools | None = ...) -> Tensor:
        """[P] int64; refuses a prompt that leaves no room for max_tokens."""
        ...

    def decode(self, tokens: Any) -> str: ...

    def answer(self, prompt: Tensor, said: Prompt, text: str, source: str = ...) -> list[int]:
        """The ids of an answer that somebody else wrote to the prompt, its end token the last."""
        ...

    def continuation(
        self, so_far: Prompt, reply: str, new: Prompt, source: str = ..., tools: Tools | None = ...
    ) -> Tensor:
        """[n] int64; what stands between a sampled turn and the next. Raises RewrittenError where that cannot be."""
        ...

    def rewritten(
        self, messages: Sequence[Message], opening: int, new: int, source: str = ..., tools: Tools | None = ...
    ) -> tuple[Tensor, Tensor]:
        """([P'] int64, [n] int64); a conversation as it is written from then on, and what of it is new."""
        ...
