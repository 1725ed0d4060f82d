"""Floating-point formats by name, and the one that sums are taken in."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def at_least_float32(x: Tensor) -> Tensor:
    """bfloat16 and float16 in float32; float32 and float64 as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
