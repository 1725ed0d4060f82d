"""LEVER 1 where another term has a share: the policy's part of a mixture."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.core.protocols import Advantage
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class Scaled(Advantage):
    """Ψ ← factor·Ψ: the share of the policy's term where another one has the rest."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not (self.factor > 0 and math.isfinite(self.factor)):
            raise ConfigError(f"Scaled.factor must be greater than 0 and finite, not {self.factor}")

    @property
    def formula(self) -> str:
        return f"; × {self.factor:g}"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return self.factor * psi
