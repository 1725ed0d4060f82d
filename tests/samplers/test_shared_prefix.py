"""Decoding with shared prompts and refilled slots: log-probabilities equal those of full sequences, in any batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv

from doubles.cases import keep_fast
from policygrad.models.attention import attend_with_sinks
from policygrad.models.moe_routing import Routing
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.local import shared_prefix
from policygrad.samplers.local.kv_cache import DecodeCache, PlainDecodeCache
from policygrad.samplers.local.sampler import DecodeLoop, LocalSampler
from policygrad.samplers.local.shared_prefix import (
    PrefixLayout,
    SharedPrefixCache,
    SharedPrefixLayer,
    UnsupportedError,
    supports_shared_prefix,
)
from tests.doubles.architectures import BASE, CONFIGS, VOCABULARY

SHARING = ["gpt2", "qwen2 untied", "qwen3", "gemma3", "mistral", "phi", "gpt-neox", "granite", "falcon"]
END = torch.tensor([1])


def built(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return tf.AutoModelForCausalLM.from_config(CONFIGS[name]()).double().eval()


def asked(groups: list[tuple[int, int]], sampling: SamplingParams) -> list[Request]:
    """Return requests for (prompt length, completions) pairs, with limits from 1 to the sampling's."""
    g = torch.Generator().manual_seed(3)
    requests = []
    for i, (size, n) in enumerate(groups):
        context = torch.randint(3, VOCABULARY, (size,), generator=g)
        for j in range(n):
            most = 1 + int(torch.randint(sampling.max_tokens, (), generator=g))
            requests.append(Request(context, (i, j), sampling, most))
    return requests


GROUPS = [(5, 3), (2, 1), (9, 4), (1, 2), (7, 1), (3, 5), (9, 1), (4, 2), (6, 3)]


def decoded(memory: DecodeCache, requests: list[Request], routing: Routing | None = None) -> list[Generation]:
    return DecodeLoop(requests, END, 0, routing).run(memory, 0)


def whole(model: nn.Module, request: Request, tokens: Tensor) -> Tensor:
    """Return log π of the tokens from one forward pass over the sequence."""
    with torch.no_grad():
        logits = model(input_ids=torch.cat([request.prompt_ids, tokens])[None], use_cache=False).logits[0]
    logp = logits[len(request.prompt_ids) - 1 : -1].log_softmax(-1)
    return logp.gather(-1, tokens[:, None]).squeeze(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", keep_fast((512, 6, 1), 6))
@pytest.mark.parametrize("name", SHARING)
def test_shared_prefix_logprobs_equal_full_sequences(name: str, rows: int) -> None:
    model, sampling = built(name), SamplingParams(max_tokens=24, decode_rows=rows)
    assert supports_shared_prefix(model, 0)
    requests = asked(GROUPS, sampling)
    generations = decoded(SharedPrefixCache(model, 0), requests)
    assert {x.finish_reason for x in generations} == {"stop", "length"}
    for request, x in zip(requests, generations, strict=True):
        assert torch.allclose(x.logp.double(), whole(model, request, x.tokens), rtol=0, atol=2e-6)  # kept in float32


@pytest.mark.parametrize("rows", keep_fast((512, 7, 1)))
def test_unused_columns_change_nothing(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """With the attention and the alignment of half precision: beyond a multiple of 32, after moves, with later rows, and with
    uninitialised memory set to NaN."""
    model, sampling = built("qwen3"), SamplingParams(max_tokens=90, decode_rows=rows)
    requests = [
        replace(r, max_tokens=max(r.max_tokens, 40 + 7 * i % 50)) for i, r in enumerate(asked(GROUPS, sampling))
    ]
    never = torch.tensor([-1])
    plain = DecodeLoop(requests, never, 0, None).run(SharedPrefixCache(model, 0), 0)
    monkeypatch.setattr(shared_prefix, "is_half_on_cpu", lambda keys: True)
    empty = Tensor.new_empty

    def dirty(x: Tensor, *size: Any, **how: Any) -> Tensor:
        made = empty(x, *size, **how)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", dirty)
    padded = DecodeLoop(requests, never, 0, None).run(SharedPrefixCache(model, 0), 0)
    assert max(len(x.tokens) for x in padded) > 64
    for x, y in zip(plain, padded, strict=True):
        assert torch.equal(x.tokens, y.tokens)
        assert torch.allclose(x.logp, y.logp, rtol=0, atol=1e-6)


def test_shared_prefix_logits_are_exact_in_float64() -> None:
    """Generations are float32, so the logits behind them are compared here."""
    model = built("qwen3")
    memory, contexts = SharedPrefixCache(model, 0), [torch.tensor([3, 4, 5, 6]), torch.tensor([7, 8])]
    with torch.no_grad():
        read, width = memory.read(contexts, torch.tensor([2, 1]), 4)
        truth = [model(input_ids=contexts[i][None]).logits[0, -1] for i in (0, 0, 1)]
        assert width == 4
        assert torch.allclose(read, torch.stack(truth), rtol=0, atol=1e-10)
        completion = torch.tensor([9, 10, 11])
        stepped = memory.step(completion, torch.tensor([4, 4, 2]))
        rows = [torch.cat([contexts[i], completion[j : j + 1]]) for i, j in ((0, 0), (0, 1), (1, 2))]
        truth = [model(input_ids=row[None]).logits[0, -1] for row in rows]
        assert torch.allclose(stepped, torch.stack(truth), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", keep_fast(CONFIGS, "gpt2", "gemma2", "lfm2", "mamba"))
def test_plain_cache_samples_the_same(name: str) -> None:
    model, sampling = built(name), SamplingParams(max_tokens=24, decode_rows=6)
    model = model if name in SHARING else model.float()  # transformers' eager attention has no float64 for padded rows
    requests = asked(GROUPS, sampling)
    plain = decoded(PlainDecodeCache(model, 0), requests)
    for request, x in zip(requests, plain, strict=True):
        truth = whole(model, request, x.tokens)
        assert torch.allclose(x.logp.to(truth.dtype), truth, rtol=0, atol=2e-6 if name in SHARING else 1e-5)
    if name in SHARING:
        shared_prefix = decoded(SharedPrefixCache(model, 0), requests)
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(plain, shared_prefix, strict=True))
    sampler = LocalSampler(model, frozenset({1}), 0)
    chosen = asyncio.run(sampler.generate(requests))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(plain, chosen, strict=True))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in SHARING])
