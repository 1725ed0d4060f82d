"""TRL's averaging: within each micro-batch of so many completions, then over the micro-batches of an optimizer step.

Elsewhere in policygrad averages are over a whole update, however it is split, and a masked completion leaves every denominator.
These parts keep TRL's numbers instead, for scripts that were tuned with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Advantage, Aggregation, Correction
from policygrad.core.batch import Batch, Forward
from policygrad.core.chains import PER_COMPLETION, Stage
from policygrad.core.gates import ClippedImportance
from policygrad.core.ratios import HighEntropy, bounded_exp
from policygrad.core.terms import ExactEntropy, KLToReference

Average = Literal["sequence_mean", "token_mean", "fixed_length", "sequence_sum", "generation_tokens"]


@dataclass(frozen=True)
class MicroBatchMean(Aggregation):
    """c of TRL's losses, for the completions of one optimizer step: `rows` of them are a micro-batch, in their order.

    average             c of a token of completion i in micro-batch m of M
    sequence_mean       1/(M·rows·|o_i|)       loss_type grpo, sapo
    token_mean          1/(M·Σ_{j∈m}|o_j|)     bnpo
    fixed_length        1/(M·rows·budget)      dr_grpo
    sequence_sum        1/(M·rows)             luspo, and RLOO
    generation_tokens   1/budget               dapo, cispo, vespo: the tokens of the generation, per optimizer step

    Source: TRL 1.16, `GRPOTrainer._compute_loss`.
    """

    average: Average = "sequence_mean"
    rows: int = 1
    """Completions per micro-batch: per_device_train_batch_size."""
    count: int = 1
    """M, the micro-batches of the optimizer step: gradient_accumulation_steps, or fewer at an epoch's end."""
    budget: float = 1.0

    @property
    def formula(self) -> str:
        return {
            "sequence_mean": f"1/({self.count}·{self.rows}·|o_i|)",
            "token_mean": f"1/({self.count}·Σ_{{j∈micro-batch}}|o_j|)",
            "fixed_length": f"1/({self.count}·{self.rows}·{self.budget:g})",
            "sequence_sum": f"1/({self.count}·{self.rows})",
            "generation_tokens": f"1/{self.budget:g}",
        }[self.average]

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        lengths = mask.sum(1).double()
        block = torch.arange(len(mask), device=mask.device) // self.rows
        sizes = torch.bincount(block).double()[block]  # the last micro-batch of an evaluation may be smaller
        denominator = {
            "sequence_mean": lambda: sizes * lengths.clamp(min=1),
            "token_mean": lambda: torch.zeros_like(sizes).index_add_(0, block, lengths)[block].clamp(min=1),
            "fixed_length": lambda: sizes * self.budget,
            "sequence_sum": lambda: sizes,
            "generation_tokens": lambda: torch.full_like(sizes, max(self.budget, 1.0) / self.count),
        }[self.average]()
        return masked.apply_mask((1 / (self.count * denominator))[:, None].expand(mask.shape), mask)


@dataclass(frozen=True)
class MicroBatchHighEntropy(HighEntropy):
    """`HighEntropy` with a threshold of each micro-batch's own. Source: TRL 1.16, `get_high_entropy_mask`."""

    rows: int = 1

    def select_tokens(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        chosen = torch.zeros_like(batch.mask)
        for first in range(0, len(batch.mask), self.rows):
            rows = torch.arange(first, min(first + self.rows, len(batch.mask)), device=batch.mask.device)
            share = None if out is None else Forward(**{name: x[rows] for name, x in out.tensors().items()})
            chosen[rows] = super().select_tokens(share, batch.select(rows), psi[rows])
        return chosen


@dataclass(frozen=True)
class CompletionMean(Correction):
    """A correction's mean over each completion, at all of its tokens: with a ratio of completions TRL multiplies the one value of a
    completion by the corrections of its tokens, and its gradient reaches all tokens alike."""

    part: Correction

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.part.needs

    @property
    def forward_needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.part.forward_needs

    @property
    def corrects_sampler(self) -> bool:  # type: ignore[override]
        return self.part.corrects_sampler

    @property
    def formula(self) -> str:
        return f"mean_t of {self.part.formula}"

    def select_tokens(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        return self.part.select_tokens(out, batch, psi)

    def __call__(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        factor = masked.apply_mask(self.part(out, batch, psi), batch.mask)
        mean = factor.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1)
        return mean.expand(factor.shape)


@dataclass(frozen=True)
class SelectedEntropy(ExactEntropy):
    """The entropy bonus of the tokens that learn, where `MicroBatchHighEntropy` chooses them."""

    def token_mask(self, batch: Batch) -> Tensor | None:
        return batch.selected


@dataclass(frozen=True)
class CappedImportance(ClippedImportance):
    """w = min(r, high), for any bound: TRL's default of 0.2 for loss_type='cispo' makes every gradient a fifth of its size."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class SequenceWeightedKL(KLToReference):
    """KL to π_ref by k3, times the completion's ratio s = exp(mean_t log r_t): −β·s·k3, whose gradient flows through s too.

    Source: TRL 1.16, `use_bias_correction_kl` with importance_sampling_level='sequence'.
    """

    form: Literal["k3"] = "k3"

    @property
    def formula(self) -> str:
        return f"−{self.beta:g}·s·(1 − e^{{−u}} + mean_t k3)"

    def _parts(self, out: Forward, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return s [B, 1], u [B, T] and k3 [B, T]."""
        u, change = self._u_and_change(out, batch)
        lengths = batch.mask.sum(1, keepdim=True).clamp(min=1)
        s = bounded_exp(masked.apply_mask(change, batch.mask).sum(1, keepdim=True) / lengths)
        return s, u, torch.expm1(-u) + u

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        s, u, k3 = self._parts(out, batch)
        mean = masked.apply_mask(k3, batch.mask).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1)
        return -self.beta * s * (mean - torch.expm1(-u))

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        s, _, k3 = self._parts(out, batch)
        return -self.beta * s * k3


@dataclass(frozen=True)
class CompletionZScores(Advantage):
    """Ψ ← (Ψ − mean)/(std + eps) over the completions of the generation that are scored, each counted once.

    Source: TRL 1.16, `normalize_advantages` of RLOO, and `multi_objective_aggregation='normalize_then_sum'`.
    """

    eps: float = 1e-4
    takes: ClassVar[frozenset[Stage]] = PER_COMPLETION
    gives: ClassVar[Stage | None] = "score"

    @property
    def formula(self) -> str:
        return f"; (Ψ − mean)/(std + {self.eps:g}) over completions"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        x, keep = masked.first_valid(psi, batch.mask), batch.counted & batch.mask.any(1)
        if int(keep.sum()) < 2:
            return torch.zeros_like(psi)
        scaled = (x - x[keep].mean()) / (x[keep].std() + self.eps)
        return masked.apply_mask(scaled[:, None].expand(psi.shape), batch.mask)
