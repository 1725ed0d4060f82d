"""Sample tokens and their log-probabilities from logits, with random numbers that depend on the completion, not on the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from policygrad.core.precision import move
from policygrad.errors import NumericsError
from policygrad.models.loading import at_least_float32
from policygrad.samplers.base import SamplingParams

_BELOW_ONE = {torch.float64: 1 - 2**-40, torch.float32: 1 - 2**-22}
"""Factor on u that keeps u·total below the total after rounding, so that no token of probability 0 is sampled."""
_BLOCK = 64  # tokens of a vocabulary that are summed at a time


def sample_tokens(
    logits: Tensor, u: Tensor, sampling: SamplingParams, *, kernels: bool = False
) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution at u: one random number per token, on any device.

    Cumulative sums are in float64 where the device has it, so devices differ only if u is within the rounding of a probability
    (not of a long sum) of a token's boundary. A large vocabulary is summed by blocks, and only the block with the token is
    cumulated: one pass over all weights.

    Args:
        logits: [N, V].
        u: [N] in [0, 1), in the device's most precise type.
        kernels: Use Triton's, where `draws_by_kernel`: one pass over the logits, and no copy of them.

    Returns:
        The tokens [N] and their log-probabilities [N] in nats.
    """
    if kernels and draws_by_kernel(logits, sampling):
        from policygrad.samplers.local.kernels import draw_tokens

        return draw_tokens(logits, u * _BELOW_ONE[u.dtype], sampling.temperature)
    if sampling.temperature == 0 or sampling.is_truncated:
        logits = log_probabilities(logits, sampling)
    else:
        logits = at_least_float32(logits)
        if sampling.temperature != 1:
            logits = logits / sampling.temperature
    largest = logits.amax(-1, keepdim=True)
    weights, u = (logits - largest).exp_(), move(u, logits.device)[:, None]
    size, wide = weights.shape[1], u.dtype
    u = u * _BELOW_ONE[wide]
    # the first token [N, 1] whose cumulative weight exceeds u [N, 1] times the total [N, 1]
    if size <= 8 * _BLOCK:
        cumulative = weights.cumsum(-1, dtype=wide)
        total = cumulative[:, -1:]
        token = torch.searchsorted(cumulative, u * total, right=True).clamp_(max=size - 1)  # NaN would give `size`
    else:
        split = size - size % _BLOCK
        # in the weights' precision: converting all of them first is slow
        sums = weights[:, :split].view(len(weights), -1, _BLOCK).sum(-1).to(wide)
        remainder = weights[:, split:].sum(-1, dtype=wide, keepdim=True)
        cumulative = torch.cat([sums, remainder], 1).cumsum(-1)
        total = cumulative[:, -1:]
        block = torch.searchsorted(cumulative, u * total, right=True).clamp_(max=cumulative.shape[1] - 1)  # likewise
        before = nn.functional.pad(cumulative, (1, 0)).gather(1, block)
        positions = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
        in_block = weights.gather(1, positions.clamp(max=size - 1)).masked_fill_(positions >= size, 0)
        inner = in_block.cumsum(-1, dtype=wide)
        offset = torch.searchsorted(inner, u * total - before, right=True)
        last = torch.searchsorted(inner, inner[:, -1:].contiguous())  # a block's two sums may differ in the last bit
        token = (block * _BLOCK + torch.minimum(offset, last)).clamp_(max=size - 1)
    logp = logits.gather(-1, token).to(wide) - largest - total.log()
    return token.squeeze(1), logp.to(logits.dtype).squeeze(1)


def draws_by_kernel(logits: Tensor, sampling: SamplingParams) -> bool:
    """Return whether Triton's kernel can draw from these logits. Its log-probability of a row that is no distribution is not
    finite."""
    is_plain = sampling.temperature > 0 and not sampling.is_truncated
    return is_plain and logits.dtype != torch.float64 and logits.shape[1] > 8 * _BLOCK


