"""JSON Schemas of what --json prints, from the types that each command declares with `prints`; docs/reference/json.md lists them,
and `COMMAND --json-schema` prints them.

Fields may be added to an output later: readers ignore those that they do not know.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from policygrad.commands import COMMANDS
from policygrad.commands.docstrings import read_field_docs
from policygrad.commands.json_output import OUTPUTS, Error
from policygrad.errors import ConfigError

Schema = dict[str, Any]


def build_schema(command: str) -> Schema:
    """Return the JSON Schema (draft 2020-12) of each line that `policygrad COMMAND --json` prints.

    Raises:
        ConfigError: The command has no --json.
    """
    outputs = load_outputs(command)
    if not outputs:
        having = ", ".join(name for name in COMMANDS if name != command)
        raise ConfigError(f"{command} has no --json: its output is a script. These have: {having}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"policygrad {command} --json" + (", each line" if is_event_stream(outputs) else ""),
        "anyOf": [to_schema(kind) for kind in (*outputs, Error)],
    }


def load_outputs(command: str) -> tuple[Any, ...]:
    """Return the types of what a command prints under --json; none for `completion`, which prints a script."""
    module, _, function = COMMANDS[command].partition(":")
    return OUTPUTS.get(getattr(import_module(module), function), ())


def is_event_stream(outputs: Sequence[Any]) -> bool:
    """Return True for a command that prints several lines, an event each; the other ones print one object."""
    return all("event" in getattr(kind, "__annotations__", ()) for kind in outputs)


def to_schema(kind: Any) -> Schema:
    """Return the JSON Schema of a TypedDict, a dataclass, or a type that these consist of."""
    simple: dict[Any, Schema] = {
        Any: {},
        None: {"type": "null"},
        type(None): {"type": "null"},
        bool: {"type": "boolean"},
        int: {"type": "integer"},
        float: {"type": "number"},
        str: {"type": "string"},
        Path: {"type": "string"},
    }
    if kind in simple:
        return dict(simple[kind])
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [to_schema(argument) for argument in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": to_schema(arguments[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": to_schema(arguments[1])}
    if not (is_typeddict(kind) or is_dataclass(kind)):
        raise TypeError(f"{kind!r} has no JSON Schema")
    hints, texts, properties = get_type_hints(kind), read_field_docs(kind, comments=True), dict[str, Schema]()
    for name in hints if is_typeddict(kind) else [f.name for f in fields(kind)]:
        schema, text = to_schema(hints[name]), texts.get(name)
        if text:  # an object keeps its own description inside
            schema = (
                {"allOf": [schema], "description": text} if "description" in schema else schema | {"description": text}
            )
        properties[name] = schema
    return {
        "title": kind.__name__,
        "description": " ".join((kind.__doc__ or "").split()),
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }
