"""Models that see: what the processor, the sampler and the learner compute is what transformers computes for the same pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doubles.vision_models import FAMILIES, make_family, make_picture
from policygrad.core.batch import Batch
from policygrad.core.media import distinguish_media
from policygrad.errors import ModelError
from policygrad.learners.local.forward import Evaluator, Network, build_evaluator
from policygrad.learners.local.packing import pack_micro_batches
from policygrad.models.replica import clone_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.models.vision import attends_both_ways, load_processor
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler

Messages = tuple[dict[str, Any], ...]
SIZES = ((40, 24), (48, 24), (32, 32))


def ask(*seeds: int, text: str = "how many?") -> Messages:
    """A question about pictures of noise, of several sizes."""
    pictures = [make_picture(*SIZES[seed % len(SIZES)], seed) for seed in seeds]
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return ({"role": "user", "content": (*parts, {"type": "text", "text": text})},)


TOLERANCE = {"qwen3_5": 1e-5}  # transformers keeps the state of its linear attention in float32
# one picture, two, another with the same words, the same prompt again, none
PROMPTS = (ask(1), ask(5, 6), ask(9), ask(1), ask(text="hello"))


@cache
def family(name: str) -> tuple[nn.Module, Any, Tokenizer, Evaluator]:
    """A model in float64, its processor and tokenizer, and the evaluator with every shortcut that is exact for it."""
    model, processor = make_family(name)
    model = model.double()
    return model, processor, load_tokenizer(processor, model), build_evaluator(model, 1.0)


def process(processor: Any, messages: Messages) -> dict[str, Tensor]:
    """What transformers makes of the messages by itself."""
    decoded = [
        {
            **message,
            "content": [
                {"type": "image", "image": part["image"].decode()} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]
    out = processor.apply_chat_template(
        decoded, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    return dict(out)


def plain_logp(model: nn.Module, inputs: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """log π [T] of the tokens after a prompt by transformers' own forward pass."""
    length, count = inputs["input_ids"].shape[1], len(tokens)
    longer = dict(inputs)
    longer["input_ids"] = torch.cat([inputs["input_ids"], tokens[None]], 1)
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in longer:
            longer[name] = nn.functional.pad(longer[name], (0, count))
    logits = model(**longer).logits[0, length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]  # type: ignore[no-any-return]


def make_batch(tokenizer: Tokenizer, prompts: Sequence[Messages], tokens: Tensor, mask: Tensor) -> Batch:
    encoded = [tokenizer.encode(prompt, 8) for prompt in prompts]
    each = len(tokens) // len(prompts)
    return Batch(
        mask=mask,
        group=torch.arange(len(prompts)).repeat_interleave(each),
        reward=torch.zeros(len(tokens)),
        tokens=tokens,
        prompts=tuple(text.ids for text in encoded),
        prompt_media=tuple(text.media for text in encoded),
    )


def evaluate(evaluator: Evaluator, batch: Batch) -> Tensor:
    out = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for part in pack_micro_batches(batch, torch.arange(len(out)), 10**6):
        out = out.index_add(0, part.rows, evaluator(part).double())
    return out


def random_tokens(rows: int) -> Tensor:
    tokens = torch.randint(2, 90, (rows, 6), generator=torch.Generator().manual_seed(0))
    tokens[1, :3] = tokens[0, :3]  # completions of one prompt that begin alike
    return tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_inputs_are_the_processors(name: str) -> None:
    _, processor, tokenizer, _ = family(name)
    for prompt in PROMPTS:
        expected, text = process(processor, prompt), tokenizer.encode(prompt, 8)
        assert text.ids.tolist() == expected["input_ids"][0].tolist()
        assert len(text.media) == sum(part["type"] == "image" for part in prompt[0]["content"])
        for media in text.media:
            assert set(text.ids[media.slots].tolist()) == {tokenizer.pictures.placeholder}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FAMILIES)