def log_probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return [N, V] nats of the sampled distribution: temperature, then top-k, then top-p, renormalised.

    Temperature 0 puts all probability on the largest logit.
    """
    logits = at_least_float32(logits)
    if sampling.temperature == 0:
        return torch.full_like(logits, -torch.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
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


def philox_uniforms(keys: Sequence[tuple[int, ...]], n: int) -> Tensor:
    """Return [len(keys), n] float64 in [0, 1): row i comes from a counter-based generator with key keys[i], independent of the
    rest.

    The numbers are those of numpy's `Generator(Philox(SeedSequence(keys[i])))`; one object is set to each row's state.
    """
    philox = np.random.Philox(key=0)
    generator, state = np.random.Generator(philox), philox.state
    numbers = np.empty((len(keys), n))
    for row, seed in zip(numbers, derive_seeds(keys), strict=True):
        state["state"]["key"] = seed
        philox.state = state
        generator.random(out=row)
    return torch.from_numpy(numbers)


# Seeds of many generators at once: numpy's `SeedSequence(key).generate_state(2, uint64)`, vectorised over keys.
#
# The algorithm is O'Neill's seed_seq as numpy documents it (NEP 19, numpy.random.SeedSequence); numpy promises to keep its output.

_Uint32 = NDArray[np.uint32]
_MASK32 = 2**32 - 1
_POOL_SIZE = 4
_INIT_A, _MULT_A, _INIT_B, _MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R = 0xCA01F9DD, 0x4973F715


def derive_seeds(keys: Sequence[tuple[int, ...]]) -> NDArray[np.uint64]:
    """Return [len(keys), 2], the Philox key of each tuple of non-negative integers."""
    if negative := [key for key in keys if min(key, default=0) < 0]:
        raise ValueError(f"a key consists of numbers that are not negative, not {tuple(negative[0])}")
    # each number as 32-bit words, lowest first, at least one
    split = [[x >> s & _MASK32 for x in key for s in range(0, max(1, x.bit_length()), 32)] for key in keys]
    seeds = np.empty((len(keys), 2), dtype=np.uint64)
    for size in {len(words) for words in split}:
        rows = [i for i, words in enumerate(split) if len(words) == size]
        entropy = np.zeros((max(size, _POOL_SIZE), len(rows)), dtype=np.uint32)  # [words, N]
        entropy[:size] = np.array([split[i] for i in rows], dtype=np.uint32).reshape(len(rows), size).T
        hash_input, hash_output = _Hash(_INIT_A, _MULT_A), _Hash(_INIT_B, _MULT_B)
        pool = [hash_input(word) for word in entropy[:_POOL_SIZE]]
        for source, target in permutations(range(_POOL_SIZE), 2):
            pool[target] = _mix(pool[target], hash_input(pool[source]))
        for word in entropy[_POOL_SIZE:]:
            pool = [_mix(x, hash_input(word)) for x in pool]
        low0, high0, low1, high1 = (hash_output(x).astype(np.uint64) for x in pool)
        shift = np.uint64(32)
        seeds[rows] = np.stack([high0 << shift | low0, high1 << shift | low1], 1)
    return seeds


class _Hash:
    """A hash function whose constant changes with each call."""

    def __init__(self, init: int, mult: int) -> None:
        self.constant, self.mult = init, mult

    def __call__(self, x: _Uint32) -> _Uint32:
        x = x ^ np.uint32(self.constant)
        self.constant = self.constant * self.mult & _MASK32
        x = x * np.uint32(self.constant)
        return _fold(x)


def _mix(x: _Uint32, y: _Uint32) -> _Uint32:
    return _fold(x * np.uint32(_MIX_L) - y * np.uint32(_MIX_R))


def _fold(x: _Uint32) -> _Uint32:
    folded: _Uint32 = x ^ x >> np.uint32(16)
    return folded


# Refuse logits that are no distribution before sampling: on a GPU an invalid token kills the process.


def check_finite_logits(
    logits: Tensor, sampling: SamplingParams, model: nn.Module, read_ids: Callable[[int], Tensor]
) -> None:
    """Refuse logits [N, V] with NaN or +∞, or with nothing but −∞.

    A row's maximum tells: NaN and +∞ propagate to it, and where it is finite a softmax is a distribution.

    Args:
        read_ids: Returns the ids [n] that a row's logits belong to; the model reads them again to find the first bad number.

    Raises:
        NumericsError: Names the weight or the layer, or the temperature that is too small for the logits.
    """
    best = at_least_float32(logits.amax(-1))
    scaled = best / sampling.temperature if sampling.temperature else best
    if bool(scaled.isfinite().all()):
        return
    if bool(best.isfinite().all()):
        raise NumericsError(
            f"temperature {sampling.temperature:g} divides logits of up to {float(best.abs().max()):.3g} beyond the range of "
            f"{best.dtype}. Raise --temperature; 0 is greedy, where that is allowed."
        )
    row = int((~best.isfinite()).nonzero()[0])
    raise NumericsError(
        f"the model's logits are not finite ({nonfinite_kind(logits[row])}), so nothing can be sampled: "
        f"{find_nonfinite_layer(model, read_ids(row))}"
    )


def find_nonfinite_layer(model: nn.Module, ids: Tensor) -> str:
    """Describe where the first non-finite number appears: in a weight, or in the output of a module that reads ids [n]."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if _has_nan_or_inf(weight):
            count = int((~weight.isfinite()).sum())
            return (
                f"the weight {name} has {nonfinite_kind(weight)} in {count} of its {weight.numel()} numbers. Use another model, or "
                "an earlier checkpoint with a lower --lr."
            )
    # a module finishes after its submodules: those of the first one with such an output have finite outputs
    first = list[str]()

    def check(name: str, module: nn.Module, inputs: object, output: object) -> None:
        outputs = output if isinstance(output, tuple | list) else [output]
        if not first and any(isinstance(x, Tensor) and _has_nan_or_inf(x) for x in outputs):
            first.append(f"{name or 'the model'} ({type(module).__name__})")

    handles = [module.register_forward_hook(partial(check, name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            model(input_ids=ids[None].to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    where = "all layers' outputs are when the text is read again"
    if first:
        where = f"{first[0]} is the first layer whose output is not"
    return f"the weights are finite, and {where}. learner.dtype=fp32 has a larger range."


def nonfinite_kind(values: Tensor) -> str:
    """Return NaN, +inf or -inf."""
    return "NaN" if bool(values.isnan().any()) else "+inf" if bool(values.isposinf().any()) else "-inf"


def _has_nan_or_inf(values: Tensor) -> bool:
    """Ignore −∞, which masks contain on purpose."""
    return values.is_floating_point() and bool(values.isnan().any() or values.isposinf().any())
