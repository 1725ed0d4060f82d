"""Attention in plain operations, where the fused kernels have no forward mode, no double backward and no gradients in bulk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PlainAttention(TorchFunctionMode):
    """Inside, in this thread alone, `scaled_dot_product_attention` is what `sdpa_kernel(SDPBackend.MATH)` makes of it.

    That one switches the whole process: a sampler in another thread would compute in another order too, or not, as it happens.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _plain(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _plain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """As `scaled_dot_product_attention`. What it hands a Boolean mask to adds it to the scores, as 0 and −∞."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
    found: Tensor = torch._scaled_dot_product_attention_math(query, key, value, attn_mask, *args, **kwargs)[0]
    return found
