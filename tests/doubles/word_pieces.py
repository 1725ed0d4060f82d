"""Tokenizers of a few tokens: byte-level BPE of given merges, and a unigram model of given pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policygrad.models.tokenizer import Tokenizer

END, TURN = "<end>", "<turn>"
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<turn>{% endif %}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>{% endif %}"
)


def byte_level(*merges: str, end: str = END, special: Sequence[str] = ()) -> Tokenizer:
    """Bytes, and what the merges make of them: "h e" for the token "he"."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    pairs = [(left, right) for left, right in (merge.split() for merge in merges)]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in pairs)]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return _wrap(backend, end, special)


def unigram(*pieces: str, end: str = END, normalizer: Any = None) -> Tokenizer:
    """Pieces of SentencePiece's form, ▁ for a blank; of the ways to split a text the one with the fewest."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    backend = Backend(models.Unigram([("<unk>", -100.0), *((piece, -1.0) for piece in pieces)], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # type: ignore[assignment]
    backend.decoder = decoders.Metaspace(prepend_scheme="never")  # type: ignore[assignment]
    if normalizer is not None:
        backend.normalizer = normalizer
    return _wrap(backend, end, ())


def _wrap(backend: Any, end: str, special: Sequence[str]) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, additional_special_tokens=[TURN, *special])
    hf.chat_template = CHAT.replace(END, end)
    return Tokenizer(hf, frozenset([hf.eos_token_id]), "a tokenizer of a few tokens", None)
