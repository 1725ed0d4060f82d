"""From states to log π of tokens, and to the entropy, without a table of tokens × vocabulary: the gradient is written down.

With z = W h / τ, p = softmax(z) and H = −Σ p log p, for a state h that predicts the tokens a_1, a_2, … (several texts may go on
from one state):

    ∂/∂z Σ g_i log p(a_i) = Σ g_i (1{a_i} − p)          ∂H/∂z = −p (log p + H)

A chunk of states at a time: its logits live in one buffer that the next chunk takes over, and are computed once more on the
way back, but for the first chunks, whose p is kept (`MAX_CACHED`). Where the gradient to log π is known beforehand (`expected`: an
update whose ratios are all 1) none is kept or computed again: the way there does the way back as well, and what it found is used
if the gradient that comes is the one that was expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from policygrad.models.loading import at_least_float32

BUFFER_CPU = 2**21
"""Logits in a buffer, in elements: few enough to stay in a processor's cache."""
BUFFER_ACCELERATOR = 2**27
"""The same on an accelerator, where a matrix product needs more of them."""
MAX_CACHED = 2**24
"""Probabilities that wait for the way back, in elements; 64 MiB. What is beyond is computed again."""


@dataclass(frozen=True, eq=False)
class TokenPairs:
    """Which tokens [n] which states [u] predict, in the order of the states."""

    index: Tensor
    """[n] the state, ascending."""
    tokens: Tensor
    """[n]."""
    order: Tensor
    """[n] which of the caller's pairs stands here."""

    @classmethod
    def of(cls, index: Tensor, tokens: Tensor) -> TokenPairs:
        ordered, order = index.sort(stable=True)
        return cls(ordered, tokens[order], order)

    def chunks(self, states: int, size: int) -> Iterator[tuple[slice, slice]]:
        """(which states, which pairs), `size` states at a time."""
        bounds = [*range(0, states, size), states]
        places = torch.searchsorted(self.index, torch.tensor(bounds, device=self.index.device)).tolist()
        for i in range(len(bounds) - 1):
            yield slice(bounds[i], bounds[i + 1]), slice(places[i], places[i + 1])

    def unsort(self, values: Tensor) -> Tensor:
        """[n] in the caller's order."""
        return torch.empty_like(values).index_copy_(0, self.order, values)


def fused_log_probability(
    states: Tensor,
    head: nn.Linear,
    index: Tensor,
    tokens: Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    expected: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(log π [n] of `tokens` [n] at the states [u, H] that `index` [n] says, the entropy [n] there where it is asked for), in
    nats, with graph. expected: [n] the gradient that log π will be given, where it is known."""
    pairs = TokenPairs.of(index, tokens)
    hint = None if expected is None or entropy or not torch.is_grad_enabled() else expected[pairs.order]
    room = MAX_CACHED if hint is None and torch.is_grad_enabled() else 0
    logp, h = _LogProbability.apply(  # type: ignore[no-untyped-call]
        states, head.weight, head.bias, pairs, temperature, entropy, hint, room
    )
    return pairs.unsort(logp), h.index_select(0, index) if entropy else None


class _Logits:
    """z, a chunk at a time in one buffer, or in one of its own."""

    def __init__(self, states: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> None:
        self.states, self.weight, self.bias, self.temperature = states, weight, bias, temperature
        limit = BUFFER_CPU if states.device.type == "cpu" else BUFFER_ACCELERATOR
        self.size = min(len(states), max(16, limit // len(weight)))

    @cached_property
    def buffer(self) -> Tensor:
        return self.states.new_empty(self.size, len(self.weight))

    def __call__(self, which: slice, *, allocate: bool = False) -> Tensor:
        """[m, V] in float32 or better, to be written over; own: and not by the next chunk."""
        h = self.states[which]
        z = h @ self.weight.T if allocate else torch.mm(h, self.weight.T, out=self.buffer[: len(h)])
        z = at_least_float32(z)
        if self.bias is not None:
            z += self.bias
        return z.div_(self.temperature) if self.temperature != 1 else z


class _HeadGradient:
    """Gradients of states, weight and bias, chunk by chunk; None of what needs none."""

    def __init__(self, logits: _Logits, pairs: TokenPairs, needed: Sequence[bool]) -> None:
        self.logits, self.pairs = logits, pairs
        states, weight, bias = logits.states, logits.weight, logits.bias
        self.states = torch.empty_like(states) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=at_least_float32(weight[:0]).dtype) if needed[1] else None
        self.bias = (
            None if bias is None or not needed[2] else torch.zeros_like(bias, dtype=at_least_float32(bias).dtype)
        )

    def add(self, which: slice, pair: slice, p: Tensor, g: Tensor, g_entropy: Tensor | None = None) -> None:
        """p [m, V], which is written over; g of the pairs; g_entropy [m] of the states."""
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


def _softmax(z: Tensor) -> tuple[Tensor, Tensor]:
    """(p, which takes the place of z, log Σ exp z [m])."""
    top = z.amax(-1, keepdim=True)
    total = z.sub_(top).exp_().sum(-1, keepdim=True)
    return z.div_(total), (top + total.log()).squeeze(1)


def _entropy(p: Tensor) -> Tensor:
    """[m]."""
    return -(p.log().masked_fill_(p == 0, 0).mul_(p)).sum(-1)


class _LogProbability(torch.autograd.Function):
    """(log π [n] in the order of the pairs, entropy [u], empty where it is not asked for)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pairs: TokenPairs,
        temperature: float,
        entropy: bool,
        expected: Tensor | None,
        room: int,
    ) -> tuple[Tensor, Tensor]:
        logits = _Logits(states, weight, bias, temperature)
        back = None if expected is None else _HeadGradient(logits, pairs, ctx.needs_input_grad)
        kind = at_least_float32(states[:0]).dtype
        logp = states.new_empty(len(pairs.index), dtype=kind)
        h = states.new_empty(len(states) if entropy else 0, dtype=kind)
        cached = list[Tensor]()
        for which, pair in pairs.chunks(len(states), logits.size):
            room -= (which.stop - which.start) * len(weight)
            z, at = logits(which, allocate=room >= 0), pairs.index[pair] - which.start
            selected = z[at, pairs.tokens[pair]]
            p, level = _softmax(z)
            logp[pair] = selected - level[at]
            if back is not None and expected is not None:
                back.add(which, pair, p, expected[pair])
            elif entropy:
                h[which] = _entropy(p)
            if room >= 0:
                cached.append(p)
        ctx.pairs, ctx.temperature, ctx.expected, ctx.back, ctx.kept = pairs, temperature, expected, back, cached
        ctx.save_for_backward(states, weight, bias)
        ctx.set_materialize_grads(False)
        return logp, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_entropy: Tensor | None) -> tuple[Any, ...]:
        back, pairs = ctx.back, ctx.pairs
        states, weight, bias = ctx.saved_tensors
        if g is None:
            g = states.new_zeros(len(pairs.index), dtype=at_least_float32(states[:0]).dtype)
        if back is None or not torch.equal(g, ctx.expected):
            logits = _Logits(states, weight, bias, ctx.temperature)
            back = _HeadGradient(logits, pairs, ctx.needs_input_grad)
            for i, (which, pair) in enumerate(pairs.chunks(len(states), logits.size)):
                p = ctx.kept[i] if i < len(ctx.kept) else _softmax(logits(which))[0]
                back.add(which, pair, p, g[pair], None if g_entropy is None else g_entropy[which])
        ctx.back, ctx.kept = None, []  # both are written over
        return (*back.gradients(), None, None, None, None, None)
