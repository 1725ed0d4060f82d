"""Making text from tools and environments safe to tokenize.

Lone surrogates are replaced, and a control token that the text spells out, such as `<|im_end|>`, is encoded letter by letter, so
that it ends no turn. While the template is rendered, a placeholder word stands for the token; in the ids, the placeholder becomes
the ids of the letters. The tokenizer's settings stay untouched, since other threads may be using it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.errors import ModelError

Placeholders = Mapping[str, str]  # placeholder words, and the texts that they stand for
_SURROGATES = re.compile("[\ud800-\udfff]")


def replace_surrogates(value: Any) -> Any:
    """Replace each lone surrogate by U+FFFD, in text and in the lists, tuples and mappings that contain text.

    JSON can write one ("\\ud800"), but neither a tokenizer nor a UTF-8 file accepts it. Every text from outside passes through
    here once: the output of environments and tools, and the arguments of tool calls.
    """
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATES.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {replace_surrogates(key): replace_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [replace_surrogates(inner) for inner in value]
    if type(value) is tuple:
        return tuple(replace_surrogates(inner) for inner in value)
    return value


def escape_special_tokens(
    hf: Any, messages: Sequence[Mapping[str, Any]], prefix: str, in_replies: frozenset[str] = frozenset()
) -> tuple[list[Mapping[str, Any]], Placeholders]:
    """Replace the text of every control token, in messages or schemas of tools, by a placeholder that begins with `prefix`.

    in_replies: Control tokens that stay what they are in messages of the assistant.
    """
    tokens = sorted(list_special_tokens(hf).values(), key=lambda token: len(token.content), reverse=True)
    placeholders: dict[str, str] = {}

    def escape(value: Any, spared: frozenset[str]) -> Any:
        if isinstance(value, Mapping):
            return {escape(key, spared): escape(inner, spared) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [escape(inner, spared) for inner in value]
        if not isinstance(value, str):
            return value
        for number, token in enumerate(tokens):
            if token.content in value and token.content not in spared:
                placeholders[f"{prefix}{number}X"] = token.content
                value = value.replace(token.content, f"{prefix}{number}X")
        return value

    escaped = [escape(m, in_replies if m.get("role") == "assistant" else frozenset()) for m in messages]
    return [e | {"role": m["role"]} if "role" in m else e for e, m in zip(escaped, messages, strict=True)], placeholders


def encode_escaped(hf: Any, text: str, placeholders: Placeholders, source: str) -> list[int]:
    """Encode a rendered text, each placeholder as the letters that it stands for.

    Raises:
        ModelError: The tokenizer cannot write these letters without the control token.
    """
    if not placeholders:
        return _encode(hf, text)
    # a control token that does not affect the tokens around it, apart from separating them
    tokens = list_special_tokens(hf).items()
    separators = [(id_, str(t.content)) for id_, t in tokens if not (t.lstrip or t.rstrip or t.single_word)]
    if not separators:
        raise _unescapable_error(next(iter(placeholders.values())), source)
    separator_id, separator = separators[0]
    pieces = re.split(f"({'|'.join(map(re.escape, placeholders))})", text)
    marked = "".join(separator if i % 2 else piece for i, piece in enumerate(pieces))
    letters, count = dict[int, list[int]](), 0  # ids of the letters, by the number of the separator in their place
    for i, piece in enumerate(pieces):
        if i % 2:
            text = placeholders[piece]  # the first letter separately, so that they do not make the control token
            letters[count] = [*_encode(hf, text[:1]), *_encode(hf, text[1:])]
            if not letters[count] or set(letters[count]) & (set(list_special_tokens(hf)) - {hf.unk_token_id}):
                raise _unescapable_error(text, source)
        count += 1 if i % 2 else piece.count(separator)
    ids, seen = list[int](), 0
    for id_ in _encode(hf, marked):
        ids += letters.get(seen, [id_]) if id_ == separator_id else [id_]
        seen += id_ == separator_id
    if seen != count:
        raise _unescapable_error(separator, source)
    return ids


def list_special_texts(hf: Any, besides: frozenset[int]) -> frozenset[str]:
    """Return the texts of the control tokens, apart from those with some ids."""
    return frozenset(str(token.content) for number, token in list_special_tokens(hf).items() if number not in besides)


def make_placeholder(text: str) -> str:
    """Return a word that is not in the text, of letters that no template trims, escapes or splits."""
    return next(word for i in itertools.count() if (word := f"PLACEHOLDER{i}X") not in text)


def list_special_tokens(hf: Any) -> dict[int, Any]:
    """Return the control tokens, which templates write, by id."""
    return {number: token for number, token in getattr(hf, "added_tokens_decoder", {}).items() if token.special}


def _encode(hf: Any, text: str) -> list[int]:
    return list(hf(text, add_special_tokens=False)["input_ids"]) if text else []


def _unescapable_error(text: str, source: str) -> ModelError:
    return ModelError(
        f"{source}: a tool or an environment returned {text!r}, a control token of the model, which the tokenizer cannot encode as "
        "plain letters: remove it from their output"
    )
