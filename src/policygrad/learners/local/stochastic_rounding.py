"""Training bf16 weights without fp32 masters: updates are computed in float32 and rounded up or down by chance.

Rounding to the nearest of bf16's numbers loses an update below 1/512 of its weight, always. Rounded up with a probability equal to
the distance from the number below, the weight is right on average (Gupta et al. 2015, arXiv 1502.02551; for bf16 weights
Zamirai et al. 2020, arXiv 2010.06192; for language models Ozkara et al. 2025, arXiv 2502.20566).

The noise of an update follows from its number and the parameter's name. So a resumed run, and one that undoes a step, repeats it
without any state.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_DROPPED_BITS = 16  # of float32's 32; bf16 is the upper half


class BareWeights:
    """Weights without masters. Each has a float32 stand-in for one, which has memory only during its own step."""

    def make_master(self, parameter: Tensor) -> Tensor:
        """Return a stand-in, without memory."""
        master = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        master.untyped_storage().resize_(0)
        return master

    def fill(self, master: Tensor, parameter: Tensor) -> None:
        """Give the stand-in memory and the weight's value."""
        master.untyped_storage().resize_(master.nbytes)
        master.copy_(parameter)

    def write(self, parameter: Tensor, master: Tensor, key: str) -> None:
        """Round the stand-in's value into the weight, with the noise of a key, and free its memory."""
        parameter.copy_(round_stochastically(master, make_noise(key, master)))
        master.untyped_storage().resize_(0)


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """Return x in bf16: of its two neighbours there, each with the probability that makes the mean x.

    Args:
        x: float32.
        noise: int32, uniform over 0 … 65535. Added to the bits that are cut off, it carries into the others with that probability.
    """
    bits = x.contiguous().view(torch.int32) + noise
    return (bits & -(1 << _DROPPED_BITS)).view(torch.float32).bfloat16()


def make_noise(key: str, like: Tensor) -> Tensor:
    """Return uniform integers of 16 bits in the shape of a tensor, on its device; the same for the same key."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
    generator = torch.Generator(like.device).manual_seed(seed)
    options = {"generator": generator, "dtype": torch.int32, "device": like.device}
    return torch.randint(0, 1 << _DROPPED_BITS, like.shape, **options)  # type: ignore[no-any-return, call-overload]