def test_models_with_other_caches_are_detected(name: str) -> None:
    model: Any = built(name)
    if name == "gemma2" and model.config._attn_implementation != "eager":
        pytest.skip("transformers 5.17 computes Gemma 2 by sdpa, without its caps")
    assert not supports_shared_prefix(model, 0)


def test_attention_other_than_sdpa_is_detected() -> None:
    config = CONFIGS["qwen3"]()
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    assert not supports_shared_prefix(tf.AutoModelForCausalLM.from_config(config).eval(), 0)


def passes(model: nn.Module, memory: DecodeCache, requests: list[Request]) -> list[int]:
    """Return the rows of each forward pass after the prompts were read."""
    sizes: list[int] = []

    def see(_: nn.Module, args: Any, named: Any) -> None:
        if named.get("past_key_values") is not None:
            sizes.append(len(named["input_ids"]))

    hook = model.register_forward_pre_hook(see, with_kwargs=True)
    decoded(memory, requests)
    hook.remove()
    return sizes


@pytest.mark.full
def test_forward_passes_follow_the_sum_of_lengths() -> None:
    """No end tokens; lengths 1 to 64 in four slots, which are refilled: rounds of four would take the longest of each."""
    model, sampling = built("qwen3"), SamplingParams(max_tokens=64, decode_rows=4)
    g = torch.Generator().manual_seed(0)
    lengths = [2 ** int(torch.randint(7, (), generator=g)) for _ in range(32)]
    requests = [Request(torch.tensor([3, 4 + i % 9]), (i,), sampling, n) for i, n in enumerate(lengths)]
    never = [without_end(memory, requests) for memory in (PlainDecodeCache(model, 0), SharedPrefixCache(model, 0))]
    assert [len(x.tokens) for x in never[1]] == lengths
    rounds = sum(max(lengths[i : i + 4]) for i in range(0, 32, 4))
    for memory in (PlainDecodeCache(model, 0), SharedPrefixCache(model, 0)):
        refilled = len(passes(model, memory, requests))
        assert refilled <= sum(lengths) / 4 + 64  # full slots, and only the longest at the end
        assert refilled < 0.75 * rounds
    assert max(passes(model, SharedPrefixCache(model, 0), requests)) == 4


def without_end(memory: DecodeCache, requests: list[Request]) -> list[Generation]:
    return DecodeLoop(requests, torch.tensor([VOCABULARY]), 0, None).run(memory, 0)


MOE: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: tf.Qwen3MoeConfig(
        **BASE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}


@pytest.mark.parametrize("kind", [PlainDecodeCache, SharedPrefixCache])
def test_experts_are_recorded_when_slots_are_refilled(kind: type[PlainDecodeCache] | type[SharedPrefixCache]) -> None:
    torch.manual_seed(0)
    config = MOE["qwen3"]()
    config._experts_implementation = "eager"  # the grouped product has no float64
    model = tf.AutoModelForCausalLM.from_config(config).double().eval()
    routing, requests = Routing.for_model(model), asked(GROUPS, SamplingParams(max_tokens=12, decode_rows=6))
    with routing.recording():
        generations = decoded(kind(model, 0), requests, routing)
    for request, x in zip(requests, generations, strict=True):
        with torch.no_grad(), routing.recording():
            model(input_ids=torch.cat([request.prompt_ids, x.tokens])[None])
            truth = routing.pop_recorded()
        assert x.routed_experts is not None
        assert torch.equal(x.routed_experts[:-1].sort(-1).values, truth[:-1].sort(-1).values)
        assert (x.routed_experts[-1] == -1).all()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("gqa", [False, True])
