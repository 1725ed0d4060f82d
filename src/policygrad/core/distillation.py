"""Learning from a teacher: what another model says of the tokens that the policy sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch, required
from policygrad.core.metrics import Metrics, mean_of
from policygrad.core.protocols import Advantage
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class TeacherLogRatio(Advantage):
    """Ψ_t = coefficient·Σ_{s≥t} discount^{s−t}·log(π_T/π_old)_s over sampled tokens: minus the reverse KL that they show.

    π_T is the reference, a teacher, at the sampling temperature. discount 0: each token answers for itself, and E Ψ_t ∇log π is
    −∇KL(π_θ‖π_T) of each state, the visitation frozen (which `ExactKLToReference` takes over the whole vocabulary). discount 1:
    that of whole completions. Rewards are not read. Source: Lu & Thinking Machines Lab 2025 (on-policy distillation), "Loss
    function: reverse KL"; Gu et al. 2024 (MiniLLM), sec. 2.2, for whole completions.
    """

    coefficient: float = 1.0
    """0 = nothing is taken from the samples, where an exact term says it all."""
    discount: float = 0.0
    """In [0, 1]; how much of the KL to come a token answers for."""
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "logp_old"})
    starts: ClassVar[bool] = True
    reads_reward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.coefficient >= 0:
            raise ConfigError(f"TeacherLogRatio.coefficient must be at least 0, not {self.coefficient}")
        if not 0 <= self.discount <= 1:
            raise ConfigError(f"TeacherLogRatio.discount must be in [0, 1], not {self.discount}")

    @property
    def formula(self) -> str:
        scale = "" if self.coefficient == 1 else f"{self.coefficient:g}·"
        if self.discount == 0:
            return f"{scale}log(π_ref/π_old)_t"
        return f"{scale}Σ_{{s≥t}} {self.discount:g}^{{s−t}}·log(π_ref/π_old)_s"

    def _log_ratio(self, batch: Batch) -> Tensor:
        teacher, old = (required(getattr(batch, name), self, name) for name in ("logp_ref", "logp_old"))
        return (ragged.masked(teacher, batch.mask) - ragged.masked(old, batch.mask)).to(batch.reward.dtype)

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return self.coefficient * ragged.discounted(self._log_ratio(batch), batch.mask, self.discount)

    def report(self, batch: Batch) -> Metrics:
        """teacher/kl: KL(π_old‖π_T) in nats a token, from the samples."""
        return {"teacher/kl": mean_of(-self._log_ratio(batch), batch.mask)} if bool(batch.mask.any()) else {}
