"""The local sampler: recorded log-probabilities are the model's, and completions do not depend on the batch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from doubles.drawing import Context, sample
from policygrad.errors import EngineError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer, pad_token_id
from policygrad.samplers.base import Generation, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.samplers.local.sampling import log_probabilities
from policygrad.weight_sync.base import PublishedWeights

TEXTS = ["What is 7 + 8?\n", "a", "Sort: 3 1 2\nNow, please!\n", "Hello world\n", "7\n"]


@pytest.fixture(scope="module")
def sampler(random_model: Path) -> LocalSampler:
    model = load_model(str(random_model))
    tokenizer = load_tokenizer(str(random_model), model)
    return LocalSampler(model, tokenizer.end_ids, pad_token_id(tokenizer))


@pytest.fixture(scope="module")
def prompts(random_model: Path) -> list[Context]:
    tokenizer = load_tokenizer(str(random_model), load_model(str(random_model)))
    return [Context(tokenizer.encode(text, 16).ids, (3, 0, 1, i)) for i, text in enumerate(TEXTS)]


def _rows(groups: list[list[Generation]]) -> list[list[int]]:
    return [c.tokens.tolist() for g in groups for c in g]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=16),
        SamplingParams(temperature=0.7, max_tokens=16),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.8, max_tokens=16),
        SamplingParams(temperature=0, max_tokens=16),
    ],
    ids=str,
)
def test_recorded_logprobs_are_the_models(
    sampler: LocalSampler, prompts: list[Context], sampling: SamplingParams
) -> None:
    groups = sample(sampler, prompts, 4, sampling)
    for prompt, group in zip(prompts, groups, strict=True):
        assert len(group) == 4
        for completion in group:
            n = len(completion.tokens)
            ids = torch.cat([prompt.tokens, completion.tokens])[None]
            with torch.no_grad():
                logits = sampler.model(input_ids=ids).logits[0, len(prompt.tokens) - 1 : -1]
            expected = log_probabilities(logits, sampling).gather(-1, completion.tokens[:, None]).squeeze(1)
            assert torch.allclose(completion.logp, expected, atol=2e-5)
            assert 1 <= n <= sampling.max_tokens


def test_completions_end_at_the_end_token_or_the_limit(sampler: LocalSampler, prompts: list[Context]) -> None:
    end = set(sampler.end.tolist())
    completions = [c for g in sample(sampler, prompts, 64, SamplingParams(temperature=1.5, max_tokens=24)) for c in g]
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert 0 < len(ended) < len(completions)  # both kinds occur, or the test shows nothing
    for c in completions:
        tokens = c.tokens.tolist()
        assert not end & set(tokens[:-1])
        assert (tokens[-1] in end) is (c.finish_reason == "stop")
        assert c.finish_reason == "stop" or len(tokens) == 24


def test_completions_do_not_depend_on_batch_or_limit(sampler: LocalSampler, prompts: list[Context]) -> None:
    sampling = SamplingParams(max_tokens=12)
    batched = _rows(sample(sampler, prompts, 4, sampling))
    baseline = [row for p in prompts for row in _rows(sample(sampler, [p], 4, sampling))]
    assert batched == baseline
    assert batched == _rows(sample(sampler, prompts, 4, SamplingParams(max_tokens=12, decode_rows=4)))
    assert _rows(sample(sampler, prompts, 2, sampling)) == [r for i, r in enumerate(batched) if i % 4 < 2]
    longer = _rows(sample(sampler, prompts, 4, SamplingParams(max_tokens=20)))
    assert all(a == b[: len(a)] for a, b in zip(batched, longer, strict=True))


def test_decode_rows_limits_the_batch(sampler: LocalSampler, prompts: list[Context]) -> None:
    sizes: list[int] = []
    hook = sampler.model.register_forward_pre_hook(
        lambda _, args, named: sizes.append(len(named["input_ids"])), with_kwargs=True
    )
    sample(sampler, prompts, 4, SamplingParams(max_tokens=6, decode_rows=8))
    hook.remove()
    assert max(sizes) == 8  # two prompts of the five
    sizes.clear()
    hook = sampler.model.register_forward_pre_hook(
        lambda _, args, named: sizes.append(len(named["input_ids"])), with_kwargs=True
    )
    sample(sampler, prompts, 4, SamplingParams(max_tokens=6))
    hook.remove()
    assert max(sizes) == 20


def test_cache_grows_when_full(sampler: LocalSampler, prompts: list[Context], monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(max_tokens=16)
    full = _rows(sample(sampler, prompts, 4, sampling))
    monkeypatch.setattr("policygrad.samplers.local.kv_cache.GROWTH_TOKENS", 3)
    assert _rows(sample(sampler, prompts, 4, sampling)) == full


def test_decoding_continues_from_a_prefix(sampler: LocalSampler, prompts: list[Context]) -> None:
    """A prompt may end with the start of a completion; greedy decoding continues as if it had never stopped."""
    greedy = SamplingParams(temperature=0, max_tokens=12)
    full = sample(sampler, prompts[:1], 1, greedy)[0][0].tokens
    prefix = Context(torch.cat([prompts[0].tokens, full[:5]]), prompts[0].key)
    rest = sample(sampler, [prefix], 1, SamplingParams(temperature=0, max_tokens=7))[0][0].tokens
    assert torch.equal(rest, full[5:])


def test_update_copies_weights_and_sets_the_version(random_model: Path) -> None:
    model, other = load_model(str(random_model)), load_model(str(random_model))
    tokenizer = load_tokenizer(str(random_model), model)
    sampler = LocalSampler(model, tokenizer.end_ids, pad_token_id(tokenizer))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    asyncio.run(sampler.update(PublishedWeights(5, dict(other.named_parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert sample(sampler, [Context(torch.tensor([1]), (0,))], 1, SamplingParams(max_tokens=1))[0][0].version == 5


def test_weights_of_another_model_are_refused_by_name(random_model: Path) -> None:
    model = load_model(str(random_model))
    sampler = LocalSampler.from_tokenizer(model, load_tokenizer(str(random_model), model))
    with pytest.raises(EngineError, match=r"publishes 'head\.bias', which this LlamaForCausalLM does not have"):
        asyncio.run(sampler.update(PublishedWeights(1, {"head.bias": torch.zeros(1)})))


def test_each_completion_is_reported_once_with_its_tokens(sampler: LocalSampler, prompts: list[Context]) -> None:
    """The callback changes nothing, and is called after every token, also when no completion has finished."""
    sampling = SamplingParams(temperature=1.5, max_tokens=12, decode_rows=8)  # slots are refilled
    reply: list[list[tuple[tuple[int, ...], list[int]]]] = []
    with sampler.on_completion(lambda over: reply.append([(request.key, tokens.tolist()) for request, tokens in over])):
        groups = sample(sampler, prompts, 4, sampling)
    looks = len(reply)
    assert _rows(groups) == _rows(sample(sampler, prompts, 4, sampling))
    assert len(reply) == looks  # no calls outside the context
    result = [one for some in reply for one in some]
    expected = {(*p.key, j): c.tokens.tolist() for p, g in zip(prompts, groups, strict=True) for j, c in enumerate(g)}
    assert len(result) == len(expected)
    assert dict(result) == expected
    assert [] in reply
    assert sum(map(bool, reply)) >= 3  # some rows finish before others, or the test shows nothing


def test_callback_error_ends_sampling(sampler: LocalSampler, prompts: list[Context]) -> None:
    def refuse(over: object) -> None:
        raise OSError("enough")

    with pytest.raises(OSError, match="enough"), sampler.on_completion(refuse):
        sample(sampler, prompts, 1, SamplingParams(max_tokens=4))
    assert len(sample(sampler, prompts, 1, SamplingParams(max_tokens=4))) == len(prompts)
