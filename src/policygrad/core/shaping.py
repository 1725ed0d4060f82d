"""Reward shaping: turns the task's score into the reward that advantages read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Shaping, State
from policygrad.core.batch import Batch
from policygrad.core.kl_controllers import AdaptiveBeta, Rule
from policygrad.core.metrics import Metric
from policygrad.core.settings import choice, setting
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


@dataclass(frozen=True)
class KLInReward(AdaptiveBeta, Shaping):
    """r_t −= β·u_t with u_t = log π_old − log π_ref, at rollout time: its gradient is that of the sequence KL.

    level='token' subtracts each token's penalty at that token, so that a token is charged for the KL to go. level='sequence' is
    R −= β Σ_t u_t: every token is charged for the completion's full KL. The expected gradients are equal.

    Source: token: Stiennon et al. 2020; Ouyang et al. 2022, eq. 2. sequence: Ahmadian et al. 2024 (RLOO), sec. 2.

    Raises:
        ConfigError: a form other than k1 (k2 and k3 in the reward do not give the gradient of the sequence KL), an unknown level,
            or a rule without a target.
    """

    beta: float = setting(0.05, "at least 0")
    form: str = "k1"
    target: float | None = setting(None, "above 0", "nats per token, or None")
    """Target of the mean of u (k1, unbiased) in nats per sampled token; β is adapted to it after each rollout."""
    rule: Rule | None = None
    """How β adapts to the target; None means proportional."""
    level: Literal["token", "sequence"] = choice(
        token="the KL to go", sequence="the completion's full KL at every token"
    )
    """token: the KL to go; sequence: the full KL at every token."""
    needs: ClassVar[frozenset[str]] = frozenset({"logp_old", "logp_ref"})
    multipliers: ClassVar[tuple[str, ...]] = ("beta",)

    def __post_init__(self) -> None:
        if self.form != "k1":
            raise ConfigError(
                f"KLInReward takes k1 only, not {self.form!r}: as a reward, k2 and k3 do not give the gradient of the "
                "sequence KL. Use form='k1', or KLToReference in the loss"
            )
        super().__post_init__()

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if algorithm.reference is not None and algorithm.reference.templates:
            yield (
                "KLInReward charges every completion, and π_ref with Reference.templates may not have read some: use "
                "KLToReference() in terms, or set templates=()"
            )

    @property
    def formula(self) -> str:
        at = "r_t −= {}·(log π_old − log π_ref)" if self.level == "token" else "R −= {}·Σ_t (log π_old − log π_ref)"
        return at.format(f"{self.beta:g}") + self.describe_target()

    def _u(self, batch: Batch) -> Tensor:
        return batch.require("logp_old", self) - batch.require("logp_ref", self)

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Adapt β to the mean of u over the rollout's sampled tokens."""
        if not batch.mask.any():
            return state
        return self.adapt(state["beta"], float(masked.mean(self._u(batch), batch.mask)), "proportional")

    def __call__(self, batch: Batch) -> Batch:
        penalty = masked.apply_mask(-self.beta * self._u(batch), batch.mask).to(batch.reward.dtype)
        if self.level == "sequence":
            return replace(batch, reward=batch.reward + penalty.sum(1))
        return replace(batch, token_reward=penalty if batch.token_reward is None else batch.token_reward + penalty)


@dataclass(frozen=True)
class SoftOverlong(Shaping):
    """R += 0 up to L_max − L_cache tokens, then linearly down to −scale at L_max, and −scale beyond.

    length is L_max; None means the batch's width T, and a trainer sets it to its generation budget. cache is L_cache as a fraction
    of L_max. scale is the largest penalty in units of the reward: 1 (DAPO), 0.1 (Magistral 2025, eq. 1).
    Source: Yu et al. 2025 (DAPO), eq. 13.
    """

    length: int | None = setting(None, "at least 1", "token")
    cache: float = setting(0.2, "above 0 and at most 1")
    scale: float = setting(1.0, "above 0", hint="remove the part for no penalty")

    @property
    def formula(self) -> str:
        times = "" if self.scale == 1 else f"{self.scale:g}·"
        ramp = f"min(0, ({1 - self.cache:g}·L − |o|)/({self.cache:g}·L))"
        return f"R += {times}{ramp}, at least −{self.scale:g},  L = {self.length or 'L_max'}"

    def __call__(self, batch: Batch) -> Batch:
        budget = float(batch.mask.shape[1] if self.length is None else self.length)
        length = batch.lengths.to(batch.reward.dtype)
        if batch.truncated is not None:  # also where an overlong mask emptied the completion
            length = torch.where(batch.truncated, budget, length)
        penalty = ((budget - length) / (budget * self.cache) - 1).clamp(-1, 0)  # exactly −1 at the budget
        return replace(batch, reward=batch.reward + self.scale * penalty)
