"""Choosing among all tokens of an update: what the parts with a `select` have in common.

`select` is asked once per update, under the policy as it is then, and what it says is `Batch.selected`, whatever the update is
split into. A choice depends on numbers alone, never on the order of the tokens: what is equal is chosen together,
except by `largest`, which takes an exact number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch, Forward, required
from policygrad.errors import ConfigError

SELECTED = frozenset({"selected"})


def check_share(part: object, share: float) -> None:
    """Raises ConfigError unless it is a share of something."""
    if not 0 < share <= 1:
        raise ConfigError(
            f"{type(part).__name__}.share must be above 0 and at most 1, not {share}: a share of the tokens"
        )


def chosen(batch: Batch, part: object) -> Tensor:
    """[B, T] bool; what `part` has selected."""
    return required(batch.selected, part, "selected")


def policy_now(out: Forward | None, part: object, name: str = "logp") -> Tensor:
    """A field of the policy's forward pass as it is now [B, T]."""
    value = None if out is None else getattr(out, name)
    if value is None:
        raise ConfigError(
            f"{type(part).__name__} chooses by the {name} of the policy as it is now, and the forward pass has none: give "
            f"`surrogate` a policygrad.Forward with {name} (a learner does)"
        )
    return value  # type: ignore[no-any-return]


def highest(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """[B, T] bool; the `count` largest of x on the mask, and what equals the least of them."""
    if not bool(mask.any()):
        return mask
    return mask & (x >= x[mask].topk(min(count, int(mask.sum()))).values[-1])


def largest(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """Choose exactly `count` of the largest x on the mask, or all of it where it has fewer: [B, T] bool. Of equals, the first."""
    order = x[mask].sort(descending=True, stable=True).indices
    among = torch.zeros_like(x[mask], dtype=torch.bool)
    among[order[:count]] = True
    return torch.zeros_like(mask).masked_scatter(mask, among)


def covariance(logp: Tensor, psi: Tensor, mask: Tensor) -> Tensor:
    """(log π_θ − mean log π_θ)(Ψ − mean Ψ) [B, T], means over all tokens: by how much each makes the entropy fall.

    Source: Cui et al. 2025, arXiv:2505.22617, sec. 4.
    """
    return ragged.masked((logp - ragged.mean(logp, mask)) * (psi - ragged.mean(psi, mask)), mask)
