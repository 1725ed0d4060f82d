"""Parts that look at more than a token: one that chooses among all of an update, one that needs all of a group."""

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
    forward_needs: ClassVar[frozenset[str]] = frozenset({"logp"})
    corrects_sampler: ClassVar[bool] = False

    def select_tokens(self, out: pg.Forward | None, batch: pg.Batch, psi: Tensor) -> Tensor:
        assert out is not None
        loud = torch.where(batch.mask, (psi * out.logp).abs(), -1.0)
        return loud >= torch.where(batch.mask, loud, torch.nan).nanmedian()

    def __call__(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        assert batch.selected is not None
        return 1.0 + batch.selected.to(psi)


@dataclass(frozen=True)
class OfTheGroup(pg.Gate):
    """w = r over the mean r of the group's tokens, whatever their Ψ."""

    requires_token_ratio: ClassVar[bool] = True
    requires_full_groups: ClassVar[bool] = True

    def weight(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        same = (batch.group[:, None] == batch.group).to(ratio)
        count = same @ batch.mask.sum(1).to(ratio)
        return ratio / ((same @ torch.where(batch.mask, ratio, 0).sum(1)) / count.clamp(min=1))[:, None]

    def value(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return self.weight(ratio, psi, batch) * psi
