"""A part that chooses among all tokens of an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import policygrad as pg


@dataclass(frozen=True)
class Loudest(pg.Correction):
    """× 2 on the half of the update's tokens with the largest |Ψ·log π_θ|."""

    needs: ClassVar[frozenset[str]] = frozenset({"selected"})
    select_needs: ClassVar[frozenset[str]] = frozenset({"logp"})
    weighs_sampler: ClassVar[bool] = False

    def select(self, out: pg.Forward | None, batch: pg.Batch, psi: Tensor) -> Tensor:
        assert out is not None
        loud = torch.where(batch.mask, (psi * out.logp).abs(), -1.0)
        return loud >= torch.where(batch.mask, loud, torch.nan).nanmedian()

    def __call__(self, batch: pg.Batch, psi: Tensor) -> Tensor:
        assert batch.selected is not None
        return 1.0 + batch.selected.to(psi)