def test_logp_and_gradient_are_those_of_transformers(name: str) -> None:
    model, processor, tokenizer, evaluator = family(name)
    tokens = random_tokens(2 * len(PROMPTS))
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[2, 4:] = False
    batch = make_batch(tokenizer, PROMPTS, tokens, mask)
    weight = torch.randn(tokens.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * mask
    rows = [plain_logp(model, process(processor, PROMPTS[i // 2]), row) for i, row in enumerate(tokens)]
    expected = torch.stack(rows)
    (expected * weight).sum().backward()
    gradient = take_gradient(model)
    plain = Evaluator(Network(model), 1.0)
    for computed in (evaluate(evaluator, batch), evaluate(plain, batch)):
        assert float((computed - expected)[mask].abs().max()) < 1e-10
        (computed * weight).sum().backward()
        found = take_gradient(model)
        assert set(found) == set(gradient)
        for parameter, value in gradient.items():
            # transformers computes norms in float32 even in a float64 model, and their backward pass adds up in another order
            error = float((found[parameter] - value).abs().max())
            assert error <= TOLERANCE.get(name, 1e-6) * max(1.0, float(value.abs().max())), parameter


def take_gradient(model: nn.Module) -> dict[str, Tensor]:
    gradient = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradient


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_logp_is_the_learners(name: str) -> None:
    model, _, tokenizer, evaluator = family(name)
    sampler = LocalSampler.from_tokenizer(model, tokenizer)
    texts = [tokenizer.encode(prompt, 8) for prompt in PROMPTS]
    sampling = SamplingParams(max_tokens=8)
    requests = [
        Request(text.ids, (1, 0, 1, i, sample), sampling, 8, media=text.media)
        for i, text in enumerate(texts)
        for sample in range(3)
    ]
    generations = asyncio.run(sampler.generate(requests))
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([g.tokens for g in generations], batch_first=True)
    mask = torch.arange(tokens.shape[1]) < torch.tensor([len(g.tokens) for g in generations])[:, None]
    logp = pad([g.logp.double() for g in generations], batch_first=True)
    batch = make_batch(tokenizer, PROMPTS, tokens, mask)
    with torch.no_grad():
        assert float((evaluate(evaluator, batch) - logp)[mask].abs().max()) < TOLERANCE.get(
            name, 1e-6
        )  # samplers report float32
    alone = asyncio.run(sampler.generate(requests[4:5]))
    assert alone[0].tokens.tolist() == generations[4].tokens.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_placeholder_that_the_policy_writes_is_a_token(name: str) -> None:
    """It is embedded as any other token, and no picture stands there: in prompts with and without pictures."""
    model, _, tokenizer, evaluator = family(name)
    assert tokenizer.pictures is not None
    tokens = random_tokens(2 * len(PROMPTS))
    tokens[:, 2] = tokenizer.pictures.placeholder
    batch = make_batch(tokenizer, PROMPTS, tokens, torch.ones(tokens.shape, dtype=torch.bool))
    with torch.no_grad():
        computed, plain = evaluate(evaluator, batch), evaluate(Evaluator(Network(model), 1.0), batch)
        other = evaluate(evaluator, replace(batch, tokens=tokens.index_fill(1, torch.tensor([2]), 40)))
    assert float((computed - plain).abs().max()) < 1e-10
    assert torch.equal(computed[:, :2], other[:, :2])
    assert float((computed - other)[:, 3:].abs().max()) > 1e-6  # it is read


@pytest.mark.parametrize("name", FAMILIES)
def test_a_picture_changes_what_follows(name: str) -> None:
    """Two prompts with the same words and other pictures share no node of a tree, and two equal ones share all."""
    _, _, tokenizer, evaluator = family(name)
    tokens = random_tokens(2)[:1].expand(len(PROMPTS), -1)
    batch = make_batch(tokenizer, PROMPTS, tokens, torch.ones(tokens.shape, dtype=torch.bool))
    with torch.no_grad():
        logp = evaluate(evaluator, batch)
    assert float((logp[0] - logp[2]).abs().max()) > 1e-6
    assert torch.equal(logp[0], logp[3])
    (pack,) = pack_micro_batches(batch, torch.arange(len(tokens)), 10**6)
    texts = [tokenizer.encode(prompt, 8) for prompt in PROMPTS]
    distinct = {tuple(distinguish_media(text.ids, text.media).tolist()) for text in texts}
    assert len(pack.paths) == len(distinct) == len(PROMPTS) - 1
    assert len(pack.node_media) == sum(len(text.media) for text in texts) - 1


def test_only_gemmas_pictures_attend_both_ways() -> None:
    assert {name for name in FAMILIES if attends_both_ways(family(name)[0])} == {"gemma3", "gemma4"}
    shares = {name: family(name)[3].network for name in FAMILIES}
    assert {name for name, network in shares.items() if network.use_tree and network.shares_pictures} == {
        "idefics3",
        "qwen2_5_vl",
        "qwen3_vl",
        "internvl",
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_model_computes_the_same(name: str) -> None:
    model, _, tokenizer, evaluator = family(name)
    tokens = random_tokens(len(PROMPTS))
    batch = make_batch(tokenizer, PROMPTS, tokens, torch.ones(tokens.shape, dtype=torch.bool))
    clone = clone_model(model)
    with torch.no_grad():
        computed = evaluate(build_evaluator(clone, 1.0), batch)
        assert torch.equal(computed, evaluate(evaluator, batch))


def test_a_text_that_spells_out_the_mark_is_refused() -> None:
    _, _, tokenizer, _ = family("idefics3")
    with pytest.raises(ModelError, match=r"rows.jsonl:3: 1 picture, but the text has the mark '<image>' .* 2 times"):
        tokenizer.encode(ask(1, text="what is <image>?"), 8, "rows.jsonl:3")


def test_a_model_that_does_not_see_refuses_pictures(random_model: Any) -> None:
    from policygrad.models.loading import load_model

    model = load_model(str(random_model))
    tokenizer = load_tokenizer(str(random_model), model)
    with pytest.raises(ModelError, match=r"rows.jsonl:3 has a picture, and .* does not see"):
        tokenizer.encode(ask(1), 8, "rows.jsonl:3")
    assert load_processor(str(random_model), model, tokenizer.hf, "random", False) is None
