"""Draws from a hash, for which there is no generator's state to save."""

from collections.abc import Sequence
from hashlib import sha256


def integer(text: str, bound: int) -> int:
    """In [0, bound), the same for the same text."""
    return int.from_bytes(sha256(text.encode()).digest()[:16], "big") % bound


def choose(salt: str, index: int, weights: Sequence[float]) -> int:
    """A place among the weights, each as often as its weight says; a pure function of salt and index."""
    point = integer(f"{salt}:{index}", 1 << 53) / (1 << 53) * sum(weights)
    for number, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return number
    return max(number for number, weight in enumerate(weights) if weight)
