"""The critic's side of actor-critic methods: what V is fitted to, and by which loss. A learner owns the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from policygrad.core import masked
from policygrad.core.base import Part, State
from policygrad.core.batch import Batch, require_field
from policygrad.core.gae import GAE
from policygrad.core.masked import check_count, check_unit_interval
from policygrad.core.metrics import Mean, Metric, Metrics, masked_mean
from policygrad.core.turns import MultiTurnGAE
from policygrad.errors import ConfigError

CRITIC_LR_RATIO = 10.0
"""The critic's learning rate over the policy's, where it is left open."""
Backbone = Literal["separate", "policy"]


@dataclass(frozen=True)
class Critic(Part):
    """V_φ: parameters of its own, which a policy step never moves, fitted to GAE(γ, λ) + V_old, unwhitened.

    features: own = a copy of the initial model's backbone, trained with the value head. policy = a head alone, on the policy's
    last hidden states, which it reads and never moves: no second backbone in memory, but values that shift with the policy's
    states and explain less; a `hidden` layer helps.

    Before training it is fitted to the frozen policy's returns for `pretrain` rollouts at most, or until it explains
    `explained` of their variance: what a rollout costs is sampling it, so each is gone over `pretrain_epochs` times, and the
    error is not clipped.
    """

    lr: float | None = None
    """Peak learning rate, on the policy's schedule; open = ten times the policy's."""
    lam: float = 0.95
    """λ of the targets; 1 = Monte-Carlo returns."""
    gamma: float = 1.0
    turn_gamma: float = 1.0
    """Per turn, at its last token; for an advantage that discounts per turn."""
    coefficient: float = 0.5
    """Of the squared error."""
    clip: float = 0.2
    """The error counts from V_old ± clip where that is worse; 0 = no clipping."""
    pretrain: int = 0
    """Rollouts of value pre-training, at most; the policy stands still meanwhile."""
    pretrain_until: float = 0.5
    """Explained variance of fresh returns at which pre-training ends early."""
    pretrain_epochs: int = 4
    """Value steps per update of pre-training."""
    backbone: Backbone = "separate"
    """own: a backbone of its own; policy: the policy's hidden states, under stop-gradient."""
    hidden: int = 0
    """Width of a hidden layer in the head on the policy's states; 0 = a linear head."""

    def __post_init__(self) -> None:
        check_unit_interval(self, gamma=self.gamma, lam=self.lam, turn_gamma=self.turn_gamma)
        for name in ("lr", "coefficient", "clip", "pretrain", "hidden"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"Critic.{name} must be at least 0, not {value}")
        check_count(self, pretrain_epochs=self.pretrain_epochs)
        if self.backbone not in get_args(Backbone):
            raise ConfigError(
                f"Critic.backbone must be {' or '.join(map(repr, get_args(Backbone)))}, not {self.backbone!r}"
            )
        if self.hidden and self.backbone == "separate":
            raise ConfigError(
                "Critic.hidden makes a head on the policy's fixed states able to bend, and features is 'own', whose backbone "
                "learns itself: set backbone='policy', or leave hidden at 0"
            )

    def learning_rate(self, policy: float | None) -> float:
        """Its peak learning rate beside the policy's; it starts from a head that knows nothing, so it learns faster.

        Raises:
            ConfigError: neither is given.
        """
        if self.lr is None and policy is None:
            raise ConfigError(
                "Critic.lr is open, and the policy has no learning rate to multiply: set Critic(lr=…), say 1e-5"
            )
        return CRITIC_LR_RATIO * (policy or 0.0) if self.lr is None else self.lr

    def init_state(self) -> State | None:
        return {"pretrain": self.pretrain} if self.pretrain else None

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """One rollout of pre-training less, or none left once it explains enough."""
        seen, left = metrics.get("explained_variance"), state["pretrain"]
        if not left or seen is None:
            return state
        return {"pretrain": 0 if seen.value >= self.pretrain_until else left - 1}

    def with_state(self, state: State) -> Critic:
        """With `pretrain` the rollouts of it still to come."""
        return replace(self, pretrain=state["pretrain"])

    @property
    def formula(self) -> str:
        clip = f", clipped at V_old ± {self.clip:g}" if self.clip else ""
        head = ", V on the policy's states" if self.backbone == "policy" else ""
        turn = f", γ = {self.turn_gamma:g} per turn" if self.turn_gamma < 1 else ""
        return f"{self.coefficient:g}·(V − (GAE(λ = {self.lam:g}{turn}) + V_old))²{clip}{head}"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Where turns end, if they discount."""
        return frozenset({"turn_state"} if self.turn_gamma < 1 else ())

    def targets(self, batch: Batch) -> Tensor:
        """[B, T] GAE(γ, λ) + V_old; 0 off the mask. The batch's rewards are those after shaping."""
        by_turn = MultiTurnGAE(self.gamma, self.lam, self.turn_gamma)
        estimate = by_turn if self.turn_gamma < 1 else GAE(self.gamma, self.lam)
        advantage = estimate(torch.zeros_like(batch.mask, dtype=batch.reward.dtype), batch)
        return advantage + masked.apply_mask(require_field(batch.values, self, "values"), batch.mask)

    def loss(self, values: Tensor, batch: Batch, targets: Tensor) -> Tensor:
        """[B, T] with graph: coefficient·max((V − R)², (clip(V, V_old ± ε) − R)²). Source: Schulman et al. 2017 (code)."""
        values = masked.apply_mask(values, batch.mask)
        error = (values - targets) ** 2
        if self.clip and not self.pretrain:
            old = masked.apply_mask(require_field(batch.values, self, "values"), batch.mask)
            near = old + (values - old).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (near - targets) ** 2)
        return self.coefficient * masked.apply_mask(error, batch.mask)


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> float:
    """1 − Var(R − V)/Var(R) over the sampled tokens; 0 where the targets do not vary."""
    spread = float(masked.std(targets, mask, 0)) ** 2
    if not spread or bool(masked.is_constant(targets, mask)):
        return 0.0
    return 1 - float(masked.std(targets - values, mask, 0)) ** 2 / spread


