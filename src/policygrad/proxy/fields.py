"""What becomes of each field of the four request formats, as tables: a field is read, changes nothing, is counted, or is refused.

A field that is in no table is counted: the request is answered without it, and the step's notes, or `policygrad proxy`, name it.
Sources: platform.openai.com/docs/api-reference (chat, completions, responses), docs.anthropic.com/en/api/messages; vLLM's, SGLang's
and llama.cpp's sampling parameters, which clients send as `extra_body`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from policygrad.proxy.requests import ApiError


@dataclass(frozen=True)
class Field:
    """What becomes of one field. A name with a point is a field of an object: `text.format`."""

    use: Literal["read", "unused", "counted", "refused"]
    """read: it is followed; unused: neither the samples nor the answer depend on it; counted: it cannot be followed, and the
    request is answered without it; refused: with status 400."""
    neutral: tuple[Any, ...] = ()
    """Values beside null that are as good as none."""


READ, UNUSED = Field("read"), Field("unused")


def _counted(*neutral: Any) -> Field:
    return Field("counted", neutral)


def _refused(*neutral: Any) -> Field:
    return Field("refused", neutral)


def _all(field: Field, *names: str) -> dict[str, Field]:
    return dict.fromkeys(names, field)


_SAMPLING = _all(READ, "model", "temperature", "top_p", "top_k", "seed", "stream", "return_token_ids")
_LABELS = _all(
    UNUSED,
    *("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("request_id", "priority", "cache_salt", "client_metadata"),
)
_OTHER_DISTRIBUTION = {
    "frequency_penalty": _refused(0),
    "presence_penalty": _refused(0),
    "repetition_penalty": _refused(1),
    "length_penalty": _refused(1),
    "logit_bias": _refused({}),
    "min_p": _refused(0),
    "typical_p": _refused(1),
    "top_a": _refused(0),
    "tfs_z": _refused(1),
    "mirostat": _refused(0),
    "dry_multiplier": _refused(0),
    "xtc_probability": _refused(0),
    "dynatemp_range": _refused(0),
    "min_tokens": _refused(0),
    "ignore_eos": _refused(False),
    "use_beam_search": _refused(False),
    **_all(_refused([]), "bad_words", "stop_token_ids", "allowed_token_ids", "logits_processors"),
    **_all(_refused({}), "structured_outputs"),
    **_all(_refused(), "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
    **_all(_refused(), "json_schema", "regex", "ebnf", "grammar", "custom_logit_processor", "thinking_token_budget"),
}
_OTHER_TEXT = {
    "prompt_logprobs": _refused(),
    "truncate_prompt_tokens": _refused(),
    "include_stop_str_in_output": _refused(False),
    "skip_special_tokens": _refused(True),
    "spaces_between_special_tokens": _refused(True),
    "add_special_tokens": _refused(),
}
_SHARED = {**_SAMPLING, **_LABELS, **_OTHER_DISTRIBUTION, **_OTHER_TEXT}
_CHOICES = {
    **_all(READ, "max_tokens", "stop", "n", "logprobs", "stream_options.include_usage"),
    **_all(UNUSED, "stream_options.include_obfuscation", "stream_options.continuous_usage_stats"),
    "response_format": _refused({"type": "text"}),
}
"""Of OpenAI's formats whose answer is a list of choices."""
_TOOL_CHOICE = {"tool_choice": _counted("auto", "none"), "parallel_tool_calls": _counted(True)}

