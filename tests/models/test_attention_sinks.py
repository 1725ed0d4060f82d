"""Attention with sinks by the fused kernel: what transformers computes with all scores written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from doubles.architectures import families
from policygrad.models.attention import SINKS_NAME, attend_with_sinks, short_windows
from policygrad.models.loading import load_model


def built(kind: str) -> Any:
    torch.manual_seed(0)
    family = next(f for f in families() if f.type == kind)
    return tf.AutoModelForCausalLM.from_config(family.config()).eval()


def write_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """As in the definition; mask [.., Q, K] is added."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * scale + mask).exp()
    return scores / (scores.sum(-1, keepdim=True) + sinks.exp()[:, None, None]) @ v


@pytest.mark.parametrize("queries", [1, 5])
def test_a_sink_takes_its_share_and_gives_nothing(queries: int) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, h, n, 4, dtype=torch.float64) for h, n in ((4, queries), (2, 5), (2, 5)))
    sinks = torch.randn(4, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, sinks)]
    causal = torch.ones(queries, 5, dtype=torch.bool).tril(5 - queries)
    hidden = causal.clone()
    hidden[..., 1] = False
    for visible, mask in ((causal, None), (hidden, hidden[None, None]), (hidden, "added")):
        if mask is None and queries == 1:
            continue  # the last token sees all: below, with a mask of it
        added = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)
        given = added[None, None] if isinstance(mask, str) else mask
        got = attend_with_sinks(q, k, v, given, sinks, 0.3)
        expected = write_out(q, k, v, added, sinks, 0.3)
        assert torch.allclose(got, expected, rtol=0, atol=1e-12)
        weight = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
        gradients = (torch.autograd.grad((weight * x).sum(), inputs) for x in (got, expected))
        for a, b in zip(*gradients, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_a_model_with_sinks_computes_the_same_with_fused_attention() -> None:
    """In one pass beyond its windows and token by token; other models keep what they have."""
    plain, model = built("gpt_oss"), load_model(built("gpt_oss"))
    assert plain.config._attn_implementation == "eager"
    assert model.config._attn_implementation == SINKS_NAME
    ids = torch.randint(3, 40, (2, 30))
    with torch.no_grad():
        expected = plain(input_ids=ids, use_cache=False).logits
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, expected, atol=1e-5)
        cache, steps = tf.DynamicCache(config=model.config), list[Tensor]()
        for i in range(30):
            steps.append(model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits)
        assert torch.allclose(torch.cat(steps, 1), expected, atol=1e-5)
    for kind in ("bloom", "mpt", "mamba"):
        assert load_model(built(kind)).config._attn_implementation == "eager"


def test_a_model_that_would_compute_something_else_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "policygrad.models.attention.attend", lambda module, query, *_, **__: (query.transpose(1, 2), None)
    )
    assert load_model(built("gpt_oss")).config._attn_implementation == "eager"


def test_windows_are_short_for_a_while() -> None:
    model = built("gemma3_text")
    before = [module.sliding_window for module in model.modules() if hasattr(module, "sliding_window")]
    with short_windows(model) as has_windows:
        assert has_windows
        assert model.config.sliding_window == 3
    assert [module.sliding_window for module in model.modules() if hasattr(module, "sliding_window")] == before
    assert model.config.sliding_window == 9
    with short_windows(built("llama")) as has_windows:
        assert not has_windows
