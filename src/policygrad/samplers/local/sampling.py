"""From logits to a token and its log-probability, with random numbers that belong to the completion, not to the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from policygrad.errors import NumericsError
from policygrad.models.loading import at_least_float32
from policygrad.samplers.base import SamplingParams

# Keys of many generators at once: numpy's `SeedSequence(key).generate_state(2, uint64)`, for all keys in one go.
#
# The algorithm is O'Neill's seed_seq as numpy documents it (NEP 19, numpy.random.SeedSequence), whose output numpy promises
# to keep.

_Words = NDArray[np.uint32]
_BITS = 2**32 - 1
_POOL = 4
_INIT_A, _MULT_A, _INIT_B, _MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R = 0xCA01F9DD, 0x4973F715


def _folded(x: _Words) -> _Words:
    found: _Words = x ^ x >> np.uint32(16)
    return found


class _Hash:
    """A hash whose constant moves on with each use."""

    def __init__(self, init: int, mult: int) -> None:
        self.constant, self.mult = init, mult

    def __call__(self, x: _Words) -> _Words:
        x = x ^ np.uint32(self.constant)
        self.constant = self.constant * self.mult & _BITS
        x = x * np.uint32(self.constant)
        return _folded(x)


def _mix(x: _Words, y: _Words) -> _Words:
    return _folded(x * np.uint32(_MIX_L) - y * np.uint32(_MIX_R))


def _words(key: Sequence[int]) -> tuple[int, ...]:
    """Each number in words of 32 bits, the lowest first, at least one."""
    if min(key, default=0) < 0:
        raise ValueError(f"a key is made of numbers that are not negative, not {tuple(key)}")
    return tuple(word for x in key for word in (x >> s & _BITS for s in range(0, max(1, x.bit_length()), 32)))


def derive_seeds(keys: Sequence[tuple[int, ...]]) -> NDArray[np.uint64]:
    """[len(keys), 2]: what Philox takes as its key."""
    words = [_words(key) for key in keys]
    found = np.empty((len(keys), 2), dtype=np.uint64)
    for size in {len(w) for w in words}:
        rows = [i for i, w in enumerate(words) if len(w) == size]
        entropy = np.array([words[i] for i in rows], dtype=np.uint32).reshape(len(rows), size).T
        found[rows] = _seeded(entropy)
    return found


def _seeded(entropy: _Words) -> NDArray[np.uint64]:
    """[words, N] to [N, 2]."""
    hashed, nothing = _Hash(_INIT_A, _MULT_A), np.zeros(entropy.shape[1], dtype=np.uint32)
    pool = [hashed(entropy[i] if i < len(entropy) else nothing) for i in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mix(pool[target], hashed(pool[source]))
    for more in entropy[_POOL:]:
        pool = [_mix(x, hashed(more)) for x in pool]
    state = _Hash(_INIT_B, _MULT_B)
    low0, high0, low1, high1 = (state(x).astype(np.uint64) for x in pool)
    shift = np.uint64(32)
    return np.stack([high0 << shift | low0, high1 << shift | low1], 1)


_BELOW_ONE = 1 - 2**-40  # keeps u·total below the total after rounding, so that no token of probability 0 is ever drawn
_BLOCK = 64
"""Tokens of a vocabulary that are summed at a time."""


def philox_uniforms(keys: Sequence[tuple[int, ...]], n: int) -> Tensor:
    """[len(keys), n] float64 in [0, 1): row i from a counter-based generator keyed by keys[i], whatever else is drawn.

    The numbers are those of numpy's `Generator(Philox(SeedSequence(keys[i])))`, one object set to each row's state instead of many.
    """
    philox = np.random.Philox(key=0)
    generator, state = np.random.Generator(philox), philox.state
    found = np.empty((len(keys), n))
    for row, seed in zip(found, derive_seeds(keys), strict=True):
        state["state"]["key"] = seed
        philox.state = state
        generator.random(out=row)
    return torch.from_numpy(found)


def log_probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """[N, V] nats of the distribution that is sampled: temperature, then top-k, then top-p, renormalised.

    Temperature 0 puts all probability on the largest logit.
    """
    logits = at_least_float32(logits)
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter_(-1, best, 0.0)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.top_k:
        k = min(sampling.top_k, logits.shape[-1])
        logits = logits.masked_fill(logits < logits.topk(k, -1).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        probability = ordered.softmax(-1)
        outside = probability.cumsum(-1) - probability >= sampling.top_p  # the token that crosses top_p stays
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    return logits.log_softmax(-1)


def sample_tokens(logits: Tensor, u: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """(token [N], logp [N]) by inverting the cumulative distribution at u [N]: one number per token, on any device.

    Sums are in float64, so that devices differ where u is within the rounding of a probability of a token's boundary, not of a sum.
    """
    if sampling.temperature == 0 or sampling.is_truncated:
        logits = log_probabilities(logits, sampling)
    else:
        logits = at_least_float32(logits)
        if sampling.temperature != 1:
            logits = logits / sampling.temperature
    largest = logits.amax(-1, keepdim=True)
    token, total = _invert((logits - largest).exp_(), u.to(logits.device)[:, None] * _BELOW_ONE)
    logp = logits.gather(-1, token).double() - largest - total.log()
    return token.squeeze(1), logp.to(logits.dtype).squeeze(1)


def _invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The first token [N, 1] whose cumulative weight is above u [N, 1] times the total, and the total [N, 1] in float64.

    A wide vocabulary is summed by blocks, and only the block that the token is in is cumulated: one pass over all weights.
    """
    size = weights.shape[1]
    if size <= 8 * _BLOCK:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True), cumulative[:, -1:]
    whole = size - size % _BLOCK
    sums = weights[:, :whole].view(len(weights), -1, _BLOCK).sum(-1, dtype=torch.float64)
    rest = weights[:, whole:].sum(-1, dtype=torch.float64, keepdim=True)
    cumulative = torch.cat([sums, rest], 1).cumsum(-1)
    total = cumulative[:, -1:]
    block = torch.searchsorted(cumulative, u * total, right=True)
    before = nn.functional.pad(cumulative, (1, 0)).gather(1, block)
    places = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    within = weights.gather(1, places.clamp(max=size - 1)).masked_fill_(places >= size, 0)
    inner = within.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(inner, u * total - before, right=True)
    last = torch.searchsorted(inner, inner[:, -1:].contiguous())  # where a block's two sums differ in their last bit
    return block * _BLOCK + torch.minimum(found, last), total


