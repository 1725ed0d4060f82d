"""A file of a user's own: two parts, algorithms made of them, and what is neither."""

TEXT = '''
from dataclasses import dataclass, replace

import torch

import policygrad as pg


@dataclass(frozen=True)
class Tent(pg.Gate):
    """w falls along a line to 0 at r = 1 ± width."""

    width: float = 0.5
    """Where nothing is left."""
    sharp: bool = False

    @property
    def formula(self):
        return f"max(0, 1 − |r − 1|/{self.width:g})"

    def weight(self, ratio, psi, batch):
        return (1 - (ratio - 1).abs() / self.width).clamp(min=0)

    def value(self, ratio, psi, batch):
        return ratio * psi


@dataclass(frozen=True)
class Asym(pg.Advantage):
    """Ψ ← 2Ψ where Ψ < 0. Source: nobody 2020, eq. 3."""

    def __call__(self, psi, batch):
        return torch.where(psi < 0, 2 * psi, psi)


@dataclass(frozen=True)
class Needy(pg.Advantage):
    """Ψ ← factor·Ψ."""

    factor: float

    def __call__(self, psi, batch):
        return self.factor * psi


LIKE_GRPO = replace(pg.GRPO, gate=Tent(0.3))
NAMELESS = pg.Algorithm(advantage=(pg.LeaveOneOut(), Asym()), ratio=pg.Token(), gate=Tent(), aggregation=pg.TokenMean())
TENTED = replace(NAMELESS, name="tented")
NUMBER = 3
'''
