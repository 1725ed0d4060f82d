"""Choose which beginnings of prompts are read once for several of them: instructions that all examples have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from policygrad.samplers.local.kv_cache import CALL_TOKENS

LEAST_LENGTH = 64
"""Tokens of a prompt below which nothing of it is looked for in others."""


def may_share(prompts: Sequence[Tensor]) -> bool:
    """Return whether prompts are long enough that reading common beginnings once could save a forward pass's time."""
    long = [len(prompt) for prompt in prompts if len(prompt) > LEAST_LENGTH]
    return len(long) > 1 and sum(long) - max(long) >= CALL_TOKENS


def plan_beginnings(prompts: Sequence[Tensor]) -> dict[int, tuple[int, ...]]:
    """Return for each prompt, by its id, the lengths of the beginnings to be read before it, shorter ones first; each is shared
    with other prompts, and that these do not read it again saves `CALL_TOKENS` tokens or more.

    Args:
        prompts: Token ids [n], each tensor once.
    """
    texts = {id(prompt): prompt.numpy() for prompt in prompts}
    # by their bytes, so that those that begin alike are neighbours
    order = sorted(texts, key=lambda key: texts[key].tobytes())
    common = [_common_length(texts[a], texts[b]) for a, b in pairwise(order)]
    result: dict[int, tuple[int, ...]] = dict.fromkeys(order, ())
    # runs of neighbours that have more in common than what was chosen for them: (first, last, chosen length)
    runs = [(0, len(order) - 1, 0)]
    while runs:
        first, last, depth = runs.pop()
        if last <= first:
            continue
        shared = min(common[first:last])
        # of each prompt at least one token is left, whose logits are wanted
        length = min(shared, *(len(texts[key]) - 1 for key in order[first : last + 1]))
        if length >= LEAST_LENGTH and (length - depth) * (last - first) >= CALL_TOKENS:
            for key in order[first : last + 1]:
                result[key] = (*result[key], length)
            depth = length
        begin = first
        for end in range(first, last):
            if common[end] <= shared:  # here the run divides
                runs.append((begin, end, depth))
                begin = end + 1
        runs.append((begin, last, depth))
    return result


def _common_length(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Return how many tokens two texts begin with alike."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
