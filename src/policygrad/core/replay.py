"""A replay buffer: groups of earlier steps that still teach, in the place of groups that teach nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from policygrad.core.advantages import is_constant_group
from policygrad.core.base import Filter
from policygrad.core.batch import Batch
from policygrad.core.filters import SEED_STRIDE
from policygrad.core.settings import COUNT, setting

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


@dataclass(frozen=True)
class ReplayBuffer(Filter):
    """Put groups of earlier steps in the place of groups whose rewards are all equal, which teach nothing.

    Of the groups with unequal rewards the `size` with the largest Σ_i |R_i − mean R| are kept, for `max_age` steps. A group is
    drawn with a probability in proportion to that sum, none twice in a step, and none in the step that sampled it. Where the buffer
    has too few, groups of equal rewards stay. A kept group has the sampler's log-probabilities and the versions of the weights that
    sampled it: π_old/μ corrects for its age like for that of any stale sample, by the algorithm's own correction or `TruncatedIS`,
    or the ratio does, with old_policy='sampler'.

    Source: TRL, trl/experimental/grpo_with_replay_buffer (`GRPOWithReplayBufferTrainer`), which weighs by Σ_i |A_i|·std: with
    advantages per std nearly the same. There a group has no age, may be drawn in its own step, and is corrected only where the
    trainer keeps old log-probabilities.
    """

    size: int = setting(64, COUNT, "groups")
    """Groups that are kept."""
    max_age: int = setting(8, "at least 1", "step")
    """Steps after which a group is no longer drawn."""
    reuse: bool = True
    """A drawn group stays in the buffer. False: it is trained on at most twice, when it was sampled and when it is drawn."""
    seed: int = setting(0, "at least 0")
    """Seed of the random choice."""
    replays: ClassVar[bool] = True
    uses_group_statistics: ClassVar[bool] = True
    chooses_by_reward: ClassVar[bool] = True

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if not any(link.uses_group_statistics for link in algorithm.advantage):
            yield (
                f"ReplayBuffer replaces groups of equal rewards, which teach nothing where the samples of a prompt are compared: "
                f"no link of the advantage of {algorithm.name} compares them. Add GroupMean() or LeaveOneOut(), or remove it"
            )
        if algorithm.replaces_rows:
            yield "ReplayBuffer keeps completions, and the rows of this algorithm are none: remove it"

    @property
    def formula(self) -> str:
        of = f"the {self.size} with the largest Σ_i |R_i − mean R|"
        age = f"at most {self.max_age} step{'s' * (self.max_age > 1)} old"
        return (
            f"groups with max R = min R are replaced by earlier ones, {of}, {age}{'' if self.reuse else ', each once'}"
        )

    def __call__(self, batch: Batch) -> Batch:
        return batch

    def find_dropped(self, batch: Batch) -> Tensor:
        return is_constant_group(batch)

    def draw(self, worth: Sequence[float], count: int, step: int) -> list[int]:
        """Draw up to `count` groups without replacement, each with a probability in proportion to its worth.

        Args:
            worth: of each group in the buffer (`measure_worth`).
            step: number of the step, which with `seed` determines the choice, so that a resumed run makes the same.
        """
        if not worth or count < 1:
            return []
        generator = torch.Generator().manual_seed((self.seed * SEED_STRIDE + step) % 2**32)
        weights = torch.tensor(worth, dtype=torch.float64)
        return torch.multinomial(weights, min(count, len(worth)), generator=generator).tolist()

    def choose_kept(self, worth: Sequence[float]) -> list[int]:
        """Return the `size` groups that are worth most, in their order; of equal ones the last, which are the newest."""
        best = sorted(range(len(worth)), key=lambda i: (worth[i], i), reverse=True)[: self.size]
        return sorted(best)


def measure_worth(rewards: Sequence[float | None]) -> float:
    """Return Σ_i |R_i − mean R| over a group's rewards, None for a completion that failed: spread times size."""
    given = [reward for reward in rewards if reward is not None]
    mean = sum(given) / max(1, len(given))
    return sum(abs(reward - mean) for reward in given)
