"""The precision of sums on a device: float64, or float32 where the device has no float64 (Apple's GPUs).

What is on the CPU is summed in float64 without asking; these functions are for tensors on the learner's or the sampler's device.
"""

from __future__ import annotations

import torch
from torch import Tensor

DEVICES_WITHOUT_FLOAT64 = {"mps"}


def widest_dtype(device: torch.device | str) -> torch.dtype:
    """Return the most precise floating type of a device."""
    return torch.float32 if torch.device(device).type in DEVICES_WITHOUT_FLOAT64 else torch.float64


def widen(x: Tensor) -> Tensor:
    """Return x in its device's most precise type."""
    return x.to(widest_dtype(x.device))


def move(x: Tensor, device: torch.device | str) -> Tensor:
    """Return x on a device, in float32 if it is in float64 and the device has none."""
    return x.to(device, widest_dtype(device)) if x.dtype == torch.float64 else x.to(device)
