"""Mixtures: what the terms that take a share of the objective leave to the policy's."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from policygrad.core.protocols import Additive


def rest(terms: Iterable[Additive]) -> float:
    """1 − Σ `Additive.mixture`: 1 where no term has one."""
    return 1 - sum(term.mixture for term in terms)


def mixed(psi: Tensor, terms: Iterable[Additive]) -> Tensor:
    """[B, T] -> [B, T]: Ψ times what the terms leave."""
    left = rest(terms)
    return psi if left == 1 else left * psi


def told(terms: Iterable[Additive]) -> str:
    """What Ψ is multiplied with, for the equation; nothing where no term has a share."""
    shared = [term for term in terms if term.mixture]
    if any(term.init() is not None for term in shared):
        return "; × (1 − μ)"
    return f"; × {rest(shared):g}" if shared else ""