CHAT_FIELDS: Mapping[str, Field] = {
    **_SHARED,
    **_CHOICES,
    **_TOOL_CHOICE,
    **_all(READ, "messages", "tools", "max_completion_tokens", "top_logprobs"),
    **_all(UNUSED, "store", "prediction"),
    "reasoning_effort": _counted("none"),
    "verbosity": _counted("medium"),
    **_all(_counted(), "reasoning", "thinking", "include_reasoning"),
    "functions": _refused([]),
    "function_call": _refused("auto", "none"),
    "modalities": _refused(["text"]),
    "echo": _refused(False),
    "add_generation_prompt": _refused(True),
    "continue_final_message": _refused(False),
    "chat_template_kwargs": _refused({}),
    **_all(_refused(), "audio", "web_search_options", "chat_template", "documents", "mm_processor_kwargs"),
}
COMPLETION_FIELDS: Mapping[str, Field] = {
    **_SHARED,
    **_CHOICES,
    **_all(READ, "prompt", "echo", "best_of"),
    "suffix": _refused(""),
    "prompt_embeds": _refused(),
}
RESPONSE_FIELDS: Mapping[str, Field] = {
    **_SHARED,
    **_all(READ, "input", "instructions", "tools", "max_output_tokens", "previous_response_id", "store", "include"),
    "top_logprobs": READ,
    **_TOOL_CHOICE,
    **_all(UNUSED, "stream_options", "max_tool_calls"),
    "reasoning.effort": _counted("none"),
    **_all(UNUSED, "reasoning.summary", "reasoning.generate_summary"),
    "text.verbosity": _counted("medium"),
    "text.format": _refused({"type": "text"}),
    "truncation": _counted("disabled"),
    "context_management": _counted([]),
    "background": _refused(False),
    **_all(_refused(), "conversation", "prompt"),
}
MESSAGE_FIELDS: Mapping[str, Field] = {
    **_SHARED,
    **_all(READ, "messages", "system", "tools", "max_tokens", "stop_sequences"),
    **_all(UNUSED, "betas", "anthropic_beta", "anthropic_version", "inference_geo", "speed", "cache_control"),
    "tool_choice.type": _counted("auto", "none"),
    "tool_choice.name": UNUSED,  # of a type that is counted
    "tool_choice.disable_parallel_tool_use": _counted(False),
    "thinking.type": _counted("disabled", "adaptive"),  # the second is what a policy does: it thinks as it sees fit
    "thinking.budget_tokens": _counted(),
    "thinking.display": UNUSED,
    "output_config.effort": _counted("high"),
    "output_config.format": _refused(),
    "context_management": _counted({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "output_format": _refused(),
    "container": _refused(),
    "mcp_servers": _refused([]),
}
TABLES: Mapping[str, Mapping[str, Field]] = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/responses": RESPONSE_FIELDS,
    "/v1/messages": MESSAGE_FIELDS,
}


def check_fields(body: Mapping[str, Any], fields: Mapping[str, Field]) -> tuple[str, ...]:
    """Return the names of a request's fields that cannot be followed, and without which it is answered.

    Raises:
        ApiError: A field without which the answer would be another than what was asked for.
    """
    counted = list[str]()
    for name, value in _flatten(body, fields):
        field = fields.get(name, _counted())
        if value is None or value in field.neutral:
            continue
        if field.use == "refused":
            allowed = " or ".join(map(json.dumps, field.neutral))
            raise ApiError(
                f"{name}={json.dumps(value, default=str)[:200]} cannot be followed here, where completions are samples of one "
                f"distribution and are not edited: {f'send {allowed}' if allowed else 'leave it out'}"
            )
        if field.use == "counted":
            counted.append(name)
    return tuple(counted)


def _flatten(body: Mapping[str, Any], fields: Mapping[str, Field]) -> Iterator[tuple[str, Any]]:
    """Yield fields with their names; those of an object whose fields are in the table one by one."""
    objects = {name.partition(".")[0] for name in fields if "." in name}
    for name, value in body.items():
        if name not in objects or value is None:
            yield name[:80], value
        elif not isinstance(value, dict):
            raise ApiError(f"{name} must be an object, not {json.dumps(value, default=str)[:200]}")
        else:
            yield from ((f"{name}.{inner}"[:80], given) for inner, given in value.items())
