"""Corrections that are masks: which tokens learn. They say nothing of a sampler that is not π_old."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from policygrad.core.batch import Batch, Forward, required
from policygrad.core.protocols import Correction
from policygrad.core.selection import SELECTED, check_share, chosen, highest, policy_now
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class HighEntropy(Correction):
    """× 1 at the share of tokens where the policy's entropy is highest, × 0 at all others; denominators stay those of all.

    The entropies are those of the policy as it is at each update, which costs a forward pass; of='old' takes those of π_old,
    from when the rollout was evaluated. Source: Wang et al. 2025 (80/20), arXiv:2506.01939, sec. 5.
    """

    share: float = 0.2
    of: Literal["current", "old"] = "current"
    weighs_sampler: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_share(self, self.share)
        if self.of not in ("current", "old"):
            raise ConfigError(
                f"HighEntropy.of must be 'current' (π_θ at each update) or 'old' (π_old), not {self.of!r}"
            )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return SELECTED | ({"entropy"} if self.of == "old" else frozenset())

    @property
    def select_needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"entropy"} if self.of == "current" else ())

    @property
    def formula(self) -> str:
        return f"× 1 at the {self.share:g} of tokens of highest entropy of {'π_θ' if self.of == 'current' else 'π_old'}, else 0"

    def select(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        """The tokens that learn: those at or above the quantile 1 − share."""
        entropy = required(batch.entropy, self, "entropy") if self.of == "old" else policy_now(out, self, "entropy")
        return highest(entropy, batch.mask, 1 + int(self.share * (int(batch.mask.sum()) - 1)))

    def __call__(self, batch: Batch, psi: Tensor) -> Tensor:
        return chosen(batch, self).to(psi.dtype)
