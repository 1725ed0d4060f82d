"""Reward shaping: from the task's score to the reward that advantages see. A batch in, a batch out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from policygrad.core import ragged
from policygrad.core.terms import required
from policygrad.core.types import Batch


@dataclass(frozen=True)
class KLInReward:
    """r_t −= β·u_t with u_t = log π_old − log π_ref, at rollout time, accumulated to go: the gradient of the sequence KL.

    Source: Stiennon et al. 2020; Ouyang et al. 2022, eq. 2; Ahmadian et al. 2024 (RLOO).

    Raises:
        ValueError: any form but k1: k2 and k3 in the reward are not the gradient of the sequence KL.
    """

    beta: float = 0.05
    form: str = "k1"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_old", "logp_ref"})

    def __post_init__(self) -> None:
        if self.form != "k1":
            raise ValueError(
                f"KLInReward takes k1 only, not {self.form!r}: as a reward, k2 and k3 do not give the gradient of the "
                "sequence KL. Use form='k1', or KLToReference in the loss"
            )
        if not self.beta >= 0:
            raise ValueError(f"KLInReward.beta must be at least 0, not {self.beta}")

    @property
    def formula(self) -> str:
        return f"r_t −= {self.beta:g}·(log π_old − log π_ref)"

    def __call__(self, batch: Batch) -> Batch:
        u = required(batch.logp_old, self, "logp_old") - required(batch.logp_ref, self, "logp_ref")
        penalty = ragged.masked(-self.beta * u, batch.mask).to(batch.reward.dtype)
        return replace(batch, token_reward=penalty if batch.token_reward is None else batch.token_reward + penalty)


@dataclass(frozen=True)
class SoftOverlong:
    """R += 0 up to L_max − L_cache tokens, then linear to −1 at L_max, −1 beyond. Source: Yu et al. 2025 (DAPO), eq. 13.

    length (L_max) None: the batch's width T; a trainer sets its generation budget. cache: L_cache as a fraction of L_max.
    """

    length: int | None = None
    cache: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.cache <= 1:
            raise ValueError(f"SoftOverlong.cache is a fraction of the budget in (0, 1], not {self.cache}")

    @property
    def formula(self) -> str:
        return (
            f"R += min(0, ({1 - self.cache:g}·L − |o|)/({self.cache:g}·L)), at least −1,  L = {self.length or 'L_max'}"
        )

    def __call__(self, batch: Batch) -> Batch:
        budget = float(batch.mask.shape[1] if self.length is None else self.length)
        length = batch.lengths.to(batch.reward.dtype)
        if batch.truncated is not None:  # also where an overlong mask has emptied the completion
            length = torch.where(batch.truncated, budget, length)
        penalty = ((budget - length) / (budget * self.cache) - 1).clamp(-1, 0)  # exactly −1 at the budget
        return replace(batch, reward=batch.reward + penalty)
