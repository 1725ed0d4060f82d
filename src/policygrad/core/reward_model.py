"""A reward model that learns from outcomes beside the policy and says what each token was worth. A learner owns its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from policygrad.core import ragged
from policygrad.core.batch import Batch, required
from policygrad.core.metrics import Mean, Metrics, mean_of
from policygrad.core.protocols import Part
from policygrad.errors import ConfigError

RATIO = 2.0
"""Its learning rate over the policy's, where it is left open: 1e-6 over 5e-7 in PRIME, sec. 4.1."""


@dataclass(frozen=True)
class ImplicitReward(Part):
    """r_φ(o_t) = β·log(π_φ/π_ref)(o_t), π_φ a language model that starts as π_ref, so that r_φ = 0 at first.

    It is fitted to outcomes R in [0, 1] alone: cross-entropy of σ(r_φ(o)) with R, r_φ(o) = Σ_t r_φ(o_t), a mean over the update's
    completions. What a rollout is rewarded with was said before it was learned from (PRIME's algorithm 1, steps 7 and 8).
    Source: Cui et al. 2025 (PRIME), eq. 3 and algorithm 1.
    """

    beta: float = 0.05
    lr: float | None = None
    """Peak learning rate, on the policy's schedule; open = twice the policy's."""
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref"})

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"ImplicitReward.beta must be above 0, not {self.beta}")
        if self.lr is not None and not self.lr >= 0:
            raise ConfigError(f"ImplicitReward.lr must be at least 0, not {self.lr}")

    @property
    def formula(self) -> str:
        return f"{self.beta:g}·log(π_φ/π_ref), φ by cross-entropy of σ(Σ_t r_φ) with R"

    def rate(self, policy: float | None) -> float:
        """Its peak learning rate beside the policy's.

        Raises:
            ConfigError: neither is given.
        """
        if self.lr is None and policy is None:
            raise ConfigError(
                "ImplicitReward.lr is open, and the policy has no learning rate to multiply: set ImplicitReward(lr=…), say 1e-6"
            )
        return RATIO * (policy or 0.0) if self.lr is None else self.lr

    def rewards(self, logp: Tensor, batch: Batch) -> Tensor:
        """[B, T] r_φ(o_t) from log π_φ [B, T], with its graph; 0 off the mask."""
        reference = ragged.masked(required(batch.logp_ref, self, "logp_ref"), batch.mask)
        return self.beta * (ragged.masked(logp, batch.mask) - reference)

    def loss(self, logp: Tensor, batch: Batch) -> Tensor:
        """[B] with graph: −R·log σ(r_φ(o)) − (1 − R)·log(1 − σ(r_φ(o))), in nats.

        Raises:
            ConfigError: an outcome outside [0, 1], which is no probability to fit.
        """
        total = self.rewards(logp, batch).sum(1)
        outcome = ragged.masked(batch.reward, batch.mask.any(1)).to(total.dtype)
        if bool(((outcome < 0) | (outcome > 1)).any()):
            raise ConfigError(
                f"ImplicitReward is fitted to outcomes in [0, 1], and rewards run from {float(outcome.min()):g} to "
                f"{float(outcome.max()):g}: give a reward function that says 0 for wrong and 1 for right, or scale it"
            )
        return binary_cross_entropy_with_logits(total, outcome, reduction="none")

    def report(self, batch: Batch) -> Metrics:
        """reward_model/accuracy, over the pairs of a better and a worse completion of one prompt: how often r_φ(o) is larger for
        the better one, before it is fitted to them (a tie is half right). reward_model/reward: mean r_φ(o_t)."""
        if batch.implicit_reward is None or not bool(batch.mask.any()):
            return {}
        total, kept = ragged.masked(batch.implicit_reward, batch.mask).sum(1).double(), batch.mask.any(1)
        pair = (batch.group[:, None] == batch.group) & kept[:, None] & kept
        better, worse = (pair & (batch.reward[:, None] > batch.reward)).nonzero(as_tuple=True)
        gap = total[better] - total[worse]
        metrics: Metrics = {"reward_model/reward": mean_of(batch.implicit_reward, batch.mask)}
        if len(gap):
            right = (gap > 0).double() + 0.5 * (gap == 0).double()
            metrics["reward_model/accuracy"] = Mean(float(right.sum()), float(len(gap)))
        return metrics
