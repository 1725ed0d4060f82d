"""Keys of many generators at once: numpy's `SeedSequence(key).generate_state(2, uint64)`, for all keys in one go.

The algorithm is O'Neill's seed_seq as numpy documents it (NEP 19, numpy.random.SeedSequence), whose output numpy promises to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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


def seeds(keys: Sequence[tuple[int, ...]]) -> NDArray[np.uint64]:
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