@pytest.mark.parametrize("owner", [[0, 0, 1, 1], [0, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]])
def test_shared_attention_equals_plain_attention(
    owner: list[int], gqa: bool, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is plain attention over the prompt's keys followed by the row's own, within windows, without sinks and with
    them. `half`: by the kernels of half precision, here in float64."""
    monkeypatch.setattr(shared_prefix, "is_half_on_cpu", lambda keys: half)
    g = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 2, 2, 5, 4, generator=g, dtype=torch.float64)  # two prompts of 5, two heads
    query, rows = torch.randn(4, 4 if gqa else 2, 1, 4, generator=g, dtype=torch.float64), torch.tensor(owner)
    parameters = torch.randn(2, 4, 2, 1, 4, generator=g, dtype=torch.float64)
    blind = torch.zeros(4, 1, 1, 6, dtype=torch.bool)
    blind[rows == 1, ..., :2] = True  # the second prompt is three tokens long
    counts, most = rows.bincount(minlength=2), int(rows.bincount().max())
    nth = torch.tensor([owner[:i].count(x) for i, x in enumerate(owner)])
    hidden = torch.zeros(blind.shape, dtype=torch.float64).masked_fill_(blind, -torch.inf)
    prompt_mask = torch.zeros(2, 1, 1, 5, dtype=torch.float64)
    prompt_mask[1, ..., :2] = -torch.inf
    hidden = F.pad(hidden, (0, 31), value=-torch.inf)  # room for the columns that half precision computes with
    layout = PrefixLayout(rows * most + nth, len(counts), most, hidden, prompt_mask, length=5)
    full = [torch.cat([part[rows], mine], 2) for part, mine in ((keys, parameters[0]), (values, parameters[1]))]
    seen, sinks = torch.ones(4, 1, 1, 1, dtype=torch.bool), torch.linspace(-1, 1, query.shape[1], dtype=torch.float64)
    for window in (1, 2, 3, 20, None):
        layer = SharedPrefixLayer(keys, values, 4, layout, window)
        k, v = layer.update(parameters[0], parameters[1])
        visible = ~blind & (torch.arange(6) > 5 - (window or 9))
        got = F.scaled_dot_product_attention(query, k, v, attn_mask=seen)
        expected = F.scaled_dot_product_attention(query, *full, attn_mask=visible, enable_gqa=gqa)
        assert torch.allclose(got, expected, rtol=0, atol=1e-12)
        got_sinks = attend_with_sinks(query, k, v, seen, sinks, 0.5)
        assert torch.allclose(got_sinks, attend_with_sinks(query, *full, visible, sinks, 0.5), rtol=0, atol=1e-12)
    if gqa:  # as transformers 5.17 calls it
        k, v = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (k, v))
        second = F.scaled_dot_product_attention(query, k, v, attn_mask=seen)
        assert torch.equal(second, got)


def test_shared_keys_refuse_other_operations() -> None:
    x = torch.randn(1, 1, 3, 2)
    layer = SharedPrefixLayer(x, x, 1, PrefixLayout(None, 1, 1, torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 3), 3))
    k, v = layer.update(x[:, :, :1], x[:, :, :1])
    with pytest.raises(UnsupportedError, match="on shared keys"):
        _ = x @ k.transpose(2, 3)
    with pytest.raises(UnsupportedError, match="another mask than the given one"):
        F.scaled_dot_product_attention(x[:, :, :1], k, v)
    mask, part = torch.ones(1, 1, 1, 1, dtype=torch.bool), k[:, :, None, :, :]
    with pytest.raises(UnsupportedError, match="partly repeated heads"):
        F.scaled_dot_product_attention(x[:, :, :1], part, v, attn_mask=mask)
    for wrong in (
        lambda: part + 1,
        lambda: part.expand(2, 1, 2, 1, 2),
        lambda: k[:, :, 0],
        lambda: part.reshape(1, 1, 1, 2),
    ):
        with pytest.raises(UnsupportedError, match="on shared keys"):
            wrong()


def test_small_memory_growth_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = built("qwen3"), asked(GROUPS, SamplingParams(max_tokens=24, decode_rows=6))
    before = decoded(SharedPrefixCache(model, 0), requests)
    for name, value in (
        ("shared_prefix._FIRST_TOKENS", 1),
        ("kv_cache.GROWTH_TOKENS", 1),
        ("shared_prefix._MASK_TOKENS", 1),
    ):
        monkeypatch.setattr(f"policygrad.samplers.local.{name}", value)
    after = decoded(SharedPrefixCache(model, 0), requests)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(before, after, strict=True))
    requests = [replace(r, max_tokens=1) for r in requests]
    assert [len(x.tokens) for x in decoded(SharedPrefixCache(model, 0), requests)] == [1] * len(requests)
