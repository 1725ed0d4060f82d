"""Abilities of torch's devices, by name: cpu, cuda, cuda:1, xpu (Intel), mps (Apple)."""

from __future__ import annotations

import torch

from policygrad.errors import RunError


def choose_device() -> str:
    """Return the device that `auto` stands for. Apple's must be named: it was not tested, and sums less exactly."""
    return next((kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()), "cpu")


def pick_device(name: str) -> str:
    """Return the device; auto = the machine's GPU if there is one. Raises RunError if this machine has no such device."""
    if name == "auto":
        return choose_device()
    try:
        torch.empty(1, device=name).tolist()  # reading fails on the meta device
    except (RuntimeError, AssertionError) as error:
        raise RunError(
            f"learner.device={name!r} cannot be used here: {str(error).splitlines()[0]}. `policygrad doctor` shows the devices."
        ) from error
    return name


def multiplies_in_bf16(device: str) -> bool:
    """Return whether a device has instructions for bfloat16. False for a CPU, where it pays for large models alone, and for Apple's
    GPUs, of which only the newer ones have them."""
    kind = device.partition(":")[0]
    if kind == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return kind == "xpu" and torch.xpu.is_available() and torch.xpu.is_bf16_supported()


def synchronize(device: str) -> None:
    """Wait until a device has done its work."""
    if device != "cpu":
        torch.accelerator.synchronize(torch.device(device))
