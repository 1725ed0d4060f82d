"""Attention in plain operations is torch's math kernel to the bit, and no other thread's business."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from policygrad.models.replica import PlainAttention


def attend(heads: int = 4, masked: str = "causal") -> Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 33, 8, generator=generator) for h in (4, heads, heads))
    added = torch.randn(2, 1, 33, 33, generator=generator)
    mask = {"causal": None, "added": added, "boolean": (added > 0) | torch.eye(33, dtype=torch.bool)}[masked]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=0.3, enable_gqa=heads < 4)


@pytest.mark.parametrize("masked", ["causal", "added", "boolean"])
@pytest.mark.parametrize("heads", [4, 2])
def test_plain_attention_is_the_math_kernel_in_this_thread_only(heads: int, masked: str) -> None:
    fused, beside = attend(heads, masked), list[Tensor]()
    with sdpa_kernel(SDPBackend.MATH):
        math = attend(heads, masked)
    assert not torch.equal(fused, math)  # otherwise this would test nothing
    with PlainAttention():
        assert torch.equal(attend(heads, masked), math)
        thread = threading.Thread(target=lambda: beside.append(attend(heads, masked)))
        thread.start()
        thread.join()
    assert torch.equal(beside[0], fused)
    assert torch.equal(attend(heads, masked), fused)
