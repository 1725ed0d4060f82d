"""Training bf16 weights without fp32 masters: updates are computed in float32 and rounded up or down by chance.

Rounding to the nearest of bf16's numbers loses an update below 1/512 of its weight, always. Rounded up with a probability equal to
the distance from the number below, the weight is right on average (Gupta et al. 2015, arXiv 1502.02551; for bf16 weights
Zamirai et al. 2020, arXiv 2010.06192; for language models Ozkara et al. 2025, arXiv 2502.20566).

The noise of an update follows from its number, the parameter's name and the place in the parameter. So a resumed run, and one that
undoes a step, repeats it without any state, and several processes round their shards as one does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from policygrad.models.replica import Box, local_box, local_tensor, redistribute_like

_DROPPED_BITS = 16  # of float32's 32; bf16 is the upper half
_NOISE_BLOCK = 2**22
"""Numbers of a parameter, in rows, whose noise has a key of its own, so that a shard draws little beside its own."""


class BareWeights:
    """Weights without masters. Each has a float32 stand-in for one, which has memory only during its own step. Of a sharded weight
    it is sharded alike."""

    def make_master(self, parameter: Tensor) -> Tensor:
        """Return a stand-in, without memory."""
        local = torch.empty_like(local_tensor(parameter.detach()), dtype=torch.float32)
        master = redistribute_like(local, parameter) if hasattr(parameter, "to_local") else local
        local.untyped_storage().resize_(0)
        return master

    def fill(self, master: Tensor, parameter: Tensor) -> None:
        """Give the stand-in memory and the weight's value."""
        local = local_tensor(master)
        local.untyped_storage().resize_(local.nbytes)
        local.copy_(local_tensor(parameter.detach()))

    def write(self, parameter: Tensor, master: Tensor, key: str) -> None:
        """Round the stand-in's value into the weight, with the noise of a key, and free its memory."""
        local = local_tensor(master)
        noise = make_noise(key, master.shape, local_box(master), local.device)
        local_tensor(parameter.detach()).copy_(round_stochastically(local, noise))
        local.untyped_storage().resize_(0)


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """Return x in bf16: of its two neighbours there, each with the probability that makes the mean x.

    Args:
        x: float32.
        noise: int32, uniform over 0 … 65535. Added to the bits that are cut off, it carries into the others with that probability.
    """
    bits = x.contiguous().view(torch.int32) + noise
    return (bits & -(1 << _DROPPED_BITS)).view(torch.float32).bfloat16()


def make_noise(key: str, shape: Sequence[int], box: Box, device: torch.device) -> Tensor:
    """Return uniform integers of 16 bits for a box of a tensor of this shape; the same at a place for the same key."""
    if not shape:
        return make_noise(key, (1,), ((0,), (1,)), device)[0]
    (begin, *offset), (count, *size) = box
    rows, *columns = shape
    step = max(1, _NOISE_BLOCK // max(1, math.prod(columns)))
    parts = [torch.empty(0, *columns, dtype=torch.int32, device=device)]
    for first in range(begin // step * step, begin + count, step):
        seed = hashlib.blake2b((f"{key}/{first}" if first else key).encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(seed, "big") >> 1)
        drawn = (min(step, rows - first), *columns)
        noise = torch.randint(0, 1 << _DROPPED_BITS, drawn, generator=generator, dtype=torch.int32, device=device)
        parts.append(noise[max(0, begin - first) : begin + count - first])
    whole = torch.cat(parts)
    return whole[(slice(None), *(slice(at, at + n) for at, n in zip(offset, size, strict=True)))]
