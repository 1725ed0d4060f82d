"""Between a policy's words and an OpenEnv server's objects: what an action is by its schema, what an observation says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policygrad.environments.others import chosen
from policygrad.errors import ConfigError

HIDDEN = ("reward", "done", "metadata")
"""Fields of an observation that are no words for the policy."""
_NO_NUMBER = 1 << 60
"""Counts words from where no turn says the number of one."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d{1,300}(?:\.\d{1,300})?(?![\w]|\.\d)")


@dataclass(frozen=True)
class Asked:
    """What an action is made of."""

    fields: Mapping[str, Mapping[str, Any]]
    """Those that the policy fills, with their schemas."""
    fixed: Mapping[str, Any]
    """The others that are given."""
    whole: bool = False
    """Whether the policy writes a JSON object, because there are several to fill."""

    def read(self, text: str) -> dict[str, Any] | str:
        """The action that a turn says, or what is wrong with it."""
        if not self.whole:
            ((name, schema),) = self.fields.items()
            value = one(text, schema)
            return f"answer with {wanted(schema)}" if value is None else {**self.fixed, name: value}
        found = objects(text)
        if not found:
            return f"answer with a JSON object with {', '.join(f'{n}, {wanted(s)}' for n, s in self.fields.items())}"
        if unknown := found[-1].keys() - self.fields.keys():
            return f"there is no field {min(unknown)!r}, there are {', '.join(self.fields)}"
        return {**self.fixed, **found[-1]}


def asked_for(schema: Mapping[str, Any], fixed: Mapping[str, Any], where: str) -> Asked:
    """What the policy has to fill of an action: its required fields; where none is, its text field, or its only one.

    schema: the action's JSON schema. Raises ConfigError where the policy can fill none, or it is not clear which.
    """
    known = {n: resolved(s, schema) for n, s in (schema.get("properties") or {}).items() if n != "metadata"}
    free = {name: s for name, s in known.items() if name not in fixed}
    if unknown := fixed.keys() - known.keys():
        raise ConfigError(f"{where}: an action has no field {min(unknown)!r}, it has {', '.join(known) or 'none'}")
    needed = [name for name in schema.get("required") or () if name in free]
    texts = [name for name, s in free.items() if s.get("type") == "string" and "const" not in s]
    names = needed or (texts if len(texts) == 1 else list(free) if len(free) == 1 else [])
    if not names:
        raise ConfigError(
            f"{where}: an action has the fields {', '.join(known) or 'none'}, and which of them words go into is not said: give "
            "text_field=, or fixed= with the others, from Python"
        )
    if len(names) == 1 and kind_of(free[names[0]]) is not None:
        return Asked({names[0]: free[names[0]]}, fixed)
    return Asked(free, fixed, whole=True)


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A field's schema, with what it refers to in its place, and of `X | None` the X."""
    found: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    for key in ("anyOf", "oneOf", "allOf"):
        others = [s for s in found.get(key) or () if isinstance(s, Mapping) and s.get("type") != "null"]
        if len(others) == 1:
            found = {**{k: v for k, v in found.items() if k != key}, **others[0]}
    name = str(found.get("$ref", "")).rpartition("/")[2]
    target = (root.get("$defs") or {}).get(name)
    return {**{k: v for k, v in found.items() if k != "$ref"}, **target} if isinstance(target, Mapping) else found


def kind_of(schema: Mapping[str, Any]) -> str | None:
    """What one field is filled with: one of several values, text, a number, yes or no; None = an object or a list."""
    if schema.get("enum"):
        return "enum"
    kind = schema.get("type", "string")
    return kind if kind in ("string", "integer", "number", "boolean") else None


def one(text: str, schema: Mapping[str, Any]) -> Any:
    """The value that a turn gives one field; None where it gives none. The last number, or word of those there are."""
    kind, said = kind_of(schema), text.strip()
    if kind == "enum":
        values = list(schema["enum"])
        place = named(said, [str(value) for value in values])
        return None if place is None else values[place]
    if kind == "boolean":
        place = named(said, ["no", "yes", "false", "true"])
        return None if place is None else bool(place % 2)
    if kind == "string":
        return said
    numbers = _NUMBER.findall(said)
    if not numbers:
        return None
    if kind == "number":
        return float(numbers[-1])
    return int(numbers[-1]) if "." not in numbers[-1] else None


def named(text: str, words: Sequence[str]) -> int | None:
    """The place of the last of these words that stands in the text."""
    if text in words:
        return words.index(text)
    found = chosen(text, tuple(words), first=_NO_NUMBER)
    return None if found is None else found - _NO_NUMBER


def wanted(schema: Mapping[str, Any]) -> str:
    """What a field takes, for the policy."""
    kind = kind_of(schema)
    if kind == "enum":
        return f"one of {', '.join(str(value) for value in schema['enum'])}"
    words = {"boolean": "yes or no", "integer": "a whole number", "number": "a number", "string": "text"}
    return words.get(kind or "", "JSON")


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects that stand in a text one behind the other."""
    found, decoder, at = list[dict[str, Any]](), json.JSONDecoder(parse_constant=_refused), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            found.append(value)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    return found


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def worded(seen: Mapping[str, Any]) -> str:
    """An observation in words: a single field as it stands, several as lines `name: value`; what is empty is left out."""
    shown = {name: value for name, value in seen.items() if name not in HIDDEN and value not in (None, "", [], {})}
    if len(shown) == 1:
        return _text(next(iter(shown.values())))
    return "\n".join(f"{name}: {_text(value)}" for name, value in shown.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
