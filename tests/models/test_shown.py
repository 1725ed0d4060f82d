"""What others wrote, in the token ids that the policy would have sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

import policygrad as pg
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer

TEXT = "Step by step: 10 + 20 = 30. <answer>30</answer>"


@pytest.fixture(scope="module")
def tokenizer(random_model: Path) -> Tokenizer:
    return load_tokenizer(str(random_model), load_model(str(random_model)))


def test_an_answer_to_a_text_is_its_ids_and_an_end_token(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("10 + 20 =\n", 0).ids
    ids = tokenizer.encode_answer(prompt, "10 + 20 =\n", TEXT)
    assert ids[-1] in tokenizer.end_ids
    assert not tokenizer.end_ids & set(ids[:-1])
    assert tokenizer.decode(ids) == TEXT


def test_an_answer_to_a_chat_is_what_its_template_writes_up_to_the_end_of_the_turn(tokenizer: Tokenizer) -> None:
    output = ({"role": "user", "content": "10 + 20 ="},)
    prompt = tokenizer.encode(output, 0).ids
    ids = tokenizer.encode_answer(prompt, output, TEXT)
    assert ids[-1] in tokenizer.end_ids
    assert tokenizer.decode(ids).strip() == TEXT
    full = tokenizer.hf.apply_chat_template([*output, {"role": "assistant", "content": TEXT}], tokenize=False)
    assert str(full).startswith(tokenizer.hf.decode([*prompt.tolist(), *ids[:-1]]))


def test_a_completion_that_merges_with_its_prompt_is_refused(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("ans", 0).ids
    ids = list(tokenizer.hf("answer")["input_ids"])
    if ids[: len(prompt)] == prompt.tolist():
        pytest.skip("this tokenizer does not join them")
    with pytest.raises(pg.ModelError, match=r"rows.jsonl:3: the tokenizer of .* joins the end of 'prompt'"):
        tokenizer.encode_answer(prompt, "ans", "wer", "rows.jsonl:3")
