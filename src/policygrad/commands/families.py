"""The rows of the matrix by kind, so that many can be read: what they learn credit from, and how they look at old samples."""

from __future__ import annotations

from policygrad.algorithms import ALGORITHMS
from policygrad.core.algorithm import Algorithm
from policygrad.core.gates import Clip
from policygrad.core.ratios import Token
from policygrad.core.vine import Vine

FAMILIES = (
    "one sample at a time",
    "values of every token: a critic, or sampled",
    "samples of one prompt compared, on-policy",
    "samples of one prompt compared, a ratio per token, clipped",
    "samples of one prompt compared, a ratio per token, another gate",
    "samples of one prompt compared, a ratio per completion",
)


def family(a: Algorithm) -> str:
    """Which of them, by what it is composed of."""
    single, values, group, clipped, gated, completion = FAMILIES
    if a.critic is not None or any(link.samples_values or isinstance(link, Vine) for link in a.psi):
        return values
    if not any(link.group_statistic for link in a.psi):
        return single
    if a.ratio is None:
        return group
    if not isinstance(a.ratio, Token):
        return completion
    return clipped if isinstance(a.gate, Clip) else gated


def families() -> dict[str, list[str]]:
    """Family -> names of the matrix, in its order; none is empty."""
    found: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for name, a in ALGORITHMS.items():
        found[family(a)].append(name)
    return {name: members for name, members in found.items() if members}