# A reward model that learns from outcomes beside the policy and says what each token was worth. A learner owns its parameters.

REWARD_MODEL_LR_RATIO = 2.0
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

    def learning_rate(self, policy: float | None) -> float:
        """Its peak learning rate beside the policy's.

        Raises:
            ConfigError: neither is given.
        """
        if self.lr is None and policy is None:
            raise ConfigError(
                "ImplicitReward.lr is open, and the policy has no learning rate to multiply: set ImplicitReward(lr=…), say 1e-6"
            )
        return REWARD_MODEL_LR_RATIO * (policy or 0.0) if self.lr is None else self.lr

    def rewards(self, logp: Tensor, batch: Batch) -> Tensor:
        """[B, T] r_φ(o_t) from log π_φ [B, T], with its graph; 0 off the mask."""
        reference = masked.apply_mask(require_field(batch.logp_ref, self, "logp_ref"), batch.mask)
        return self.beta * (masked.apply_mask(logp, batch.mask) - reference)

    def loss(self, logp: Tensor, batch: Batch) -> Tensor:
        """[B] with graph: −R·log σ(r_φ(o)) − (1 − R)·log(1 − σ(r_φ(o))), in nats.

        Raises:
            ConfigError: an outcome outside [0, 1], which is no probability to fit.
        """
        total = self.rewards(logp, batch).sum(1)
        outcome = masked.apply_mask(batch.reward, batch.mask.any(1)).to(total.dtype)
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
        total, has_tokens = masked.apply_mask(batch.implicit_reward, batch.mask).sum(1).double(), batch.mask.any(1)
        pair = (batch.group[:, None] == batch.group) & has_tokens[:, None] & has_tokens
        better, worse = (pair & (batch.reward[:, None] > batch.reward)).nonzero(as_tuple=True)
        gap = total[better] - total[worse]
        metrics: Metrics = {"reward_model/reward": masked_mean(batch.implicit_reward, batch.mask)}
        if len(gap):
            right = (gap > 0).double() + 0.5 * (gap == 0).double()
            metrics["reward_model/accuracy"] = Mean(float(right.sum()), float(len(gap)))
        return metrics


