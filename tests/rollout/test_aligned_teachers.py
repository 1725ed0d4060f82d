"""Teachers with a tokenizer of their own: the spans by hand, what the teacher reads, and what it says nothing of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.byte_level import TEXTS, tokenizer
from doubles.word_pieces import byte_level, unigram
from policygrad.learners.base import LearnerSpec
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rollout.aligned_teachers import (
    AlignedText,
    TokenTexts,
    add_aligned_texts,
    align_texts,
    encode_prompt,
    find_end_token,
    load_reference_tokenizer,
)
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec, Segment, Trajectory
from policygrad.tasks.base import Example

WORDS = byte_level("h e", "l l", "Ġ w", "Ġw o")  # he|ll|o| wo|r|l|d
PIECES = unigram("hel", "lo", "▁wor", "ld", "a", "b", "€", "▁")


def encode(own: Tokenizer, text: str) -> list[int]:
    return list(own.hf(text, add_special_tokens=False)["input_ids"])


def align(own: Tokenizer, teacher: Tokenizer, ids: list[int], end: int | None = None) -> AlignedText:
    return align_texts(TokenTexts(own), TokenTexts(teacher), ids, end, "tokens")


def test_spans_of_bpe_and_unigram_by_hand() -> None:
    """he ll o | Ġwo r | l d, and hel lo | ▁wor | ld."""
    ids = encode(WORDS, "hello world")
    assert WORDS.hf.convert_ids_to_tokens(ids) == ["he", "ll", "o", "Ġwo", "r", "l", "d"]
    aligned = align(WORDS, PIECES, ids)
    assert PIECES.hf.convert_ids_to_tokens(aligned.tokens) == ["hel", "lo", "▁wor", "ld"]
    assert aligned.spans == (2, 2, 2, 4, 4, 6, 6)
    assert aligned.places == (2, 2, 4, 6)


def test_spans_that_end_with_a_word() -> None:
    """hello | world; and what a teacher cuts differently before a 9 than before an 8 is in one span with it."""
    aligned = align_texts(TokenTexts(WORDS), TokenTexts(PIECES), encode(WORDS, "hello world"), None, "words")
    assert aligned.spans == (2, 2, 2, 6, 6, 6, 6)
    assert aligned.places == (2, 2, 6, 6)
    own, teacher = byte_level(), byte_level("Ġ =", "Ġ= Ġ", "Ġ=Ġ 8")
    for digit, smallest in (("8", (0, 4, 4, 4, 4)), ("9", (0, 3, 3, 3, 4))):
        ids = encode(own, f"a = {digit}")
        assert align(own, teacher, ids).spans == smallest
        words = align_texts(TokenTexts(own), TokenTexts(teacher), ids, None, "words")
        assert words.spans == (0, 4, 4, 4, 4)


def test_a_character_of_a_script_without_blanks_is_a_word() -> None:
    """中 | 文 | a b: three bytes each, and a blank with its letters."""
    ids = encode(byte_level(), "中文 ab")
    words = align_texts(TokenTexts(byte_level()), TokenTexts(unigram("中", "文", "a", "b", "▁")), ids, None)
    assert words.spans == (2, 2, 2, 5, 5, 5, 8, 8, 8)
    assert words.places == (2, 5, 8, 8, 8)


def test_the_other_way_round() -> None:
    aligned = align(PIECES, WORDS, encode(PIECES, "hello world"))
    assert aligned.spans == (1, 1, 2, 3)
    assert aligned.places == (1, 1, 1, 2, 2, 3, 3)


@pytest.mark.parametrize(
    ("own", "teacher", "spans", "places"),
    [
        (byte_level(), PIECES, (0, 3, 3, 3, 4), (0, 3, 4)),  # three bytes, and one piece
        (PIECES, byte_level(), (0, 1, 2), (0, 1, 1, 1, 2)),
        (byte_level(), byte_level("â Ĥ"), (0, 3, 3, 3, 4), (0, 3, 3, 4)),  # E2|82|AC, and E282|AC
        (byte_level("Ĥ ¬"), byte_level("â Ĥ"), (0, 2, 2, 3), (0, 2, 2, 3)),  # E2|82AC: no byte of it ends in both
        (byte_level(), byte_level(), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4)),
    ],
    ids=["bytes and piece", "piece and bytes", "merged bytes", "crossing", "equal"],
)
def test_a_character_of_several_tokens_is_in_one_span(
    own: Tokenizer, teacher: Tokenizer, spans: tuple[int, ...], places: tuple[int, ...]
) -> None:
    aligned = align(own, teacher, encode(own, "a€b"))
    assert (aligned.spans, aligned.places) == (spans, places)


def test_invalid_bytes_are_in_no_span() -> None:
    """a, the first byte of €, b: the teacher reads a�b."""
    ids = [encode(WORDS, "a")[0], encode(WORDS, "€")[0], encode(WORDS, "b")[0], encode(WORDS, "h")[0]]
    aligned = align(WORDS, byte_level("Ġ Ġ"), ids)
    assert aligned.spans == (0, -1, -1, 3)
    assert aligned.places == (0, -1, -1, -1, -1, 3)


def test_control_tokens_are_in_no_span() -> None:
    own = byte_level(special=["<call>"])
    ids = [*encode(own, "a"), own.hf.convert_tokens_to_ids("<call>"), *encode(own, "b")]
    aligned = align(own, WORDS, ids)
    assert aligned.spans == (0, -1, 2)
    assert aligned.places == (0, *[-1] * 5, 2)  # <|c|a|ll|>
    ids = encode(WORDS, "a<call>b")  # the policy spells out what is a control token of the teacher
    aligned = align(WORDS, own, ids)
    assert aligned.spans == (0, *[-1] * 5, 6)
    assert aligned.places == (0, -1, 6)


def test_what_the_teacher_s_tokenizer_rewrites_is_in_no_span() -> None:
    """e and a combining accent become one character; what stands around them is aligned."""
    from tokenizers import normalizers

    own = byte_level()
    aligned = align(own, unigram("a", "b", "e", "é", normalizer=normalizers.NFC()), encode(own, "ae\u0301b"))
    assert aligned.spans == (0, -1, -1, -1, 4)
    assert aligned.places == (0, -1, 4)
    assert align(own, PIECES, encode(own, "a?b")).spans == (0, -1, 2)  # <unk>


def test_an_end_token_is_a_span() -> None:
    teacher = byte_level(end="<stop>")
    stop = teacher.hf.eos_token_id
    ids = [*encode(WORDS, "he"), WORDS.hf.eos_token_id]
    aligned = align(WORDS, teacher, ids, find_end_token(WORDS, teacher, ids[-1], False))
    assert aligned.tokens[-1] == stop
    assert (aligned.spans, aligned.places) == ((0, 1), (0, 0, 1))
    assert find_end_token(WORDS, teacher, ids[-1], True) == stop
    both = replace(WORDS, end_ids=frozenset([*WORDS.end_ids, WORDS.hf.convert_tokens_to_ids("<turn>")]))
    assert find_end_token(both, both, both.hf.convert_tokens_to_ids("<turn>"), False) == both.hf.convert_tokens_to_ids(
        "<turn>"
    )
    assert align(WORDS, teacher, ids[-1:], stop) == AlignedText((stop,), (0,), (0,))


def test_spans_partition_hard_texts() -> None:
    """Over texts in many scripts: every token is in a span, spans are in order, and both sides of each are the same text."""
    own, teacher = tokenizer("gpt-2"), tokenizer("llama-bpe")
    for text in TEXTS[:-1]:
        ids = encode(own, text)
        aligned = align(own, teacher, ids)
        assert list(aligned.tokens) == encode(teacher, text)
        assert sorted(aligned.spans) == list(aligned.spans)
        assert set(aligned.spans) == set(aligned.places)
        for end in set(aligned.spans):
            ours = [token for token, place in zip(ids, aligned.spans, strict=True) if place <= end]
            theirs = [token for token, place in zip(aligned.tokens, aligned.places, strict=True) if place <= end]
            assert own.hf.decode(ours) == teacher.hf.decode(theirs)


def group_of(prompt: Any, completions: list[list[int]], prompt_ids: list[int], **options: Any) -> EpisodeGroup:
    spec = EpisodeSpec(Example(prompt), (0, 0, 1, 0), 8)
    trajectories = tuple(
        Trajectory((Segment(torch.tensor(ids), torch.zeros(len(ids))),), "", False, reward=0.0, **options)
        for ids in completions
    )
    return EpisodeGroup(spec, torch.tensor(prompt_ids), trajectories)


def test_the_teacher_reads_the_prompt_by_its_own_template() -> None:
    teacher = byte_level(end="<stop>")
    end = WORDS.hf.eos_token_id
    messages = ({"role": "user", "content": "a"},)
    groups = [
        group_of(messages, [[*encode(WORDS, "he"), end], encode(WORDS, "hello")], [1, 2]),
        group_of("ab", [[*encode(WORDS, "he"), encode(WORDS, "€")[0]]], [3]),
    ]
    batch, metrics = add_aligned_texts(batch_groups(groups), groups, WORDS, teacher, "tokens")
    stop, turn = (teacher.hf.convert_tokens_to_ids(token) for token in ("<stop>", "<turn>"))
    chat, text = [*encode(teacher, "a"), stop, turn], encode(teacher, "ab")
    assert [x.tolist() for x in batch.reference_prompts] == [chat, chat, text]
    assert batch.reference_tokens[0].tolist() == [*encode(teacher, "he"), stop]
    assert batch.reference_spans is not None
    assert batch.reference_spans.tolist() == [[0, 1, -1], [0, 1, 2], [0, -1, -1]]
    assert metrics["teacher/unaligned"].value == pytest.approx(1 / 7)
    assert metrics["teacher/span_length"].value == 1.0
    assert "reference/too_long" not in metrics


def test_demonstrations_and_long_texts_are_not_read() -> None:
    ids = encode(WORDS, "he")
    groups = [group_of("ab", [ids], [3], demonstration=True), group_of("ab", [ids], [3])]
    short = replace(byte_level(), context_length=3)  # of the four that prompt and completion have there
    batch, metrics = add_aligned_texts(batch_groups(groups), groups, WORDS, short)
    assert batch.reference_spans is not None
    assert batch.reference_spans.tolist() == [[-1], [-1]]
    assert [len(x) for x in batch.reference_tokens] == [0, 0]
    assert metrics["teacher/unaligned"].value == 1.0
    assert metrics["reference/too_long"].value == 2


def test_the_same_tokenizer_gives_what_tokens_one_by_one_give(random_model: Path) -> None:
    """Texts as the tokenizer writes them: the same log π_T of each token, and the same Ψ."""
    policy, teacher = load_model(str(random_model)), load_model("tiny")
    own = load_tokenizer(str(random_model), policy)
    reads = load_reference_tokenizer("tiny", pg.SamplingParams())
    texts = ["3 + 4 = 7\n", "naïve café 中文 🙂", "12"]
    completions = [[*encode(own, text), own.hf.eos_token_id] for text in texts] + [encode(own, "1 + 1")]
    groups = [group_of("1 + 2 =\n", completions, own.encode("1 + 2 =\n", 8).ids.tolist())]
    plain = batch_groups(groups)
    aligned, metrics = add_aligned_texts(plain, groups, own, reads)
    assert metrics["teacher/unaligned"].value == 0
    assert metrics["teacher/span_length"].value == 1
    results = []
    for batch, settings in ((plain, {}), (aligned, {"tokenizer": "tiny"})):
        algorithm = replace(pg.DISTILL, reference=pg.Reference(model="tiny", **settings))
        learner = LocalLearner(policy, LearnerSpec(algorithm, lr=1e-3, steps=1, temperature=0.7), reference=teacher)
        evaluated = learner.evaluate(batch, algorithm.needs)
        assert evaluated.logp_ref is not None
        results.append((evaluated.logp_ref, algorithm.compute_advantages(evaluated)))
    (logp, psi), (aligned_logp, aligned_psi) = results
    torch.testing.assert_close(aligned_logp, torch.where(plain.mask, logp, 0), rtol=0, atol=1e-5)
    torch.testing.assert_close(aligned_psi, psi, rtol=0, atol=1e-5)
    assert float(psi.abs().max()) > 0.1


def test_what_cannot_be_aligned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pg.ConfigError, match=r"top_p and top_k: a teacher with a tokenizer of its own"):
        load_reference_tokenizer("tiny", pg.SamplingParams(top_p=0.9))
    seen = ({"role": "user", "content": [{"type": "image", "image": "x.png"}, {"type": "text", "text": "a"}]},)
    group = group_of(seen, [[1]], [3])
    with pytest.raises(pg.ConfigError, match=r"has pictures, and Reference\.tokenizer aligns text alone"):
        encode_prompt(group, PIECES)
    WORDS.hf.save_pretrained(tmp_path)  # a tokenizer alone
    assert load_reference_tokenizer(str(tmp_path), pg.SamplingParams()).hf.get_vocab() == WORDS.hf.get_vocab()
