"""Log-probabilities and entropies from hidden states, without a table of tokens × vocabulary, by a hand-written gradient.

With z = W h / τ, p = softmax(z) and H = −Σ p log p, for a state h that predicts the tokens a_1, a_2, … (several texts may continue
from one state):

    ∂/∂z Σ g_i log p(a_i) = Σ g_i (1{a_i} − p)          ∂H/∂z = −p (log p + H)

Logits are computed for a chunk of states at a time, in one buffer that the next chunk reuses, and recomputed in the backward pass
except for the first chunks, whose p is cached (`MAX_CACHED`). If the gradient of log π is known beforehand (`expected`: an update
whose ratios are all 1), the forward pass computes the backward pass too, whose result is used if the actual gradient is the
expected one; then nothing is cached or recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from policygrad.core.batch import SamplingMask
from policygrad.models.loading import Float32Head, at_least_float32

BUFFER_CPU = 2**21  # elements of the logits buffer on a CPU: few enough for the processor's cache
BUFFER_ACCELERATOR = 2**27  # elements of the logits buffer on an accelerator, where a matrix product needs more of them
FUSED_HEADS = (nn.Linear, Float32Head)  # not their subclasses, which may compute something else
MAX_CACHED = 2**24  # probabilities cached for the backward pass, in elements (64 MiB)


@dataclass(frozen=True, eq=False)
class TokenPairs:
    """Pairs of a state and a token that it predicts, sorted by state."""

    index: Tensor  # [n] state, ascending
    tokens: Tensor  # [n]
    order: Tensor  # [n] the caller's index of each pair

    @classmethod
    def of(cls, index: Tensor, tokens: Tensor) -> TokenPairs:
        ordered, order = index.sort(stable=True)
        return cls(ordered, tokens[order], order)

    def chunks(self, states: int, size: int) -> Iterator[tuple[slice, slice]]:
        """Iterate over (states, pairs), `size` states at a time."""
        bounds = [*range(0, states, size), states]
        places = torch.searchsorted(self.index, torch.tensor(bounds, device=self.index.device)).tolist()
        for i in range(len(bounds) - 1):
            yield slice(bounds[i], bounds[i + 1]), slice(places[i], places[i + 1])

    def unsort(self, values: Tensor) -> Tensor:
        """Return [n] in the caller's order."""
        return torch.empty_like(values).index_copy_(0, self.order, values)


