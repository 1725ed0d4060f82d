"""π_ref: which model the policy is compared with, and when it is taken anew."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """π_ref: the model the run started from. It is held in memory only when a part needs `logp_ref`.

    every: take the policy of the moment as the new reference after so many rollouts (iterative GRPO); 0 = frozen.
    reset: then also forget the optimiser's state (ProRL).
    """

    every: int = 0
    reset: bool = False

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(
                f"Reference.every must be at least 1 rollout, or 0 for a frozen reference, not {self.every}"
            )
        if self.reset and not self.every:
            raise ValueError("Reference.reset without `every` would never happen: set every, or reset=False")

    @property
    def formula(self) -> str:
        if not self.every:
            return "the initial policy, frozen"
        return f"the policy, taken anew every {self.every} rollouts" + (", the optimiser's state reset" * self.reset)

    def due(self, rollouts: int) -> bool:
        """Whether it is taken anew after this many rollouts."""
        return self.every > 0 and rollouts % self.every == 0
