"""Prompts that begin alike read their beginning once, on every kind of layer, and are otherwise as if each had been read alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
import transformers as tf
from torch import Tensor

from doubles.architectures import families
from policygrad.models.loading import load_model
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.local import beginnings, kv_cache, text_cache
from policygrad.samplers.local import sampler as local
from policygrad.samplers.local.beginnings import may_share, plan_beginnings
from policygrad.samplers.local.kv_cache import divide_by_length
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.samplers.local.state_cache import StateCache
from policygrad.weight_sync.base import PublishedWeights

FAMILIES = {f.type: f for f in families()}
FAST = ("qwen3", "gemma3_text", "deepseek_v3", "qwen3_5")
"""Plain, windows, latent attention with experts, delta rules beside attention."""
KINDS = (*FAST, "gpt_oss", "gemma4_text", "lfm2", "falcon_h1", "jamba", "mamba2", "gemma2", "minimax", "deepseek_v4")
READS_ALL = ("gemma2", "minimax", "deepseek_v4", "jamba")
"""Windows in a cache of the model's own, states outside of layers, compressed keys, a scan that begins anew: every prompt is read
whole."""
SAMPLING = SamplingParams(max_tokens=6, decode_rows=5)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings of a few tokens count, as those of thousands do otherwise."""
    monkeypatch.setattr(beginnings, "LEAST_LENGTH", 4)
    monkeypatch.setattr(beginnings, "CALL_TOKENS", 8)
    monkeypatch.setattr(kv_cache, "CALL_TOKENS", 8)
    monkeypatch.setattr(local, "SHORT_PROMPT", 4)
    monkeypatch.setattr(text_cache, "CALL_TOKENS", 8)
    monkeypatch.setattr("policygrad.samplers.local.state_cache.CALL_TOKENS", 4)


@pytest.mark.parametrize("seed", range(20))
def test_prompts_are_divided_by_length_so_that_fewest_tokens_are_read(seed: int, short: None) -> None:
    """Among all divisions into runs of the sorted lengths."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (int(torch.randint(1, 9, (), generator=g)),), generator=g).tolist()

    def cost(passes: list[list[int]]) -> int:
        return sum(kv_cache.CALL_TOKENS + len(which) * max(which) for which in passes)

    ordered, n = sorted(lengths), len(lengths)
    cuts = product((False, True), repeat=n - 1)
    every = [[0, *(i + 1 for i, is_cut in enumerate(cut) if is_cut), n] for cut in cuts]
    least = min(cost([ordered[a:b] for a, b in pairwise(edges)]) for edges in every)
    passes = divide_by_length(lengths)
    assert sorted(i for which in passes for i in which) == list(range(n))
    assert cost([[lengths[i] for i in which] for which in passes]) == least


def test_prompts_of_like_length_are_read_together() -> None:
    assert divide_by_length([]) == []
    assert divide_by_length([200, 190] * 16) == [list(range(32))]
    assert divide_by_length([30, 2000, 40, 1900]) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_5", "lfm2", "jamba"])
def test_prompts_that_are_read_in_several_passes_are_continued_as_in_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where keys are shared, and where each row has keys and a state of its own."""
    monkeypatch.setattr(kv_cache, "CALL_TOKENS", 8)
    torch.manual_seed(0)
    model = load_model(tf.AutoModelForCausalLM.from_config(FAMILIES[kind].config()).eval())
    g = torch.Generator().manual_seed(1)
    prompts, widths = [torch.randint(3, 40, (n,), generator=g) for n in (40, 3, 38, 5, 17)], list[int]()
    sampler, sampling = LocalSampler(model, frozenset({1}), 0), replace(SAMPLING, decode_rows=len(prompts))
    requests = [Request(prompt, (0, i), sampling, 6) for i, prompt in enumerate(prompts)]
    each = [drawn(sampler, [request])[0] for request in requests]
    model.register_forward_pre_hook(lambda _, args, kw: widths.append(kw["input_ids"].shape[1]), with_kwargs=True)
    together = drawn(sampler, requests)
    assert sorted(width for width in widths if width > 1) == [5, 17, 40]
    for alone, generation in zip(each, together, strict=True):
        assert torch.equal(generation.tokens, alone.tokens)
        assert torch.allclose(generation.logp, alone.logp, atol=1e-5)