def fused_log_probability(
    states: Tensor,
    head: nn.Linear,
    index: Tensor,
    tokens: Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    expected: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log π [n] of `tokens` [n] at the states [u, H] given by `index` [n] and, if asked for, the entropy [n] (nats, with
    graph) and Σ π² [n] (without).

    Args:
        expected: [n] the gradient that log π will receive, if known.
        sampling_mask: Of the n tokens; log π and the statistics are those of the distribution over what it leaves.
    """
    if sampling_mask is not None:  # tokens with a common state may have different masks
        states, index = states.index_select(0, index), torch.arange(len(index), device=index.device)
    pairs = TokenPairs.of(index, tokens)
    hint = None if expected is None or entropy or not torch.is_grad_enabled() else expected[pairs.order]
    room = MAX_CACHED if hint is None and torch.is_grad_enabled() else 0
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    if type(head) is Float32Head:
        states, weight, bias = states.float(), weight.float(), None if bias is None else bias.float()
    logp, h, squares = _LogProbability.apply(  # type: ignore[no-untyped-call]
        states, weight, bias, pairs, temperature, entropy, sum_pi_squared, hint, room, sampling_mask
    )
    h, squares = (
        x.index_select(0, index) if is_needed else None for x, is_needed in ((h, entropy), (squares, sum_pi_squared))
    )
    return pairs.unsort(logp), h, squares


class _Logits:
    """Computes logits z of a chunk of states."""

    def __init__(
        self,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        sampling_mask: SamplingMask | None,
    ) -> None:
        """
        Args:
            sampling_mask: One token per state; None = every token is possible.
        """
        self.states, self.weight, self.bias, self.temperature = states, weight, bias, temperature
        self.sampling_mask = sampling_mask
        limit = BUFFER_CPU if states.device.type == "cpu" else BUFFER_ACCELERATOR
        self.size = max(1, min(len(states), max(16, limit // len(weight))))

    @cached_property
    def buffer(self) -> Tensor:
        return self.states.new_empty(self.size, len(self.weight))

    def __call__(self, which: slice, *, allocate: bool = False) -> Tensor:
        """Return [m, V] in float32 or better, which the caller may overwrite and, unless `allocate`, the next chunk does."""
        h = self.states[which]
        z = h @ self.weight.T if allocate else torch.mm(h, self.weight.T, out=self.buffer[: len(h)])
        z = at_least_float32(z)
        if self.bias is not None:
            z += self.bias
        if self.temperature != 1:
            z.div_(self.temperature)
        return z if self.sampling_mask is None else self.sampling_mask.apply_(z, which.start)


class _HeadGradient:
    """Accumulates the gradients of states, weight and bias chunk by chunk; None for those that need none."""

    def __init__(self, logits: _Logits, pairs: TokenPairs, needed: Sequence[bool]) -> None:
        self.logits, self.pairs = logits, pairs
        states, weight, bias = logits.states, logits.weight, logits.bias
        self.states = torch.empty_like(states) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=at_least_float32(weight[:0]).dtype) if needed[1] else None
        self.bias = (
            None if bias is None or not needed[2] else torch.zeros_like(bias, dtype=at_least_float32(bias).dtype)
        )

    def add(self, which: slice, pair: slice, p: Tensor, g: Tensor, g_entropy: Tensor | None = None) -> None:
        """Add a chunk: p [m, V], which is overwritten; g of the pairs; g_entropy [m] of the states."""
        at = self.pairs.index[pair] - which.start
        total = g.new_zeros(len(p)).index_add_(0, at, g)
        if g_entropy is None:
            dz = p.mul_(-total[:, None])
        else:
            logp = p.log().masked_fill_(p == 0, 0)
            h = -(p * logp).sum(-1, keepdim=True)
            dz = p.mul_(-total[:, None] - g_entropy[:, None] * (logp + h))
        dz.index_put_((at, self.pairs.tokens[pair]), g, accumulate=True)
        if self.logits.temperature != 1:
            dz /= self.logits.temperature
        if self.bias is not None:
            self.bias += dz.sum(0)
        dz, h = dz.to(self.logits.weight.dtype), self.logits.states[which]
        if self.states is not None:
            torch.mm(dz, self.logits.weight, out=self.states[which])
        if self.weight is not None:
            if self.weight.dtype == dz.dtype:
                self.weight.addmm_(dz.T, h)
            else:
                self.weight += dz.T @ h

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weight, bias = self.weight, self.bias
        return (
            self.states,
            None if weight is None else weight.to(self.logits.weight.dtype),
            None if bias is None or self.logits.bias is None else bias.to(self.logits.bias.dtype),
        )


def _softmax_(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return p, which overwrites z, and log Σ exp z [m]."""
    top = z.amax(-1, keepdim=True)
    total = z.sub_(top).exp_().sum(-1, keepdim=True)
    return z.div_(total), (top + total.log()).squeeze(1)


class _LogProbability(torch.autograd.Function):
    """(log π [n] in the order of the pairs, entropy [u] or empty, Σ π² [u] or empty)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pairs: TokenPairs,
        temperature: float,
        entropy: bool,
        sum_pi_squared: bool,
        expected: Tensor | None,
        room: int,
        sampling_mask: SamplingMask | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = _Logits(states, weight, bias, temperature, sampling_mask)
        gradient = None if expected is None else _HeadGradient(logits, pairs, ctx.needs_input_grad)
        dtype = at_least_float32(states[:0]).dtype
        logp = states.new_empty(len(pairs.index), dtype=dtype)
        h = states.new_empty(len(states) if entropy else 0, dtype=dtype)
        squares = states.new_empty(len(states) if sum_pi_squared else 0, dtype=dtype)
        cached = list[Tensor]()
        for which, pair in pairs.chunks(len(states), logits.size):
            room -= (which.stop - which.start) * len(weight)
            z, at = logits(which, allocate=room >= 0), pairs.index[pair] - which.start
            selected = z[at, pairs.tokens[pair]]
            p, log_total = _softmax_(z)
            logp[pair] = selected - log_total[at]
            if sum_pi_squared:
                squares[which] = torch.linalg.vecdot(p, p)
            if gradient is not None and expected is not None:
                gradient.add(which, pair, p, expected[pair])
            elif entropy:
                h[which] = -(p.log().masked_fill_(p == 0, 0).mul_(p)).sum(-1)
            if room >= 0:
                cached.append(p)
        ctx.pairs, ctx.temperature, ctx.expected, ctx.sampling_mask = pairs, temperature, expected, sampling_mask
        ctx.gradient, ctx.cached = gradient, cached
        ctx.save_for_backward(states, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares)
        return logp, h, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_entropy: Tensor | None, g_squares: None) -> tuple[Any, ...]:
        gradient, pairs = ctx.gradient, ctx.pairs
        states, weight, bias = ctx.saved_tensors
        if g is None:
            g = states.new_zeros(len(pairs.index), dtype=at_least_float32(states[:0]).dtype)
        if gradient is None or not torch.equal(g, ctx.expected):
            logits = _Logits(states, weight, bias, ctx.temperature, ctx.sampling_mask)
            gradient = _HeadGradient(logits, pairs, ctx.needs_input_grad)
            for i, (which, pair) in enumerate(pairs.chunks(len(states), logits.size)):
                p = ctx.cached[i] if i < len(ctx.cached) else _softmax_(logits(which))[0]
                gradient.add(which, pair, p, g[pair], None if g_entropy is None else g_entropy[which])
        ctx.gradient, ctx.cached = None, []  # both have been overwritten
        return (*gradient.gradients(), *[None] * 7)
