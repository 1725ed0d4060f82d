"""Floating-point formats by name, and the one that sums are taken in."""

from __future__ import annotations

import os

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"
"""oneDNN's variable for how many compiled operations it keeps, 1024 without it; and how many are enough."""


def keep_few_primitives() -> None:
    """oneDNN compiles an operation for every shape that it meets, in bfloat16 on a CPU, and micro-batches have ever new ones:
    400 of the 1,900 MiB of a run, which takes as long without. It reads the variable at its first operation; one's own stays."""
    os.environ.setdefault(*PRIMITIVES)


def at_least_float32(x: Tensor) -> Tensor:
    """bfloat16 and float16 in float32; float32 and float64 as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
