"""The networks that train, together: what a problem is made of, besides a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from policygrad.core.batch import Batch, Forward
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.division import Division
from policygrad.learners.local.forward import Evaluator
from policygrad.learners.local.implicit_reward import ImplicitRewardModel
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.local.packing import Pack, micro_tokens, pack
from policygrad.learners.local.recompute import differentiating, without_effect
from policygrad.learners.local.value_model import ValueModel
from policygrad.models.precision import at_least_float32


@dataclass(frozen=True, eq=False)
class ActorCritic:
    """The policy with its optimiser, the critic and the reward model with their own, the policy as it was, and the reference."""

    policy: Evaluator
    optimizer: Optimizer
    config: LearnerConfig
    critic: ValueModel | None = None
    old: Evaluator | None = None
    """π_old, when the rollout's updates began; only where an exact KL(π_old‖π_θ) is asked for."""
    reward_model: ImplicitRewardModel | None = None
    reference: Evaluator | None = None
    division: Division = field(default_factory=Division)

    @property
    def device(self) -> torch.device:
        """The policy's."""
        return next(self.policy.model.parameters()).device

    def packs(
        self,
        batch: Batch,
        rows: Tensor | None = None,
        whole: bool = False,
        idle: Callable[[Pack], object] | None = None,
    ) -> Iterator[Pack]:
        """The completions `rows`, or all, in micro-batches: this process's share; `whole`: of whole groups; `idle`: a pass like
        those they are for, on the device, which adds nothing; None = one of the policy alone."""
        rows = torch.arange(len(batch.mask)) if rows is None else rows
        made, budget = partial(pack, batch, rows, whole=whole), micro_tokens(self.config, self.policy.model)
        nothing = idle or self.idle(self.policy)
        return self.division.packs(made, budget, lambda part: nothing(part.to(self.device)))

    def idle(self, evaluator: Evaluator, needs: frozenset[str] = frozenset()) -> Callable[[Pack], None]:
        """A pass of the evaluator that adds nothing to any gradient."""

        def one(part: Pack) -> None:
            with differentiating(evaluator.model, self.config.gradient_checkpointing):
                without_effect(evaluator.forward(part, needs, self.old, self.reference).logp)

        return one

    def forward(self, part: Pack, needs: frozenset[str], expected: Tensor | None = None) -> Forward:
        """log π_θ of a micro-batch, and what the algorithm's loss terms read beside it."""
        return self.policy.forward(part.to(self.device), needs, self.old, self.reference, expected)

    @torch.no_grad()
    def look(self, batch: Batch, evaluator: Evaluator, needs: frozenset[str] = frozenset()) -> Forward:
        """A pass of the policy, or another model, over all completions: [B, T] on the CPU, without graph."""
        names = ("logp", *sorted(needs))
        empty = at_least_float32(torch.zeros(batch.mask.shape, dtype=self.optimizer.dtype))
        found = {name: empty.clone() for name in names}
        for part in self.packs(batch, idle=self.idle(evaluator, needs)):
            out = evaluator.forward(part.to(self.device), needs, self.old, self.reference)
            for name in names:
                found[name][part.rows] = getattr(out, name).cpu()
        return Forward(**{name: self.division.summed(x) for name, x in found.items()})

    def at_rest(self) -> None:
        """Of the policy and of what it is compared with (`Evaluator.at_rest`)."""
        for evaluator in (self.policy, self.old, self.reference):
            if evaluator is not None:
                evaluator.at_rest()

    def differentiating(self) -> AbstractContextManager[None]:
        """The policy in the mode for backward passes."""
        return differentiating(self.policy.model, self.config.gradient_checkpointing)
