"""What evaluation programs compute from `/v1/completions` with echo are the log-likelihoods of transformers on the same model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
import transformers as tf

import policygrad
from doubles.architectures import families
from policygrad.commands.served_model import ServedModel
from policygrad.commands.text_scores import GivenText, score_texts
from policygrad.models.loading import load_model
from policygrad.proxy.server import ANY_KEY, Proxy
from policygrad.samplers.base import SamplingParams

FOLDER = Path(policygrad.__file__).parent / "models" / "tiny"
PROMPTS = ["1 + 2 = 3", "What is 17 + 25? 42", "3", "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{GRINNING FACE}"]
Post = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def post() -> Iterator[Post]:
    model, server = ServedModel("tiny"), Proxy(model="tiny", needs_keys=False)
    server.add(ANY_KEY, model.submit)
    model.start()

    def send(body: dict[str, Any]) -> dict[str, Any]:
        request = Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    yield send
    server.close()


@pytest.fixture(scope="module")
def truth() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(FOLDER)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("sent_as", ["texts", "token ids"])
def test_log_likelihoods_of_a_batch_are_those_of_transformers_for_each_text_alone(
    post: Post, truth: tuple[Any, Any], sent_as: str, max_tokens: int
) -> None:
    model, tokenizer = truth
    ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
    body = {"prompt": PROMPTS if sent_as == "texts" else ids, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    answer = post({"model": "tiny", "temperature": 0, "seed": 1234, **body})
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(PROMPTS)))
    for text, tokens, choice in zip(PROMPTS, ids, answer["choices"], strict=True):
        logprobs, count = choice["logprobs"], len(tokens)
        assert all(len(values) == count + max_tokens for values in logprobs.values())
        assert choice["text"].startswith(text)
        with torch.no_grad():
            logp = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = logp[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        torch.testing.assert_close(torch.tensor(logprobs["token_logprobs"][1:count]), expected, atol=1e-4, rtol=0)
        for place, own, top in zip(logp, expected, logprobs["top_logprobs"][1:count], strict=False):
            assert max(top.values()) == pytest.approx(float(place.max()), abs=1e-4)
            assert (max(top.values()) - float(own) < 1e-4) == bool(place.max() == own)  # greedy or not
        if max_tokens:
            assert logprobs["tokens"][count] == tokenizer.decode([int(logp[-1].argmax())])


def test_passes_over_some_texts_at_a_time_give_what_one_over_all_gives(
    truth: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = truth[0], SamplingParams()
    texts = [GivenText(torch.arange(20, 20 + length), 1, length, plain, 2) for length in (9, 1, 30, 5, 30)]
    together = score_texts(model, texts)
    assert [len(scores) for scores in together] == [8, 0, 29, 4, 29]
    passes = list[int]()
    forward = model.forward

    def count(**inputs: Any) -> Any:
        passes.append(len(inputs["input_ids"]))
        return forward(**inputs)

    monkeypatch.setattr(model, "forward", count)
    monkeypatch.setattr("policygrad.commands.text_scores.LOGITS_AT_ONCE", 31 * model.config.vocab_size)
    monkeypatch.setattr("policygrad.commands.text_scores.PLACES_AT_ONCE", 7)
    for apart, whole in zip(score_texts(model, texts), together, strict=True):
        assert [score.logp for score in apart] == pytest.approx([score.logp for score in whole], abs=1e-5)
        assert [[i for i, _ in score.alternatives] for score in apart] == [
            [i for i, _ in s.alternatives] for s in whole
        ]
    assert passes == [2, 1, 1]


FAST = ("qwen3_5", "lfm2", "jamba", "deepseek_v4")  # states, convolutions, compressed keys


@pytest.mark.parametrize(
    "family", [pytest.param(f, id=f.type, marks=() if f.type in FAST else pytest.mark.full) for f in families()]
)
def test_texts_that_are_scored_together_have_the_scores_of_each_alone(family: Any) -> None:
    torch.manual_seed(0)
    model = load_model(tf.AutoModelForCausalLM.from_config(family.config()).eval())
    lengths = [40, 3, 21, 9, 17]
    texts = [GivenText(torch.randint(3, 40, (n,)), 1, n, SamplingParams()) for n in lengths]
    for text, scores in zip(texts, score_texts(model, texts), strict=True):
        (alone,) = score_texts(model, [text])
        assert [s.logp for s in scores] == pytest.approx([s.logp for s in alone], abs=1e-5)
