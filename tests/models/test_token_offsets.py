"""Where tokens begin in a text: parts of characters, blanks that a token alone loses, and bytes that are no character."""

from __future__ import annotations

from itertools import pairwise

import pytest

from policygrad.models.loading import load_model
from policygrad.models.token_offsets import MOST_PENDING, find_offsets
from policygrad.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def hf():  # type: ignore[no-untyped-def]
    return load_tokenizer("tiny", load_model("tiny")).hf


@pytest.mark.parametrize(
    "text", ["1 + 2 = 3", "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{GRINNING FACE}! \u65e5\u672c", "a"]
)
def test_the_text_between_two_offsets_is_that_of_the_tokens_there(hf, text: str) -> None:  # type: ignore[no-untyped-def]
    ids = hf(text)["input_ids"]
    offsets = find_offsets(hf.decode, ids)
    assert (len(offsets), offsets[0]) == (len(ids), 0)
    pieces = [text[a:b] for a, b in pairwise((*offsets, len(text)))]
    assert "".join(pieces) == text
    for token, piece in zip(ids, pieces, strict=True):
        if piece.isascii() and piece:
            assert hf.decode([token]) == piece


def test_a_blank_that_a_token_loses_at_the_beginning_is_counted() -> None:
    def decode(ids: list[int]) -> str:
        return " ".join("word"[:token] for token in ids)

    assert find_offsets(decode, [4, 2, 3]) == (0, 4, 7)


def test_bytes_that_never_become_a_character_do_not_pile_up(hf) -> None:  # type: ignore[no-untyped-def]
    half, widths = hf("\N{GRINNING FACE}")["input_ids"][0], list[int]()

    def decode(ids: list[int]) -> str:
        widths.append(len(ids))
        return str(hf.decode(ids))

    offsets = find_offsets(decode, [half] * 100)
    assert list(offsets) == sorted(offsets)
    assert max(widths) <= 2 * MOST_PENDING + 2
