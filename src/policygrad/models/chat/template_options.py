"""Values of a chat template's own variables, such as enable_thinking=false."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from policygrad.errors import ConfigError, ModelError

FLAG = "tokenizer.template-options"
GIVEN = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)
"""Variables that rendering itself gives."""
_FUNCTIONS = frozenset(("raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token", "unk_token"))
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""transformers' tag around the assistant's words, which jinja2 does not know."""


def parse_template_options(options: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE: a value is JSON (false, 3, null, "a") or else text. Raises ConfigError."""
    parsed = dict[str, Any]()
    for option in options:
        name, equals, text = option.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise ConfigError(f"{FLAG} is NAME=VALUE, as in enable_thinking=false, not {option!r}")
        if name in GIVEN:
            raise ConfigError(f"{FLAG} sets variables of the template's own, and {name!r} is given to it: leave it out")
        if name in parsed:
            raise ConfigError(f"{FLAG} names {name!r} twice: give it once")
        try:
            parsed[name] = json.loads(text)
        except (ValueError, RecursionError):
            parsed[name] = {"True": True, "False": False, "None": None}.get(text, text)
    return parsed


def check_template_options(hf: Any, model: str, options: Mapping[str, Any]) -> None:
    """Raise ModelError for a variable that the chat template of a transformers tokenizer does not read: nothing would change."""
    template = get_chat_template(hf)
    if options and template is None:
        raise ModelError(
            f"{FLAG}: the tokenizer of {model!r} has no chat template, so nothing reads them: leave them out"
        )
    known = list_template_variables(template or "")
    for name in options:
        if name not in known:
            others = ", ".join(sorted(known - set(GIVEN))) or "none"
            raise ModelError(
                f"{FLAG}: the chat template of {model!r} does not read {name!r}, so it would change nothing; it reads {others}"
            )


@cache
def list_template_variables(template: str) -> frozenset[str]:
    """Return the variables that a chat template reads from outside, those that rendering gives included."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    template = _GENERATION_TAG.sub("", template)
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:  # rendering reports it
        return frozenset()
    return frozenset(meta.find_undeclared_variables(tree)) - _FUNCTIONS


def get_chat_template(hf: Any) -> str | None:
    """Return the chat template that a transformers tokenizer uses with tools."""
    template = getattr(hf, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use", template.get("default"))
    return template if isinstance(template, str) else None
