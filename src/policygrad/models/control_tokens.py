"""Text of tools and environments: halves of surrogate pairs are replaced, and a control token that it spells out, `<|im_end|>` say,
is read letter by letter and ends no turn.

A word of letters stands in its place while the template is rendered; in ids that word is what the letters are without the token.
Nothing of the tokenizer's own settings is touched for that, since other threads may be encoding with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.errors import ModelError

Placeholders = Mapping[str, str]
"""Words to the texts that they stand for."""
_HALVES = re.compile("[\ud800-\udfff]")


def replace_surrogates(value: Any) -> Any:
    """Replace each lone surrogate by U+FFFD, in text and in the lists, tuples and mappings that hold text.

    JSON can write one ("\\ud800"), and neither a tokenizer nor a UTF-8 file takes it. Every text that comes from outside passes
    through here once: what environments and tools say, and the arguments that tools are called with.
    """
    if isinstance(value, str):
        return value if value.isascii() else _HALVES.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {replace_surrogates(key): replace_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [replace_surrogates(inner) for inner in value]
    if type(value) is tuple:
        return tuple(replace_surrogates(inner) for inner in value)
    return value


def escape_special_tokens(
    hf: Any, messages: Sequence[Mapping[str, Any]], word: str
) -> tuple[list[Mapping[str, Any]], Placeholders]:
    """The messages without the text of any control token, and the words in their places, which begin with `word`."""
    tokens = sorted(_controls(hf).values(), key=lambda token: len(token.content), reverse=True)
    words: dict[str, str] = {}

    def hidden(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: inner if key == "role" else hidden(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [hidden(inner) for inner in value]
        if not isinstance(value, str):
            return value
        for number, token in enumerate(tokens):
            if token.content in value:
                words[f"{word}{number}X"] = token.content
                value = value.replace(token.content, f"{word}{number}X")
        return value

    return [hidden(message) for message in messages], words


def encode_escaped(hf: Any, text: str, words: Placeholders, source: str) -> list[int]:
    """The ids of a rendered text, each of the words in it read as the letters that it stands for.

    Raises:
        ModelError: a tokenizer that cannot write those letters without the token.
    """
    if not words:
        return _ids(hf, text)
    number, mark = _mark(hf, words, source)
    pieces = re.split(f"({'|'.join(map(re.escape, words))})", text)
    whole = "".join(mark if place % 2 else piece for place, piece in enumerate(pieces))
    letters, marks = dict[int, list[int]](), 0
    for place, piece in enumerate(pieces):
        if place % 2:
            letters[marks] = _letters(hf, words[piece], source)
        marks += 1 if place % 2 else piece.count(mark)
    found, seen = list[int](), 0
    for token in _ids(hf, whole):
        found += letters.get(seen, [token]) if token == number else [token]
        seen += token == number
    if seen != marks:
        raise _refusal(mark, source)
    return found


def _controls(hf: Any) -> dict[int, Any]:
    """What templates write, by id."""
    return {number: token for number, token in getattr(hf, "added_tokens_decoder", {}).items() if token.special}


def _mark(hf: Any, words: Placeholders, source: str) -> tuple[int, str]:
    """A control token that takes nothing along of what stands beside it: text is cut there, and nowhere else on its account."""
    for number, token in _controls(hf).items():
        if not (token.lstrip or token.rstrip or token.single_word):
            return number, str(token.content)
    raise _refusal(next(iter(words.values())), source)


def _letters(hf: Any, text: str, source: str) -> list[int]:
    """The text of a control token without it: its first letter apart from the others."""
    found = [*_ids(hf, text[:1]), *_ids(hf, text[1:])]
    if not found or set(found) & (set(_controls(hf)) - {hf.unk_token_id}):
        raise _refusal(text, source)
    return found


def _ids(hf: Any, text: str) -> list[int]:
    return list(hf(text, add_special_tokens=False)["input_ids"]) if text else []


def _refusal(text: str, source: str) -> ModelError:
    return ModelError(
        f"{source}: a tool or an environment has said {text!r}, a control token of the model's, and its tokenizer cannot read that "
        "as plain letters: take it out of what they say"
    )