def prompts_of_two_tasks() -> list[Tensor]:
    """Two instructions of 20 and 30 tokens, the second also with more behind it; questions of several lengths; a prompt alone."""
    g = torch.Generator().manual_seed(3)

    def draw(n: int) -> Tensor:
        return torch.randint(3, 40, (n,), generator=g)

    first, second = draw(20), draw(30)
    longer = torch.cat([second, draw(12)])
    ends = [(first, 3), (first, 9), (first, 5), (second, 4), (longer, 2), (longer, 7), (longer, 4)]
    return [*(torch.cat([start, draw(n)]) for start, n in ends), draw(11)]


def make_requests(prompts: list[Tensor], call: int = 0, *, continues: bool = False) -> list[Request]:
    return [Request(p, (call, i, s), SAMPLING, 6, continues) for i, p in enumerate(prompts) for s in range(2)]


def drawn(sampler: LocalSampler, requests: list[Request]) -> list[Generation]:
    return asyncio.run(sampler.generate(requests))


def assert_alike(actual: list[Generation], expected: list[Generation], tolerance: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.logp, b.logp, rtol=0, atol=tolerance)


def test_what_is_read_once_is_chosen_by_what_it_saves() -> None:
    def text(*parts: tuple[int, int]) -> Tensor:
        return torch.cat([torch.full((n,), token) for token, n in parts])

    instructions = (5, 600)
    prompts = [text(instructions, (6 + i, 10)) for i in range(3)]
    example = [text(instructions, (9, 300), (20 + i, 3)) for i in range(3)]
    alone = text((40, 900))
    assert may_share(prompts)
    assert not may_share([alone])
    plan = plan_beginnings([*prompts, alone, *example])
    assert [plan[id(p)] for p in (*prompts, alone)] == [(600,)] * 3 + [()]
    assert [plan[id(p)] for p in example] == [(600, 900)] * 3
    assert set(plan_beginnings([text((5, 60), (6 + i, 600)) for i in range(9)]).values()) == {()}
    same = [text((5, 700)) for _ in range(2)]  # of a prompt that is there twice the last token is read for its logits
    assert set(plan_beginnings(same).values()) == {(699,)}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in FAST else pytest.mark.full) for k in KINDS])
def test_prompts_that_begin_alike_read_it_once_and_are_as_if_each_were_alone(kind: str) -> None:
    torch.manual_seed(0)
    model = load_model(tf.AutoModelForCausalLM.from_config(FAMILIES[kind].config()).eval())
    if is_double := kind in ("qwen3", "gemma3_text"):
        model = model.double()
    prompts = prompts_of_two_tasks()
    alone = LocalSampler(model, frozenset(), 0)
    expected = [g for r in make_requests(prompts) for g in drawn(alone, [r])]
    assert not alone.prefill.shared
    sampler = LocalSampler(model, frozenset(), 0)
    tolerance = 1e-6 if is_double else 2e-4  # recorded in float32
    assert_alike(drawn(sampler, make_requests(prompts)), expected, tolerance)
    assert sampler._texts is None  # nothing may be continued
    if sampler._continues:
        total = sum(map(len, prompts))
        assert sampler.prefill.read + sampler.prefill.shared >= total
        assert sampler.prefill.read < 0.8 * total
    assert bool(sampler._continues) == (kind not in READS_ALL)
    # later calls of the same step, one prompt at a time: only what comes after its beginning is read
    for call in range(2):
        before = sampler.prefill.read
        for i, prompt in enumerate(prompts):
            again = prompt.clone()
            requests = [Request(again, (0, i, s), SAMPLING, 6, continues=True) for s in range(2)]
            assert_alike(drawn(sampler, requests), expected[2 * i : 2 * i + 2], tolerance)
        if sampler._continues and call and not isinstance(sampler._texts, StateCache):
            assert sampler.prefill.read - before == len(prompts)  # all is known: of each the last token
    metrics = asyncio.run(sampler.update(PublishedWeights(1, {})))
    assert bool(metrics) == bool(sampler._continues)
    assert sampler._texts is None
