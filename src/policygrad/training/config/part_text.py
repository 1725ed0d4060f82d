"""A part written as a call, the form that `show` prints: `Clip(low=0.1)`, `mine.py:Tent(width=2)`."""

from __future__ import annotations

import ast
import math
from typing import Any

from policygrad.errors import ConfigError


def read_part_call(text: str) -> dict[str, Any]:
    """Return the table of `part` and settings that a call stands for, as TOML has it; settings are named.

    Values are numbers, true or false, none, texts (a word needs no quotes), lists, and calls of policygrad's own parts. Nothing is
    evaluated. Raises ConfigError for anything else.
    """
    name, _, rest = text.partition("(")
    try:
        call = ast.parse(f"part({rest}", mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{text!r} is no part with settings: write them as in 'Clip(low=0.1, high=0.3)'") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ConfigError(f"{text!r} is no part with settings: write them as in 'Clip(low=0.1, high=0.3)'")
    return _read_call(name.strip(), call, text)


def _read_call(name: str, call: ast.Call, text: str) -> dict[str, Any]:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ConfigError(
            f"{text!r}: name each setting, as in 'Clip(low=0.1, high=0.3)'; `policygrad show {name}` lists them"
        )
    names = [str(keyword.arg) for keyword in call.keywords]
    if "part" in names or len({*names}) < len(names):
        raise ConfigError(f"{text!r}: give each setting once, and no `part`")
    return {"part": name, **{str(keyword.arg): _read_value(keyword.value, text) for keyword in call.keywords}}


def _read_value(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value=None):
            return "none"
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.Name(id="true" | "false" as word):
            return word == "true"
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name(id=word):
            return word
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if not isinstance(
            number, bool
        ):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_read_value(item, text) for item in items]
        case ast.Call(func=ast.Name(id=name)):
            return _read_call(name, node, text)
    raise ConfigError(f"{text!r}: {ast.unparse(node)} is neither a number nor a word, a text, a list or a part")
