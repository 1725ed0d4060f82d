"""Attention in plain operations, where the fused kernels have no forward mode, no double backward and no gradients in bulk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
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
            return torch._scaled_dot_product_attention_math(*args, **(kwargs or {}))[0]
        return func(*args, **(kwargs or {}))
