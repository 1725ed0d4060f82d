"""Requests that come while others are decoded join them, whatever they are sampled with, and are as if each were alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf

from doubles.architectures import families
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.local import arriving
from policygrad.samplers.local.sampler import LocalSampler

PLAIN = SamplingParams(max_tokens=40)
KINDS = (PLAIN, replace(PLAIN, temperature=0.7), replace(PLAIN, top_k=5), replace(PLAIN, stop=("7", "+ 1")))


def make_requests(count: int, kinds: Sequence[SamplingParams] = KINDS) -> list[Request]:
    """Requests of several lengths and kinds, in the order in which they come."""
    g = torch.Generator().manual_seed(2)
    requests = []
    for i in range(count):
        prompt = torch.randint(3, 40, (int(torch.randint(2, 20, (1,), generator=g)),), generator=g)
        stop = frozenset({5, 9}) if i % 5 == 4 else None
        sampling = kinds[i % len(kinds)]
        requests.append(Request(prompt, (0, i), sampling, 3 + 7 * i % 30, stop=stop))
    return requests


def sample_as_they_come(
    sampler: LocalSampler, requests: list[Request], every: int
) -> tuple[list[Generation], list[int]]:
    """One comes each `every` tokens; also return the order in which they ended."""
    waiting, results, calls = list(requests[2:]), dict[int, Generation](), 0

    def take() -> list[Request]:
        nonlocal calls
        calls += 1
        return [waiting.pop(0)] if waiting and calls % every == 0 else []

    def finish(request: Request, generation: Generation) -> None:
        assert request.key[1] not in results
        results[request.key[1]] = generation

    while waiting or not results:
        first = requests[:2] if not results else [waiting.pop(0)]
        sampler.generate_arriving(first, take, finish)
    return [results[i] for i in range(len(requests))], list(results)


def assert_as_alone(sampler: LocalSampler, requests: list[Request], results: list[Generation]) -> None:
    for request, result in zip(requests, results, strict=True):
        (alone,) = asyncio.run(sampler.generate([request]))
        assert torch.equal(result.tokens, alone.tokens)
        assert result.finish_reason == alone.finish_reason
        torch.testing.assert_close(result.logp, alone.logp, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_join_and_are_as_if_each_were_alone(
    random_model: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where finished ones are forgotten meanwhile, and where results are looked at every few tokens, as on a GPU."""
    monkeypatch.setattr(arriving, "_LEAST_FINISHED", 4)
    model = load_model(str(random_model))
    sampler = LocalSampler.from_tokenizer(model, load_tokenizer(str(random_model), model))
    sampler.decodes_ahead = ahead
    requests = make_requests(24, KINDS[:1] if ahead else KINDS)
    results, order = sample_as_they_come(sampler, requests, every=1 if ahead else 3)
    assert order != sorted(order)  # a short one does not wait for those before it
    assert_as_alone(sampler, requests, results)


@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("gemma2", marks=pytest.mark.full)])
def test_requests_join_on_other_layers_or_wait_where_a_cache_cannot_grow(kind: str) -> None:
    torch.manual_seed(0)
    config = next(f for f in families() if f.type == kind).config()
    sampler = LocalSampler(load_model(tf.AutoModelForCausalLM.from_config(config).eval()), frozenset({7}), 0)
    requests = make_requests(6, KINDS[:3])
    results, _ = sample_as_they_come(sampler, requests, every=2)
    assert_as_alone(sampler, requests, results)


def test_where_memory_runs_out_those_that_are_not_finished_begin_anew(random_model: Path) -> None:
    model = load_model(str(random_model))
    sampler = LocalSampler.from_tokenizer(model, load_tokenizer(str(random_model), model))
    requests, failed = make_requests(12), list[bool]()
    asyncio.run(sampler.generate(requests[:1]))

    def fail_once(*args: object) -> None:
        if not failed and args[1][0].shape[0] > 3:  # type: ignore[index]
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    handle = model.get_input_embeddings().register_forward_hook(lambda *args: fail_once(*args))
    with pytest.warns(UserWarning, match="decode-rows"):
        results, _ = sample_as_they_come(sampler, requests, every=1)
    handle.remove()
    assert failed
    assert_as_alone(sampler, requests, results)
