"""A byte-level BPE tokenizer in the terms of llama.cpp: tokens with their kinds, merges, and the name of what cuts a text first.

Facts: ggml-org/llama.cpp, src/llama-vocab.cpp (`llm_tokenizer_bpe`: the expressions; `load`: what else a name stands for) and
conversion/base.py (`get_vocab_base`: the kinds of tokens). A file names its pre-tokenizer and cannot bring its own expression, so
what has no name there cannot be written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policygrad.errors import ModelError
from policygrad.models.tokenizer import Tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens: text in the letters that stand for bytes; what a template writes; a word that is never cut; nothing."""
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
QWEN, LLAMA = rf"{_WORDS}\p{{N}}{_END}", rf"{_WORDS}\p{{N}}{{1,3}}{_END}"
EMBEDDED = r"\d|\n|(?<=\p{L})-|</?answer>"
"""Of the embedded model. llama.cpp has no name for it, and where `_spared` holds it need not have one."""
_BYTES, _GPT2, _DIGITS = "bytes", "bytes by GPT-2's expression", "digits"
_NAMES: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGITS, _GPT2), False): "smollm",
    ((QWEN, _BYTES), False): "qwen2",
    ((LLAMA, _BYTES), True): "llama-bpe",
    ((LLAMA, _BYTES), False): "dbrx",
}
"""(steps of the pre-tokenizer, whether a word that is a token is taken whole) to llama.cpp's name for both."""
_NEVER = frozenset(map(chr, (0xC0, 0xC1, *range(0xF5, 0x100))))
"""Letters of bytes that no UTF-8 holds (RFC 3629), which a tokenizer need not know."""
_RARE = frozenset(chr(byte + 256) for byte in range(32) if chr(byte) not in "\t\n\v\f\r") | frozenset(
    map(chr, (0xF1, 0xF2, 0xF3, 0xF4))
)
"""Letters of control characters, and of bytes that begin characters above U+3FFFF, which a vocabulary may lack (SmolLM2's lacks
eight): the tokenizer and llama.cpp both leave such a byte out. They may differ in the merges beside it, within a run of
punctuation."""
_UNCUT = "superbpe"
"""Cuts at digits alone."""
_SPARED = re.compile(r"(?:Ġ-?|[!-,./:-~])+")
"""Tokens across which `EMBEDDED` never cuts: no digit, no line's end, and a hyphen only behind a space."""


@dataclass(frozen=True)
class BytePairs:
    """What llama.cpp is told of a tokenizer."""

    tokens: tuple[str, ...]
    """By their ids, as many as the model reads."""
    kinds: tuple[int, ...]
    merges: tuple[str, ...]
    """`LEFT RIGHT`, the first one first."""
    cut: str
    """The pre-tokenizer's name."""
    adds: tuple[bool, bool]
    """Whether the token that begins, and the one that ends, are put around a text."""
    special: Mapping[str, int]
    """bos, eos, eot, eom, pad, unk: ids of those that there are."""
    template: Any = None
    """The chat template; or several, each a dict with name and template."""


def byte_pairs(tokenizer: Tokenizer, size: int) -> BytePairs:
    """The tokenizer of a model that reads `size` ids.

    Raises:
        ModelError: anything that llama.cpp would cut, merge or normalise otherwise; more tokens than the model reads.
    """
    hf = tokenizer.hf
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"the tokenizer {tokenizer.name!r} is a {type(hf).__name__}, which has no tokenizer.json")
    parts = json.loads(backend.to_str())
    if reason := _other(parts):
        raise ModelError(f"the tokenizer {tokenizer.name!r} {reason}")
    merges = tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in parts["model"]["merges"])
    cut = _cut(parts, merges)
    if cut is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name!r} cuts text before it merges in none of the ways that are written here, and that "
            "llama.cpp has names for: GPT-2's, SmolLM's, Qwen 2's and 3's, Llama 3's"
        )
    added, special = parts["added_tokens"], _special(tokenizer)
    adds = _around(tokenizer, special)
    tokens, kinds = _by_id(parts["model"]["vocab"], added, size, tokenizer.name)
    return BytePairs(tokens, kinds, merges, cut, adds, special, _template(hf))


