"""Rendering chat messages to text and token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from policygrad.errors import ModelError
from policygrad.models.chat.bounded_templates import TemplateOverrunError, bounded_rendering
from policygrad.models.chat.declared import REASONING_FIELDS
from policygrad.models.chat.formats import supports_tools, write_calls
from policygrad.models.chat.messages import MESSAGE_WEIGHT, Message, Tools
from policygrad.models.chat.template_options import get_chat_template
from policygrad.models.chat.turns import END_OF_THOUGHT, THOUGHT, AssistantMessage, ToolCall, number_calls
from policygrad.utils.message_parts import content_text, list_pictures

if TYPE_CHECKING:
    from policygrad.models.tokenizer import Tokenizer

# Tools for models whose chat template does not support them, or that have none.


def format_tools(tools: Tools) -> str:
    """List the tools, one JSON schema per line, and how to call them, with the tags of Hermes and Qwen."""
    lines = (json.dumps(tool, ensure_ascii=False) for tool in tools)
    usage = (
        'To call one, write <tool_call>{"name": "…", "arguments": {…}}</tool_call>. What it returns follows in '
        "<tool_response></tool_response>."
    )
    return "\n".join(["You can call these functions:", "<tools>", *lines, "</tools>", usage])


def format_tool_response(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def inline_tools(messages: Sequence[Message], tools: Tools) -> list[Message]:
    """Convert a conversation for a template that does not support tools.

    The tools, if any, are listed before the first message's text; the results of one turn become one user message.
    """
    converted: list[Message] = []
    for is_tool, group in groupby(messages, lambda message: message.get("role") == "tool"):
        if is_tool:
            converted.append({"role": "user", "content": join_tool_responses(list(group))})
        else:
            converted += group
    if not converted or not tools:
        return converted
    first = converted[0]
    content, listed = first.get("content"), f"{format_tools(tools)}\n\n"
    if isinstance(content, (list, tuple)):
        return [{**first, "content": ({"type": "text", "text": listed}, *content)}, *converted[1:]]
    return [{**first, "content": f"{listed}{content}"}, *converted[1:]]


def join_tool_responses(messages: Sequence[Message]) -> Any:
    """Join what the tools of one turn returned: text, or parts if there is a picture."""
    if not any(list_pictures(messages)):
        return "\n".join(format_tool_response(content_text(message.get("content") or "")) for message in messages)
    parts = list[Any]()
    for message in messages:
        content = message.get("content") or ""
        inner = [{"type": "text", "text": content}] if isinstance(content, str) else content
        before = "\n<tool_response>\n" if parts else "<tool_response>\n"
        parts += [{"type": "text", "text": before}, *inner, {"type": "text", "text": "\n</tool_response>"}]
    return tuple(parts)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    generation_prompt: bool,
    tools: Tools | None = None,
    source: str = "a prompt",
) -> str:
    """Render messages with the model's chat template.

    Args:
        generation_prompt: Append what opens the assistant's turn.
        tools: Rendered by the template, or within the first message if it does not support them.
        source: Location of the messages, for error messages.

    Raises:
        ModelError: No chat template, or one that refuses the messages.
    """
    if getattr(tokenizer.hf, "chat_template", None) is None:
        raise ModelError(
            f"{source} is a list of chat messages and the tokenizer of {tokenizer.name!r} has no chat template: set "
            "`chat_template` in its tokenizer_config.json, or give the prompts as strings"
        )
    has_calls = any(message.get("tool_calls") for message in messages)
    if (tools or has_calls) and not supports_tools(get_chat_template(tokenizer.hf)):
        messages, tools = inline_tools(messages, tools or ()), None
    options = dict(tokenizer.template_options) | ({} if tools is None else {"tools": list(tools)})
    conversation = [_with_parts(message, tokenizer, source) for message in messages]

    def apply(conversation: Sequence[Message], generation_prompt: bool, **options: Any) -> str:
        with bounded_rendering():
            text = tokenizer.hf.apply_chat_template(
                list(conversation), tokenize=False, add_generation_prompt=generation_prompt, **options
            )
        return str(text)

    if has_calls:
        conversation = [_write_calls(message, tokenizer, apply, source) for message in conversation]
    if any(message.get("role") == "system" for message in messages[1:]):
        from policygrad.models.chat.system_messages import place_system_messages

        key = get_chat_template(tokenizer.hf), repr(tokenizer.template_options)
        show = partial(apply, generation_prompt=True, **tokenizer.template_options)
        conversation = place_system_messages(conversation, show, key)
    try:
        return apply(conversation, generation_prompt, **options)
    except TemplateOverrunError as error:
        raise ModelError(
            f"{source}: the chat template of {tokenizer.name!r} cannot be rendered: {error}. Use another template, or shorter "
            "messages"
        ) from error
    except Exception as error:  # a template is the model's program: it may raise anything
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise ModelError(
            f"{source}: the chat template of {tokenizer.name!r} refuses the messages (roles: {roles}): "
            f"{str(error).strip().rstrip('.') or repr(error)}. Change the messages, or give the prompt as a string"
        ) from error


def write_message(tokenizer: Tokenizer, message: AssistantMessage, call_ids: Sequence[str] = ()) -> Message:
    """Return a turn as the model's template reads it: its reasoning under the key that the template knows, or in the content."""
    written: dict[str, Any] = {"role": "assistant", "content": message.content.strip()}
    if reasoning := message.reasoning.strip():
        template = get_chat_template(tokenizer.hf) or ""
        key = next((name for name in REASONING_FIELDS if re.search(rf"\b{name}\b", template)), None)
        if key is None:
            written["content"] = f"{THOUGHT}\n{reasoning}\n{END_OF_THOUGHT}\n\n{written['content']}"
        else:
            written[key] = reasoning
    if message.calls:
        ids = call_ids or number_calls(message.calls, 0)
        written["tool_calls"] = [
            {"id": number, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for number, call in zip(ids, message.calls, strict=True)
        ]
    return written


def _with_parts(message: Message, tokenizer: Tokenizer, source: str) -> dict[str, Any]:
    """Write a message's content as its model's template reads it: text, or for a model that sees a list of parts."""
    content = message.get("content")
    message = {key: value for key, value in message.items() if key != MESSAGE_WEIGHT}
    if tokenizer.pictures is None:
        if any(list_pictures([message])):
            raise ModelError(
                f"{source} has a picture, and {tokenizer.name!r} does not see: give a vision-language model, with its processor"
            )
        if content is None or not _reads_parts(get_chat_template(tokenizer.hf), tokenizer):
            return {**message, "content": content if content is None else content_text(content)}
        content = content_text(content)
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    parts = [part if part["type"] == "text" else {"type": "image"} for part in content or ()]
    return {**message, "content": parts}


_reading_parts: dict[str | None, bool] = {}


def _reads_parts(template: str | None, tokenizer: Tokenizer) -> bool:
    """Return True when a chat template shows a list of parts, and not a text, as that of a model that sees does."""
    if template not in _reading_parts:
        word = "PARTSX"

        def shows(content: Any) -> bool:
            try:
                with bounded_rendering():
                    return word in str(
                        tokenizer.hf.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
                    )
            except Exception:  # it does not read this form; why it refuses a message is told when that is rendered
                return False

        _reading_parts[template] = not shows(word) and shows([{"type": "text", "text": word}])
    return _reading_parts[template]


# A message's calls, as its template reads them: with the content "" or none, and arguments as an object or as JSON text.

_CALL_FORMS: tuple[tuple[str | None, bool], ...] = (("", False), (None, False), ("", True), (None, True))
"""(content of a message without one, whether arguments are text), in the order in which they are tried."""
_found_forms: dict[tuple[str | None, str, bool], tuple[str | None, bool] | None] = {}


def _write_calls(
    message: dict[str, Any], tokenizer: Tokenizer, apply: Callable[..., str], source: str
) -> dict[str, Any]:
    """Return a message with its calls in a form that the template shows, or else as text, in the format that they are parsed in.

    Raises:
        ModelError: The template shows no calls, and its format is unknown.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    template, content = get_chat_template(tokenizer.hf), message["content"]
    key = template, repr(tokenizer.template_options), bool(content)
    if key not in _found_forms:
        is_read = supports_tools(template)
        _found_forms[key] = _find_call_form(tokenizer, apply, has_content=bool(content)) if is_read else None
    if (form := _found_forms[key]) is not None:
        empty, as_text = form
        return {
            **message,
            "content": content or empty,
            "tool_calls": [_write_arguments(call, as_text) for call in calls],
        }
    functions = [call["function"] for call in calls]
    written = write_calls(
        tokenizer.chat_format, [ToolCall(function["name"], function["arguments"]) for function in functions]
    )
    if written is None:
        raise ModelError(
            f"{source}: the chat template of {tokenizer.name!r} does not show the calls of a message, such as "
            f"{functions[0]['name']!r}, and their format is unknown: write the call into the content, as the model writes it"
        )
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    if isinstance(content, list):
        return {**rest, "content": [*content, {"type": "text", "text": written}]}
    return {**rest, "content": f"{content}\n{written}" if content else written}


def _find_call_form(
    tokenizer: Tokenizer, apply: Callable[..., str], *, has_content: bool
) -> tuple[str | None, bool] | None:
    """Return the first form of a call that the template shows whole; None = it shows none."""
    name, key, value, said = "CALLNAMEX", "CALLKEYX", "CALLVALUEX", "CALLSAIDX"
    asked: dict[str, Any] = {"role": "user", "content": "x"}
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {key: value}}}
    result = {"role": "tool", "tool_call_id": "call00000", "name": name, "content": "x"}
    if tokenizer.pictures is not None:
        asked, result = ({**m, "content": [{"type": "text", "text": "x"}]} for m in (asked, result))
    given: Any = said if tokenizer.pictures is None else [{"type": "text", "text": said}]
    for empty, as_text in _CALL_FORMS:
        content = given if has_content else empty
        shown = {"role": "assistant", "content": content, "tool_calls": [_write_arguments(call, as_text)]}
        try:
            text = apply([asked, shown, result], True, **tokenizer.template_options)
        except Exception:  # it does not read this form; why it refuses a message is told when that is rendered
            continue
        # an object that is printed without `tojson` is Python's
        if (
            all(word in text for word in (name, key, value))
            and f"'{key}'" not in text
            and (said in text) >= has_content
        ):
            return empty, as_text
    return None


def _write_arguments(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def expand_pictures(tokenizer: Tokenizer, text: str, messages: Sequence[Message], source: str) -> str:
    """Return a rendered text with the placeholder tokens of its messages' pictures. Raises ModelError."""
    pictures = list(list_pictures(messages))
    if not pictures or tokenizer.pictures is None:
        return text
    return tokenizer.pictures.expand(text, pictures, source)


def render_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    generation_prompt: bool,
    tools: Tools | None = None,
    source: str = "a prompt",
) -> list[int]:
    """Render messages and encode them; the template writes all special tokens. Raises like `render`."""
    text = render(tokenizer, messages, generation_prompt=generation_prompt, tools=tools, source=source)
    return encode_text(tokenizer, expand_pictures(tokenizer, text, messages, source))


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a rendered text."""
    return list(tokenizer.hf(text, add_special_tokens=False)["input_ids"])