# Whether a distribution can be drawn from, before it is: on a GPU a token that does not exist ends the process.


def check_finite_logits(
    logits: Tensor, sampling: SamplingParams, model: nn.Module, text: Callable[[int], Tensor]
) -> None:
    """Refuses logits [N, V] that are no distribution: NaN or +∞ among them, or nothing but −∞.

    A row's largest logit tells: NaN and +∞ come through the maximum, and where it is finite a softmax is one. text: the ids [n]
    that a row's logits are of; the model reads them once more to find where the first bad number appears.

    Raises:
        NumericsError: with the weight or the layer, or the temperature that is too small for the logits.
    """
    best = at_least_float32(logits.amax(-1))
    scaled = best / sampling.temperature if sampling.temperature else best
    if bool(scaled.isfinite().all()):
        return
    if bool(best.isfinite().all()):
        raise NumericsError(
            f"temperature {sampling.temperature:g} divides logits of up to {float(best.abs().max()):.3g} beyond what {best.dtype} "
            "can hold: raise --temperature; 0 is greedy, where that is allowed"
        )
    row = int((~best.isfinite()).nonzero()[0])
    raise NumericsError(
        f"the model's logits are not finite ({nonfinite_kind(logits[row])}), so nothing can be sampled: {find_nonfinite_layer(model, text(row))}"
    )


def find_nonfinite_layer(model: nn.Module, ids: Tensor) -> str:
    """In words, where the first number that is not finite appears: in a weight, or in the output of a module that reads ids [n]."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if _bad(weight):
            count = int((~weight.isfinite()).sum())
            return (
                f"the weight {name} has {nonfinite_kind(weight)} in {count} of its {weight.numel()} numbers: take another model, or an "
                "earlier checkpoint with a lower --lr"
            )
    device = next(model.parameters()).device
    with torch.no_grad(), trace_nonfinite(model) as found:
        model(input_ids=ids[None].to(device), use_cache=False)
    where = (
        f"{found[0]} is the first layer whose output is not"
        if found
        else "reading the text once more all layers' outputs are"
    )
    return f"the weights are finite, and {where}: learner.dtype fp32 has room for larger numbers"


@contextmanager
def trace_nonfinite(model: nn.Module) -> Iterator[list[str]]:
    """Gathers the modules whose outputs are not finite, in the order in which they end: the first has finite inputs from inside."""
    found: list[str] = []

    def hook(name: str, module: nn.Module) -> Callable[..., None]:
        def look(_: nn.Module, inputs: object, output: object) -> None:
            outputs = output if isinstance(output, tuple | list) else [output]
            if any(isinstance(one, Tensor) and _bad(one) for one in outputs):
                found.append(f"{name or 'the model'} ({type(module).__name__})")

        return look

    handles = [module.register_forward_hook(hook(name, module)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def nonfinite_kind(values: Tensor) -> str:
    """NaN, or which infinity."""
    return "NaN" if bool(values.isnan().any()) else "+inf" if bool(values.isposinf().any()) else "-inf"


def _bad(values: Tensor) -> bool:
    """Masks are −∞ on purpose; what is computed has no infinity."""
    return values.is_floating_point() and bool(values.isnan().any() or values.isposinf().any())
