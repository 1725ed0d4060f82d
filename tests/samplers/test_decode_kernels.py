"""Triton's kernels for decoding against plain torch. On a CPU they run in Triton's interpreter: make test-kernels."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.samplers.local.sampling import draws_by_kernel, sample_tokens
from policygrad.samplers.local.shared_prefix import SharedPrefixCache, supports_shared_prefix
from tests.doubles.architectures import CONFIGS

if find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton lies beside the suite's packages: make test-kernels"
)
CASES = [(name, captured) for name in ("qwen3", "gemma3", "mistral", "gpt2") for captured in (False, True)]
"""`captured`: all columns that are allocated are read, as in a graph."""


@pytest.fixture(autouse=True)
def _interpret_with_numpy_2_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter makes the bounds of a loop integers in a way that numpy 2.4 refuses."""
    if find_spec("triton") is None or torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_further(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_further)


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


@needs_triton
@pytest.mark.parametrize(
    ("name", "captured"),
    [("gemma3", True), *(pytest.param(*case, marks=pytest.mark.full) for case in CASES if case != ("gemma3", True))],
)
def test_attention_equals_plain_attention(name: str, captured: bool) -> None:
    """Grouped queries, windows and sinks, as the models have them; prompts of many lengths with one or several rows; rows that
    leave, and others that join."""
    from policygrad.models.attention import use_fused_attention

    model, generator = build(name), torch.Generator().manual_seed(1)
    use_fused_attention(model)
    prompts = [torch.randint(3, 40, (n,), generator=generator) for n in (5, 30, 9, 3)]
    logits = list[list[Tensor]]()
    for kernels in (False, True):
        cache, seen = SharedPrefixCache(model, 0, kernels=kernels), list[Tensor]()
        with torch.no_grad():
            seen.append(cache.read(prompts[:3], torch.tensor([3, 1, 2]), 40)[0])
            position = torch.tensor([5, 5, 5, 30, 9, 9])
            for step in range(3):
                if captured:
                    cache.reserve(1)
                seen.append(cache.step(torch.arange(3, 9), position + step))
                if captured:
                    cache.advance(1)
            order = cache.keep_rows(torch.tensor([0, 2, 3, 5]))
            seen.append(cache.read(prompts[3:], torch.tensor([2]), 40)[0])
            position = torch.cat([position[order] + 3, torch.tensor([3, 3])])
            for step in range(3):
                if captured:
                    cache.reserve(1)
                seen.append(cache.step(torch.arange(3, 9), position + step))
                if captured:
                    cache.advance(1)
        assert all(layer.uses_kernel == kernels for layer in cache.layers)
        logits.append(seen)
    for plain, fused in zip(*logits, strict=True):
        assert torch.allclose(plain, fused, rtol=0, atol=2e-5 * float(plain.abs().max()) + 1e-6)


@needs_triton
def test_long_contexts_are_divided_and_combined() -> None:
    from policygrad.samplers.local.kernels import attend_once

    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 1, 700, d, generator=generator) for d in (24, 20))
    query, sinks = torch.randn(3, 2, 24, generator=generator), torch.tensor([0.5, -1.0])
    rows = torch.tensor([[2, 0, 1, -1]], dtype=torch.int32)
    first, last = torch.tensor([0, 300, 699], dtype=torch.int32), torch.tensor([700, 310, 700], dtype=torch.int32)
    own = torch.randn(3, 1, 4, 24, generator=generator)
    own_values = torch.randn(3, 1, 4, 20, generator=generator)
    of_rows, begin, end = torch.arange(3).int()[:, None], torch.tensor([0, 1, 3]).int(), torch.tensor([4, 2, 3]).int()
    parts = [(keys, values, rows, first, last), (own, own_values, of_rows, begin, end)]
    for sink in (None, sinks):
        out = attend_once(query, parts, 0.3, sink)
        for i in range(3):
            k = torch.cat([keys[0, 0, first[i] : last[i]], own[i, 0, begin[i] : end[i]]])
            v = torch.cat([values[0, 0, first[i] : last[i]], own_values[i, 0, begin[i] : end[i]]])
            scores = query[i] @ k.T * 0.3
            if sink is not None:
                scores = torch.cat([scores, sink[:, None]], 1)
            assert torch.allclose(out[i], scores.softmax(-1)[:, : len(k)] @ v, rtol=0, atol=2e-6)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "temperature"), [(513, 1.0), (1024, 0.7), (5000, 1.3)])
def test_the_draw_is_that_of_plain_torch(size: int, temperature: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = (3 * torch.randn(24, size, generator=generator)).to(dtype)
    logits[:, ::3] = -torch.inf
    logits[0, :-1], logits[1, 1:] = -torch.inf, -torch.inf
    logits[0, -1], logits[1, 0] = -5, 2
    logits[2, size // 2 :] = -torch.inf
    u = torch.rand(24, generator=generator, dtype=torch.float64)
    u[2:6] = torch.tensor([1 - 2**-53, 0.0, 1 - 2**-53, 0.5], dtype=torch.float64)
    sampling = SamplingParams(temperature=temperature)
    assert draws_by_kernel(logits, sampling)
    token, logp = sample_tokens(logits, u, sampling)
    fused, fused_logp = sample_tokens(logits, u, sampling, kernels=True)
    assert torch.equal(token, fused)
    assert torch.allclose(logp, fused_logp, rtol=0, atol=3e-6)


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets the kernel
def test_rows_that_are_no_distribution_have_no_finite_log_probability() -> None:
    logits = torch.zeros(4, 2000)
    logits[0, 5], logits[1, 1500], logits[2] = torch.nan, torch.inf, -torch.inf
    token, logp = sample_tokens(logits, torch.full((4,), 0.5, dtype=torch.float64), SamplingParams(), kernels=True)
    assert logp.isfinite().tolist() == [False, False, False, True]
    assert ((token >= 0) & (token < 2000)).all()


@needs_triton
@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.full)])
def test_completions_are_those_without_kernels(ahead: bool) -> None:
    model, drawn = build("qwen3"), list[list[Generation]]()
    generator = torch.Generator().manual_seed(2)
    prompts, sampling = [torch.randint(3, 40, (n,), generator=generator) for n in (5, 9)], SamplingParams(max_tokens=8)
    requests = [Request(prompts[i // 4], (0, i), sampling, 1 + i) for i in range(8)]
    for kernels in (False, True):
        sampler = LocalSampler(model, frozenset({1}), 0)
        sampler.uses_kernels, sampler.decodes_ahead = kernels, ahead
        drawn.append(asyncio.run(sampler.generate(requests)))
        assert sampler.uses_kernels == kernels  # the model's test has passed
    for plain, fused in zip(*drawn, strict=True):
        assert torch.equal(plain.tokens, fused.tokens)
        assert torch.allclose(plain.logp, fused.logp, rtol=0, atol=1e-5)


def test_kernels_are_for_gpus() -> None:
    assert not LocalSampler(build("gpt2"), frozenset({1}), 0).uses_kernels


@needs_triton
def test_keys_in_float64_are_attended_by_plain_torch() -> None:
    assert supports_shared_prefix(build("qwen3").double(), 0, kernels=True)


def test_truncated_and_greedy_sampling_are_not_the_kernels() -> None:
    logits = torch.zeros(1, 2000)
    for sampling in (SamplingParams(top_k=3), SamplingParams(top_p=0.9), SamplingParams(temperature=0.0)):
        assert not draws_by_kernel(logits, sampling)


def test_another_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sampler.kernels must be auto or off, not 'on'"):
        SamplerConfig(kernels="on")
