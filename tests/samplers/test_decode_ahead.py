"""Completions drawn several tokens at a time, as on a GPU, where a CUDA graph does it (`python scripts/measure_gpu.py`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from doubles.architectures import families
from doubles.cases import keep_fast
from policygrad.errors import NumericsError
from policygrad.models.loading import load_model
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.local import cuda_graphs
from policygrad.samplers.local.sampler import LocalSampler

GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, 40, (n,), generator=GENERATOR) for n in (5, 9, 14, 2, 7)]
LIMITS = torch.randint(1, 90, (40,), generator=GENERATOR).tolist()


def requests(sampling: SamplingParams) -> list[Request]:
    return [Request(PROMPTS[i // 8], (0, i), sampling, limit) for i, limit in enumerate(LIMITS)]


@pytest.mark.parametrize(
    "sampling",
    keep_fast(
        (
            SamplingParams(max_tokens=90, decode_rows=16),
            SamplingParams(max_tokens=90, decode_rows=64, temperature=0.7, top_p=0.9),
            SamplingParams(max_tokens=90, decode_rows=8, top_k=3),
            SamplingParams(max_tokens=90, decode_rows=16, temperature=0.0),
        )
    ),
    ids=str,
)
def test_completions_are_those_drawn_one_token_at_a_time(random_model: Path, sampling: SamplingParams) -> None:
    """Rows end at every place of a chunk, by an end token or their limit; new prompts take their slots; memory grows."""
    model, drawn, reported = load_model(str(random_model)), [], list[tuple[Request, Tensor]]()
    for ahead in (False, True):
        sampler = LocalSampler(model, frozenset({7, 11}), 0)
        sampler.decodes_ahead = ahead
        with sampler.on_completion(reported.extend if ahead else lambda _: None):
            drawn.append(asyncio.run(sampler.generate(requests(sampling))))
    assert len({len(x.tokens) % cuda_graphs.STEPS for x in drawn[0]}) > 8
    if not sampling.top_k and sampling.temperature:
        assert {x.finish_reason for x in drawn[0]} == {"stop", "length"}
    for one, several in zip(*drawn, strict=True):
        assert torch.equal(one.tokens, several.tokens)
        assert one.finish_reason == several.finish_reason
        assert torch.allclose(one.logp, several.logp, atol=1e-4)
    told = {request.key: tokens.tolist() for request, tokens in reported}
    assert len(reported) == len(LIMITS)
    assert told == {r.key: x.tokens.tolist() for r, x in zip(requests(sampling), drawn[1], strict=True)}


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_windows_and_sinks_are_those_of_one_token_at_a_time(kind: str) -> None:
    """In texts ten times as long as the window."""
    torch.manual_seed(0)
    family = next(f for f in families() if f.type == kind)
    model = load_model(tf.AutoModelForCausalLM.from_config(family.config()).eval())
    asked, drawn = requests(SamplingParams(max_tokens=90, decode_rows=16))[4:20], []
    for ahead in (False, True):
        sampler = LocalSampler(model, frozenset({7}), 0)
        sampler.decodes_ahead = ahead
        drawn.append(asyncio.run(sampler.generate(asked)))
        assert sampler._shares_prefixes
    for one, several in zip(*drawn, strict=True):
        assert torch.equal(one.tokens, several.tokens)
        assert torch.allclose(one.logp, several.logp, atol=1e-4)


def test_logits_that_are_not_finite_are_refused_and_located(random_model: Path) -> None:
    model: Any = load_model(str(random_model))
    sampler = LocalSampler(model, frozenset({-1}), 0)
    sampler.decodes_ahead = True
    sampling = SamplingParams(max_tokens=40, decode_rows=16)
    asyncio.run(sampler.generate(requests(sampling)[:4]))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.down_proj\.weight has NaN"):
        asyncio.run(sampler.generate(requests(sampling)[:4]))


def test_a_text_that_only_decoding_makes_infinite_is_refused(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tokens are drawn from finite logits; those computed from the cache are not."""
    sampler = LocalSampler(load_model(str(random_model)), frozenset({-1}), 0)
    sampler.decodes_ahead = True
    sampling = SamplingParams(max_tokens=40, decode_rows=16)
    asyncio.run(sampler.generate(requests(sampling)[:4]))
    step = cuda_graphs.SharedPrefixCache.step

    def overflowing(cache: Any, token: Tensor, position: Tensor) -> Tensor:
        return step(cache, token, position) + torch.inf

    monkeypatch.setattr(cuda_graphs.SharedPrefixCache, "step", overflowing)
    with pytest.raises(NumericsError, match="not finite while decoding, and are when the text is read again"):
        asyncio.run(sampler.generate(requests(sampling)[:4]))


def test_a_model_that_no_graph_can_hold_is_decoded_kernel_by_kernel(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is told, and the completions are the same."""

    tried: list[str] = []

    def refuse(work: object, device: torch.device) -> None:
        tried.append(str(device))
        raise cuda_graphs.CaptureError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "capture_graph", refuse)
    init = cuda_graphs.DecodeAhead.__init__

    def capturing(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.captures = not getattr(self.cache.model, cuda_graphs._REFUSED, False)

    sampling = SamplingParams(max_tokens=20, decode_rows=16)
    short = [replace(r, max_tokens=20) for r in requests(sampling)[:8]]
    sampler = LocalSampler(load_model(str(random_model)), frozenset({7}), 0)
    expected = asyncio.run(sampler.generate(short))
    monkeypatch.setattr(cuda_graphs.DecodeAhead, "__init__", capturing)
    sampler.decodes_ahead = True
    with pytest.warns(
        UserWarning, match=r"LlamaForCausalLM cannot be decoded by CUDA graphs \(operation not permitted"
    ):
        drawn = asyncio.run(sampler.generate(short))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(expected, drawn, strict=True))
    assert tried == ["cpu"]  # once, though rows have left since
