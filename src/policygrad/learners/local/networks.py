"""The networks of an update: the policy with its optimizer, and those that train beside it or that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from policygrad.core.batch import Batch, Forward, TopTokens
from policygrad.core.divergences import REVERSE_KL, Divergence
from policygrad.core.metrics import Mean, Metrics
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.forward import Evaluator, backward_mode, backward_zero
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.local.packing import Pack, WorkDivision
from policygrad.models.loading import at_least_float32
from policygrad.utils.spans import span

if TYPE_CHECKING:
    from policygrad.learners.local.auxiliary_networks import ImplicitRewardModel, ValueModel
    from policygrad.learners.local.compilation import CompiledBlocks
    from policygrad.learners.local.expert_balance import ExpertBalance

T = TypeVar("T")
_LEAST_SAVING = 0.05  # of the tokens: a path takes two calls more


@dataclass(frozen=True, eq=False)
class TrainedNetworks:
    """The policy with its optimizer, and the networks that train beside it or that it is compared with."""

    policy: Evaluator
    optimizer: Optimizer
    config: LearnerConfig
    critic: ValueModel | None = None
    reward_model: ImplicitRewardModel | None = None
    reference: Evaluator | None = None
    division: WorkDivision = field(default_factory=WorkDivision)
    old: Evaluator | None = None  # π_old at the start of the rollout's updates; only for an exact KL(π_old‖π_θ)
    compiled: CompiledBlocks | None = None  # the policy's blocks, with `learner.compile`
    divergence: Divergence = REVERSE_KL  # from the reference (`ExactKLToReference`)
    balance: ExpertBalance | None = None  # the loss that a mixture of experts asks for

    @property
    def device(self) -> torch.device:
        return next(self.policy.model.parameters()).device

    def micro_batches(
        self, batch: Batch, dummy_pass: Callable[[Pack], object] | None = None, **options: Any
    ) -> Iterator[Pack]:
        """Iterate over this process's micro-batches, with the options of `WorkDivision.micro_batches`.

        `dummy_pass` is a pass like those the micro-batches are for, which adds nothing; None = one of the policy.
        """
        dummy_pass = dummy_pass or self.dummy_pass(self.policy)
        return self.division.micro_batches(batch, self.config, self.policy.model, dummy_pass, **options)

    def can_follow(self, saving: float) -> bool:
        """Return `reads_segments` of the policy."""
        return reads_segments(self.policy, self.config, self.division, self.balance, saving)

    def dummy_pass(self, evaluator: Evaluator, needs: frozenset[str] = frozenset()) -> Callable[[Pack], None]:
        """Return a pass of the evaluator that adds nothing to any gradient."""

        def run(part: Pack) -> None:
            if "kl_ref" in needs and self.reference is None:  # a server's tokens, which such a pass has not
                zeros = part.tokens.new_zeros((int(part.mask.sum()), 1))
                part = replace(part, reference_top=TopTokens(zeros, zeros.to(part.reads)))
            with evaluator.network.uncounted(), backward_mode(evaluator.model, self.config.gradient_checkpointing):
                backward_zero(evaluator.forward(part, needs, self.old, self.reference, divergence=self.divergence).logp)

        return run

    @contextmanager
    def count_experts(self, learning: bool) -> Iterator[Callable[[], Metrics]]:
        """Count the experts that the policy's passes inside use, if they learn and it has any; yield what reports them."""
        routing = self.policy.network.load if learning else None
        if routing is None or not routing.routers:
            yield dict
            return
        routing.pop_loads()
        with routing.counting():
            yield lambda: measure_load(self.division.all_reduce(routing.pop_loads(), by_node=True))

    def forward(self, part: Pack, needs: frozenset[str], expected: Tensor | None = None) -> Forward:
        """Return log π_θ of a micro-batch and what else `needs` names."""
        return self.policy.forward(part.to(self.device), needs, self.old, self.reference, expected, self.divergence)

    @torch.no_grad()
    def score_batch(self, batch: Batch, evaluator: Evaluator, needs: frozenset[str] = frozenset()) -> Forward:
        """Evaluate all completions without a graph; [B, T] on the CPU."""
        names = ("logp", *sorted(needs))
        empty = at_least_float32(torch.zeros(batch.mask.shape, dtype=self.optimizer.dtype))
        outputs = {name: empty.clone() for name in names}

        def score() -> None:
            dummy_pass = self.dummy_pass(evaluator, needs)
            can_follow = partial(reads_segments, evaluator, self.config, self.division, self.balance)
            for part in self.micro_batches(batch, dummy_pass, can_follow=can_follow):
                with span("forward", completions=part.completions):
                    work = partial(evaluator.forward, part.to(self.device), needs, self.old, self.reference)
                    out = self.run_compiled(work)
                for name in names:
                    outputs[name][part.rows] = getattr(out, name).cpu()

        self.division.memory.run(score)
        return Forward(**{name: self.division.all_reduce(x) for name, x in outputs.items()})

    def release(self) -> None:
        for evaluator in (self.policy, self.old, self.reference):
            if evaluator is not None:
                evaluator.release()

    def run_compiled(self, work: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Return `work()`, which uses the compiled blocks if there are some (see `CompiledBlocks.run`)."""
        return work() if self.compiled is None else self.compiled.run(work, undo)

    def backward_mode(self) -> AbstractContextManager[None]:
        return backward_mode(self.policy.model, self.config.gradient_checkpointing)


def reads_segments(
    evaluator: Evaluator, config: LearnerConfig, division: WorkDivision, balance: ExpertBalance | None, saving: float
) -> bool:
    """Return whether micro-batches may follow what has been read before: with blocks that are not compiled, without the
    load-balancing loss, which counts tokens where they are read, and where the tree serves texts of any length.

    Args:
        saving: Share of the tokens that would else be read again; 1 = a text is too long. Less is worth it on a CPU alone:
            elsewhere attention to what was read has no kernel yet.
    """
    is_one_call = config.compiles or balance is not None or evaluator.window is not None
    if is_one_call or not division.follows_paths:
        return False
    is_on_cpu = next(evaluator.model.parameters()).device.type == "cpu"
    return saving >= (_LEAST_SAVING if is_on_cpu else 1) and evaluator.network.reads_segments


def measure_load(loads: Tensor) -> Metrics:
    """Return how evenly experts are used, given how often each was [layers, E]; {} if none was.

    routing/busiest: tokens of the busiest expert of a layer, in multiples of an equal share; mean over the layers.
    routing/unused: fraction of the experts that no token used.
    """
    loads = loads[loads.sum(1) > 0]
    if not len(loads):
        return {}
    busiest = loads.max(1).values / loads.mean(1)
    return {
        "routing/busiest": Mean(float(busiest.sum()), float(len(loads))),
        "routing/unused": Mean(float((loads == 0).sum()), float(loads.numel())),
    }