# π_ref: which model the policy is compared with, and when it is taken anew.


@dataclass(frozen=True)
class Reference(Part):
    """π_ref: the model the run started from, or another one. It is held in memory only when a part needs `logp_ref`.

    Its memory, with `stall`: the best held-out score, and the evaluations `waited` since it or since the last refresh.
    Source: Liu et al. 2025 (ProRL), sec. 2 and 3.
    """

    refresh_every: int | None = None
    """Take the policy of the moment as the new reference after so many rollouts (iterative GRPO); None = never."""
    reset_optimizer: bool = False
    """With either, also forget the optimiser's state (ProRL)."""
    refresh_after_stall: int | None = None
    """Take it anew when so many periodic held-out evaluations in a row have not exceeded the best before them; None = never.
    It is taken after the rollout that follows."""
    model: str | None = None
    """Another model in its place, a teacher say: folder, hub id, or a run's folder; frozen. None = the one the run started from.
    It reads the policy's token ids, so its tokenizer has the policy's vocabulary."""

    def __post_init__(self) -> None:
        for name, counted in (("refresh_every", "rollout"), ("refresh_after_stall", "evaluation")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Reference.{name} must be at least 1 {counted}, or None for never, not {value}")
        if self.reset_optimizer and not (self.refresh_every or self.refresh_after_stall):
            raise ConfigError(
                "Reference.reset_optimizer without `every` or `stall` would never happen: set one of them, or reset=False"
            )
        if self.model is not None and (self.refresh_every or self.refresh_after_stall):
            raise ConfigError(
                f"Reference.model = {self.model!r} stays what it is, and `every` and `stall` put the policy in its place: leave "
                "them open, or leave model open"
            )

    @property
    def formula(self) -> str:
        times = [f"every {self.refresh_every} rollouts"] if self.refresh_every else []
        times += (
            [f"when {self.refresh_after_stall} held-out evaluations in a row bring nothing better"]
            if self.refresh_after_stall
            else []
        )
        if not times:
            return "the initial policy, frozen" if self.model is None else f"the model {self.model}, frozen"
        return f"the policy, taken anew {' and '.join(times)}" + (
            ", the optimiser's state reset" * self.reset_optimizer
        )

    def should_refresh(self, rollouts: int) -> bool:
        """Whether it is taken anew after this many rollouts."""
        return self.refresh_every is not None and rollouts % self.refresh_every == 0

    def init_state(self) -> State | None:
        return {"best": None, "waited": 0} if self.refresh_after_stall else None

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """A refresh (`reference/refreshed`) and a better held-out score (`eval/reward`) begin the count anew; the score of the
        very policy that has become the reference does not count."""
        refreshed, score, best = "reference/refreshed" in metrics, metrics.get("eval/reward"), state["best"]
        if score is not None and (best is None or score.value > best):
            return {"best": score.value, "waited": 0}
        return {"best": best, "waited": 0 if refreshed else state["waited"] + (score is not None)}

    def with_state(self, state: State) -> StalledReference:
        return StalledReference(
            self.refresh_every, self.reset_optimizer, self.refresh_after_stall, self.model, self, state["waited"]
        )


@dataclass(frozen=True)
class StalledReference(Reference):
    """A reference with its memory put in: for how many held-out evaluations nothing better has come."""

    configured: Reference | None = None
    stalled_evaluations: int = 0

    def should_refresh(self, rollouts: int) -> bool:
        stalled = self.refresh_after_stall is not None and self.stalled_evaluations >= self.refresh_after_stall
        return stalled or (self.configured is not None and self.configured.should_refresh(rollouts))
