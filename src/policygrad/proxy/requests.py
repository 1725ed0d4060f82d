"""What the formats have in common: a request in, a reply out, and an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from policygrad.models.chat.turns import ToolCall

Message = dict[str, Any]
Prompt = str | tuple[int, ...] | tuple[Message, ...]
Event = tuple[str, dict[str, Any]]
"""One event of a stream: its name, "" for a format without names, and its data."""


class ApiError(Exception):
    """A request that is answered with an error of HTTP.

    Args:
        status: 400 for a request that cannot be answered, which clients do not repeat.
        code: A word for programs, as in OpenAI's `error.code`.
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class ToolForm:
    """How the calls of a tool are returned that is no plain function."""

    kind: str
    """function (of a namespace), custom, or a type that the API defines: local_shell, shell, apply_patch."""
    name: str
    namespace: str = ""


@dataclass(frozen=True)
class ChatRequest:
    """A request for completions, whatever format it came in."""

    prompt: Prompt
    """Text, token ids, or messages with the roles system, user, assistant and tool. An assistant's `tool_calls` have arguments as
    objects."""
    more_prompts: tuple[Prompt, ...] = ()
    """Further prompts, each answered by itself; the server sends handlers one request for each."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas in the form of chat templates: {"type": "function", "function": {...}}."""
    tool_forms: Mapping[str, ToolForm] = field(default_factory=dict)
    """Of tools that are no plain function, by the name that the template has."""
    max_tokens: int | None = None
    """None = as many as there is room for; 0 = none, with `has_echo`."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the completion and are not part of it."""
    num_choices: int = 1
    seed: int | None = None
    stream: bool = False
    has_usage_event: bool = False
    """A stream of OpenAI's chat format ends with the numbers of tokens."""
    has_logprobs: bool = False
    num_alternatives: int = 0
    """How many of the most probable tokens are listed beside each token."""
    has_echo: bool = False
    """The prompt and, with `has_logprobs`, its log-probabilities are part of the answer."""
    only_counts: bool = False
    """Nothing is sampled: the number of the prompt's tokens is asked for."""
    has_token_ids: bool = False
    """The reply lists token ids, as with vLLM's `return_token_ids`."""
    parses_calls: bool = True
    """False = tool calls in the text are left as text."""
    other_fields: tuple[str, ...] = ()
    """Fields that cannot be followed, and without which the request is answered."""
    model: str = ""
    """The name that the program gave, which is repeated to it."""


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens of a prompt with what the policy thinks of them."""

    pieces: tuple[str, ...]
    logp: tuple[float | None, ...]
    """Nats of each token; None for the first."""
    alternatives: tuple[Mapping[str, float] | None, ...]
    """Nats of the most probable tokens in each place."""
    text: str
    """The text of all: pieces of characters and of some vocabularies do not add up to it."""
    offsets: tuple[int, ...]
    """Where each begins in the text."""


@dataclass(frozen=True)
class ChatChoice:
    """One completion."""

    text: str
    """As sampled, without its end token, up to a stop text."""
    finish_reason: str
    """stop, length or tool_calls."""
    token_ids: tuple[int, ...]
    logp: tuple[float, ...]
    """Nats of each token."""
    pieces: tuple[str, ...] = ()
    """The text of each token, if log-probabilities were asked for."""
    content: str = ""
    """What it says: the text without reasoning and tool calls."""
    calls: tuple[ToolCall, ...] = ()
    call_ids: tuple[str, ...] = ()
    stopped_by: str = ""
    """The stop text that ended it."""
    alternatives: tuple[Mapping[str, float], ...] = ()
    """Nats of the most probable tokens in each place, if they were asked for."""
    prompt: ScoredTokens | None = None
    """The prompt, if `ChatRequest.has_echo`."""
    reasoning: str = ""


@dataclass(frozen=True)
class ChatReply:
    """The completions of a request."""

    choices: tuple[ChatChoice, ...]
    prompt_ids: tuple[int, ...]
    more_prompt_ids: tuple[tuple[int, ...], ...] = ()
    """Of `ChatRequest.more_prompts`, whose choices follow those of the first prompt."""
    identifier: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_read(self) -> int:
        """Tokens of all prompts."""
        return len(self.prompt_ids) + sum(map(len, self.more_prompt_ids))

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(frozen=True)
class ApiFormat:
    """One of the request formats."""

    path: str
    parse: Callable[[Mapping[str, Any]], ChatRequest]
    """Raises ApiError."""
    render: Callable[[ChatRequest, ChatReply], dict[str, Any]]
    stream: Callable[[ChatRequest, ChatReply], Iterator[Event]]
    render_error: Callable[[ApiError], dict[str, Any]]
    last_line: str = ""
    """The data that ends a stream."""
