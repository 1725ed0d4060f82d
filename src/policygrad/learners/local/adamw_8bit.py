"""AdamW with moments in 8 bits, in blocks of 256 numbers that share a scale (Dettmers et al. 2021, arXiv 2110.02861).

A number is stored as one of 256 values, which are dense near the block's largest and reach down to 3e-7 of it (section 2 there,
dynamic quantisation). Of the second moment the square root is stored, which AdamW divides by: so the values reach down to 1e-13 of
the block's largest. It is rounded up to the smallest value rather than to 0, as a quotient by 0 would be a step without bound.

Blocks lie within a row. So a shard of rows has its own blocks, and any number of processes computes and saves the same numbers.
bitsandbytes, which has this optimizer too, numbers its blocks through a whole tensor and takes no sharded one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.learners.config import OptimizerConfig
from policygrad.learners.local.optimizer import make_adamw
from policygrad.models.replica import local_tensor, redistribute_like, redistribute_rows
from policygrad.planning.model_sizes import MOMENT_BLOCK as BLOCK

MIN_NUMBERS = 4096
"""Smaller tensors, and vectors, keep their moments in float32, as in the paper's implementation: they save nothing."""
CHUNK = 2**24  # numbers that are computed at once in float32
_DECADES = 7
Moment = tuple[Tensor, Tensor]  # codes [R, C] in uint8, and the scales [R, blocks] of a row


def build_adamw_8bit(
    model: nn.Module, masters: Mapping[str, Tensor], config: OptimizerConfig, lr: float
) -> list[torch.optim.Optimizer]:
    """Return AdamW with moments in 8 bits on large tensors, and in float32 on small ones, if there are some."""
    large = [m for m in masters.values() if is_stored_in_8_bits(m)]
    small = [m for m in masters.values() if not is_stored_in_8_bits(m)]
    rules: list[torch.optim.Optimizer] = [AdamW8bit(large, config, lr)] if large else []
    return [*rules, *([make_adamw(small, config, lr)] if small else [])]


def is_stored_in_8_bits(x: Tensor) -> bool:
    """Return whether a tensor's moments are stored in 8 bits; one whose rows are not in order in memory has no blocks."""
    return x.ndim >= 2 and x.numel() >= MIN_NUMBERS and local_tensor(x.detach()).is_contiguous()


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), whose moments are in 8 bits between two steps."""

    def __init__(self, params: list[Tensor], config: OptimizerConfig, lr: float) -> None:
        defaults = {"lr": lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
        super().__init__(params, defaults)

    @staticmethod
    def shape_of(key: str, p: Tensor) -> torch.Size:
        """Return the shape of a tensor of a parameter's state."""
        blocks = math.ceil(math.prod(p.shape[1:]) / BLOCK)
        return torch.Size((p.shape[0], blocks)) if key.endswith("_scale") else p.shape

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state |= _make_state(p)
        state["step"] += 1
        (beta1, beta2), steps, lr = group["betas"], int(state["step"]), group["lr"]
        correction1, correction2 = 1 - beta1**steps, math.sqrt(1 - beta2**steps)
        weight = _as_rows(local_tensor(p.detach()))
        gradient = local_tensor(p.grad).reshape(weight.shape)  # type: ignore[arg-type]
        average, root = ((_as_rows(local_tensor(state[n])), local_tensor(state[f"{n}_scale"])) for n in _MOMENTS)
        weight.mul_(1 - lr * group["weight_decay"])
        for rows in _chunk_rows(weight):
            g = gradient[rows]
            m = dequantise((average[0][rows], average[1][rows]), signed_code(g.device), g.dtype).lerp_(g, 1 - beta1)
            v = dequantise((root[0][rows], root[1][rows]), unsigned_code(g.device), g.dtype).square_()
            r = v.mul_(beta2).addcmul_(g, g, value=1 - beta2).sqrt_()
            weight[rows].addcdiv_(m, (r / correction2).add_(group["eps"]), value=-lr / correction1)
            for (codes, scales), new in ((average, quantise(m, signed_code(g.device))), (root, quantise_root(r))):
                codes[rows], scales[rows] = new


_MOMENTS = ("exp_avg", "root_exp_avg_sq")


def _make_state(p: Tensor) -> dict[str, Tensor]:
    """Return moments of 0, placed as the parameter is, and a counter on the CPU."""
    local, state = local_tensor(p.detach()), {"step": torch.tensor(0.0)}
    for name, code in zip(_MOMENTS, (signed_code(p.device), unsigned_code(p.device)), strict=True):
        zero = int((code == 0).nonzero())
        state[name] = redistribute_like(torch.full_like(local, zero, dtype=torch.uint8), p)
        scales = torch.zeros(len(local), AdamW8bit.shape_of("_scale", p)[1], device=local.device)
        state[f"{name}_scale"] = redistribute_rows(scales, p)
    return state


def _as_rows(x: Tensor) -> Tensor:
    """View a tensor [R, ...] as [R, C]."""
    return x.view(len(x), math.prod(x.shape[1:]))


def _chunk_rows(x: Tensor) -> Iterator[slice]:
    """Iterate over slices of rows with at most `CHUNK` numbers, or one row."""
    number = max(1, CHUNK // x.shape[1])
    return (slice(at, at + number) for at in range(0, len(x), number))


def quantise(x: Tensor, code: Tensor) -> Moment:
    """Return the code's nearest values [R, C], by number, and each block's largest size [R, blocks]."""
    rows, columns = x.shape
    blocks = math.ceil(columns / BLOCK)
    padded = nn.functional.pad(x.float(), (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    scales = padded.abs().amax(2)
    relative = padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]
    codes = torch.bucketize(relative, (code[1:] + code[:-1]) / 2, out_int32=True)
    return codes.to(torch.uint8).view(rows, -1)[:, :columns], scales


def quantise_root(x: Tensor) -> Moment:
    """Quantise numbers that are not negative; one that is not 0 does not become 0."""
    codes, scales = quantise(x, unsigned_code(x.device))
    return codes.where((codes > 0) | (x == 0), 1), scales


def dequantise(moment: Moment, code: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [R, C]."""
    codes, scales = moment
    each = scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return (code[codes.int()] * each).to(dtype)


@cache
def signed_code(device: torch.device) -> Tensor:
    """Return [256] the values of a signed number, in order: a sign, a decade, and what is left of 7 bits for the fraction."""
    sizes = _list_sizes(_DECADES - 1)
    return torch.tensor(sorted([-x for x in sizes] + [0.0, *sizes, 1.0]), device=device)


@cache
def unsigned_code(device: torch.device) -> Tensor:
    """Return [256] the values of a number that is not negative, in order: one bit more for the fraction than a signed one."""
    return torch.tensor(sorted([0.0, *_list_sizes(_DECADES), 1.0]), device=device)


def _list_sizes(bits: int) -> list[float]:
    """Return the middles of equal parts of each decade below 1: 2^bits parts of the first, half as many of each that follows."""
    return [
        10.0**-decade * (0.1 + 0.9 * (part + 0.5) / 2 ** (bits - decade))
        for decade in range(_DECADES)
        for part in range(2 ** (bits - decade))
    ]
