"""Links that change the Ψ of the chain before them: bounds on it, and a teacher's signal beside the reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from policygrad.core import masked
from policygrad.core.advantages import TeacherLogRatio
from policygrad.core.base import Advantage, Explanation
from policygrad.core.batch import Batch
from policygrad.core.settings import check_setting, setting


@dataclass(frozen=True)
class ClipAdvantage(Advantage):
    """Ψ ← clip(Ψ, low, high), so that no completion outweighs the others: an only success among many has a large z-score.

    Source: NeMo-RL, algorithms/grpo.py (advantage_clip_low, advantage_clip_high).
    """

    low: float = setting(-3.0, "a number", unbounded=True)
    high: float = setting(3.0, "a number", unbounded=True)
    reads_reward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting(self, "low", self.low <= 0 < self.high, f"at most 0, and high = {self.high:g} above 0")

    @property
    def formula(self) -> str:
        return f"; clip(Ψ, {self.low:g}, {self.high:g})"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return masked.apply_mask(psi.clamp(self.low, self.high), batch.mask)


@dataclass(frozen=True)
class TeacherBonus(TeacherLogRatio):
    """Ψ_t ← Ψ_t + coefficient·clip(log(π_T/π_old)_t, ±clip): a teacher's preference for each token beside the reward.

    The reward says which completions were good, the teacher which tokens. π_T is the reference, a teacher, and the added term is
    what `TeacherLogRatio` starts a chain with: minus a sampled estimate of the reverse KL. `clip` bounds it for tokens that the
    teacher would hardly have written. Where the teacher has read nothing, Ψ stays.
    Source: slime, backends/megatron_utils/loss.py (`apply_opd_kl_to_advantages`); ms-swift, rl_core/advantage.py
    (`expand_advantage_to_per_token`), after the baseline as here. Neither clips.
    """

    clip: float | None = setting(None, "above 0", "nats, or None")
    """Bound of |log(π_T/π_old)| at a token; None: no bound."""
    starts_chain: ClassVar[bool] = False

    @property
    def formula(self) -> str:
        ratio = "log(π_ref/π_old)_t"
        bounded = ratio if self.clip is None else f"clip({ratio}, ±{self.clip:g})"
        if self.discount:
            bounded = f"Σ_{{s≥t}} {self.discount:g}^{{s−t}}·{bounded.replace('_t', '_s')}"
        return f"+ {self.coefficient:g}·{bounded}"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        if not self.coefficient:
            return psi
        log_ratio, _ = self._log_ratio(batch, batch.require("logp_old", self))
        if self.clip is not None:
            log_ratio = log_ratio.clamp(-self.clip, self.clip)
        return psi + self.coefficient * self._sum_to_go(log_ratio, batch)

    def explain(self, before: Explanation, rewards: object) -> Explanation | None:
        return None
