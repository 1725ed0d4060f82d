"""What the equation, the checks and the controllers read of an algorithm; `Algorithm` is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from policygrad.core.auxiliary import Critic, ImplicitReward, Reference
from policygrad.core.base import (
    Advantage,
    Aggregation,
    Correction,
    Filter,
    Gate,
    LossTerm,
    Part,
    Ratio,
    Shaping,
    Term,
    UpdateRule,
)
from policygrad.core.batch import Batch, Coefficients


class Composition(Protocol):
    """One value per part of the equation."""

    @property
    def name(self) -> str: ...
    @property
    def psi(self) -> tuple[Advantage, ...]: ...
    @property
    def ratio(self) -> Ratio | None: ...
    @property
    def gate(self) -> Gate: ...
    @property
    def aggregate(self) -> Aggregation: ...
    @property
    def terms(self) -> tuple[Term | LossTerm, ...]: ...
    @property
    def shaping(self) -> tuple[Shaping, ...]: ...
    @property
    def filters(self) -> tuple[Filter, ...]: ...
    @property
    def corrections(self) -> tuple[Correction, ...]: ...
    @property
    def step(self) -> UpdateRule: ...
    @property
    def critic(self) -> Critic | None: ...
    @property
    def reward_model(self) -> ImplicitReward | None: ...
    @property
    def reference(self) -> Reference | None: ...
    @property
    def behaviour(self) -> str: ...
    @property
    def declared(self) -> frozenset[str]: ...
    @property
    def selecting(self) -> Part | None: ...

    def parts(self) -> Iterator[tuple[str, Part]]: ...

    def corrected(self, weight: Tensor, batch: Batch, psi: Tensor) -> Tensor: ...

    def all_coefficients(self, batch: Batch) -> Coefficients: ...
