"""OpenAI's completions of text, and log-probabilities of given text (`echo`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from policygrad.proxy.fields import COMPLETION_FIELDS, check_fields
from policygrad.proxy.reading import (
    MAX_ALTERNATIVES,
    MAX_CHOICES,
    openai_error,
    quote,
    read_count,
    read_field,
    read_sampling,
    read_stop,
    render_choices,
)
from policygrad.proxy.requests import ApiError, ApiFormat, ChatChoice, ChatReply, ChatRequest, Event

MAX_PROMPTS = 1024
"""Prompts of one request."""


def parse_completion(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request of `/v1/completions`. Raises ApiError."""
    other = check_fields(body, COMPLETION_FIELDS)
    prompts = _read_prompts(body.get("prompt"))
    has_echo = read_field(body, "echo", bool, False)
    options = read_field(body, "stream_options", dict, {})
    logprobs = read_field(body, "logprobs", (int, bool), None)
    if logprobs is False:
        logprobs = None
    if logprobs is not None and not 0 <= logprobs <= MAX_ALTERNATIVES:
        raise ApiError(f"logprobs must be from 0 to {MAX_ALTERNATIVES}, not {logprobs}")
    count = read_count(body, "n", 1, 1, MAX_CHOICES)
    if read_field(body, "best_of", int, count) != count:
        raise ApiError(f"best_of={body['best_of']} would choose among samples: send n, {count}, or leave it out")
    return ChatRequest(
        prompts[0],
        prompts[1:],
        stop=read_stop(body.get("stop")),
        num_choices=count,
        has_logprobs=logprobs is not None,
        num_alternatives=int(logprobs or 0),
        has_echo=has_echo,
        has_usage_event=bool(options.get("include_usage")),
        parses_calls=False,
        other_fields=other,
        **read_sampling(body, "max_tokens", least=0 if has_echo else 1),
    )


def _read_prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts: texts or lists of token ids."""
    several = isinstance(given, list) and given and isinstance(given[0], str | list)
    prompts = tuple(tuple(p) if isinstance(p, list) else p for p in (given if several else [given]))
    for prompt in prompts:
        is_ids = isinstance(prompt, tuple) and all(type(token) is int and token >= 0 for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise ApiError(
                f"prompt must be a text, a list of token ids, or a list of several of either, not {quote(given)}"
            )
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(f"a request has {len(prompts)} prompts, and the most is {MAX_PROMPTS}")
    return prompts


def _render_choice(request: ChatRequest, index: int, choice: ChatChoice, prompt_ids: tuple[int, ...]) -> dict[str, Any]:
    prompt = choice.prompt
    text = choice.text if prompt is None else prompt.text + choice.text
    logprobs: dict[str, Any] | None = None
    if request.has_logprobs:
        pieces, logp = list(choice.pieces), [*choice.logp]
        tops: list[Any] = list(choice.alternatives)
        start = 0 if prompt is None else len(prompt.text)
        offsets = list(accumulate(map(len, pieces), initial=start))[:-1]
        if prompt is not None:
            pieces, logp = [*prompt.pieces, *pieces], [*prompt.logp, *logp]  # type: ignore[list-item]
            tops, offsets = [*prompt.alternatives, *tops], [*prompt.offsets, *offsets]
        is_listed = request.num_alternatives > 0 and len(tops) == len(pieces)
        logprobs = {
            "tokens": pieces,
            "token_logprobs": logp,
            "top_logprobs": [None if top is None else dict(top) for top in tops] if is_listed else None,
            "text_offset": offsets,
        }
    ids = {}
    if request.has_token_ids:
        ids = {"token_ids": list(choice.token_ids), "prompt_token_ids": list(prompt_ids)}
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason, **ids}


def render_completion(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """Return the answer of `/v1/completions`: the choices of the first prompt, of the second, …"""
    prompts = (reply.prompt_ids, *reply.more_prompt_ids)
    per_prompt = len(reply.choices) // len(prompts)
    choices = [
        _render_choice(request, index, choice, prompts[index // max(per_prompt, 1)])
        for index, choice in enumerate(reply.choices)
    ]
    return render_choices(request, reply, f"cmpl-{reply.identifier}", "text_completion", choices)


def stream_completion(request: ChatRequest, reply: ChatReply) -> Iterator[Event]:
    """Yield the answer of `/v1/completions`, each choice as one chunk."""
    rendered = render_completion(request, reply)
    for choice in rendered["choices"]:
        yield "", {**rendered, "choices": [choice], "usage": None}
    if request.has_usage_event:
        yield "", {**rendered, "choices": []}


COMPLETIONS = ApiFormat(
    "/v1/completions", parse_completion, render_completion, stream_completion, openai_error, "[DONE]"
)