def _other(parts: Mapping[str, Any]) -> str:
    """Why a tokenizer is no byte-level BPE as llama.cpp has it; "" = it is one."""
    model, normalizer = parts["model"], parts.get("normalizer")
    if model["type"] != "BPE" or model.get("byte_fallback") or _ends_with(parts.get("decoder")) != "ByteLevel":
        return f"is no byte-level BPE ({model['type']})"
    if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "merges at random, or marks the beginnings or ends of words"
    if normalizer is not None and normalizer["type"] != "NFC":
        return f"rewrites text before it reads it ({normalizer['type']})"
    from tokenizers.pre_tokenizers import ByteLevel

    missing = set(ByteLevel.alphabet()) - _NEVER - set(model["vocab"])
    if missing - (frozenset() if model.get("unk_token") else _RARE):
        return f"has no token for {len(missing)} of the bytes that text is made of"
    greedy = [t["content"] for t in parts["added_tokens"] if t["lstrip"] or t["rstrip"] or t["single_word"]]
    return f"has tokens that take the space beside them along ({greedy[0]!r})" if greedy else ""


def _ends_with(part: Mapping[str, Any] | None) -> str:
    """The kind of a part, or of the last of a sequence."""
    if part is None:
        return ""
    inner = part.get("decoders")
    return _ends_with(inner[-1]) if inner else str(part["type"])


def _cut(parts: Mapping[str, Any], merges: Sequence[str]) -> str | None:
    """The name of how text is cut; None = llama.cpp has none."""
    steps = _steps(parts.get("pre_tokenizer"))
    whole = bool(parts["model"].get("ignore_merges"))
    if steps == (EMBEDDED, _BYTES) and not whole and _spared(parts["added_tokens"], merges):
        return _UNCUT
    return _NAMES.get((steps, whole))


def _steps(part: Mapping[str, Any] | None) -> tuple[str, ...]:
    if part is None:
        return ()
    if part["type"] == "Sequence":
        return tuple(step for inner in part["pretokenizers"] for step in _steps(inner))
    if part["type"] == "ByteLevel" and not part.get("add_prefix_space"):
        return (_GPT2 if part.get("use_regex", True) else _BYTES,)
    if part["type"] == "Digits" and part.get("individual_digits"):
        return (_DIGITS,)
    if part["type"] == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return (str(part["pattern"].get("Regex", "")),)
    return (f"unknown: {part['type']}",)


def _spared(added: Sequence[Mapping[str, Any]], merges: Sequence[str]) -> bool:
    """Whether no merged token could lie across a cut, so that the same is merged without any."""
    words = {token["content"] for token in added}
    return {"<answer>", "</answer>"} <= words and all(_SPARED.fullmatch(pair.replace(" ", "", 1)) for pair in merges)


def _by_id(
    vocabulary: Mapping[str, int], added: Sequence[Mapping[str, Any]], size: int, name: str
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(tokens, kinds). What a template writes is found in a text before it is cut, as are added words."""
    known = {number: (text, NORMAL) for text, number in vocabulary.items()}
    known |= {token["id"]: (token["content"], CONTROL if token["special"] else USER_DEFINED) for token in added}
    if max(known) >= size:
        raise ModelError(f"the tokenizer {name!r} has tokens up to {max(known)}, and the model reads {size}")
    rows = [known.get(number, (f"[PAD{number}]", UNUSED)) for number in range(size)]
    return tuple(text for text, _ in rows), tuple(kind for _, kind in rows)


def _special(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokenizer's own end is the first of the ends; llama.cpp knows further ones by their texts."""
    hf = tokenizer.hf
    own = hf.eos_token_id if hf.eos_token_id in tokenizer.end else min(tokenizer.end)
    ends = [own, *sorted(tokenizer.end - {own})]
    found = {"bos": hf.bos_token_id, **dict(zip(("eos", "eot", "eom"), ends, strict=False))}
    found |= {"pad": hf.pad_token_id, "unk": hf.unk_token_id}
    return {name: int(number) for name, number in found.items() if number is not None}


def _around(tokenizer: Tokenizer, special: Mapping[str, int]) -> tuple[bool, bool]:
    """Whether a text gets the token that begins, and the one that ends.

    Raises:
        ModelError: others are put around it.
    """
    bare, whole = ([*tokenizer.hf("a", add_special_tokens=some)["input_ids"]] for some in (False, True))
    for before in (False, True):
        for behind in (False, True):
            first = [special[name] for name in ("bos",) if before and name in special]
            last = [special["eos"]] if behind else []
            if whole == [*first, *bare, *last] and (bool(first), bool(last)) == (before, behind):
                return before, behind
    raise ModelError(
        f"the tokenizer {tokenizer.name!r} puts more around a text than a token that begins and one that ends"
    )


def _template(hf: Any) -> Any:
    found = getattr(hf, "chat_template", None)
    return [{"name": k, "template": v} for k, v in found.items()] if isinstance(found, dict) else found
