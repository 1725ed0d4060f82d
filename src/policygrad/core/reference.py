"""π_ref: which model the policy is compared with, and when it is taken anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policygrad.core.batch import Batch
from policygrad.core.metrics import Metric
from policygrad.core.protocols import Part, State
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class Reference(Part):
    """π_ref: the model the run started from, or another one. It is held in memory only when a part needs `logp_ref`.

    Its memory, with `stall`: the best held-out score, and the evaluations `waited` since it or since the last refresh.
    Source: Liu et al. 2025 (ProRL), sec. 2 and 3.
    """

    every: int | None = None
    """Take the policy of the moment as the new reference after so many rollouts (iterative GRPO); None = never."""
    reset: bool = False
    """With either, also forget the optimiser's state (ProRL)."""
    stall: int | None = None
    """Take it anew when so many periodic held-out evaluations in a row have not exceeded the best before them; None = never.
    It is taken after the rollout that follows."""
    model: str | None = None
    """Another model in its place, a teacher say: folder, hub id, or a run's folder; frozen. None = the one the run started from.
    It reads the policy's token ids, so its tokenizer has the policy's vocabulary."""

    def __post_init__(self) -> None:
        for name, unit in (("every", "rollout"), ("stall", "evaluation")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Reference.{name} must be at least 1 {unit}, or None for never, not {value}")
        if self.reset and not (self.every or self.stall):
            raise ConfigError(
                "Reference.reset without `every` or `stall` would never happen: set one of them, or reset=False"
            )
        if self.model is not None and (self.every or self.stall):
            raise ConfigError(
                f"Reference.model = {self.model!r} stays what it is, and `every` and `stall` put the policy in its place: leave "
                "them open, or leave model open"
            )

    @property
    def formula(self) -> str:
        times = [f"every {self.every} rollouts"] if self.every else []
        times += [f"when {self.stall} held-out evaluations in a row bring nothing better"] if self.stall else []
        if not times:
            return "the initial policy, frozen" if self.model is None else f"the model {self.model}, frozen"
        return f"the policy, taken anew {' and '.join(times)}" + (", the optimiser's state reset" * self.reset)

    def due(self, rollouts: int) -> bool:
        """Whether it is taken anew after this many rollouts."""
        return self.every is not None and rollouts % self.every == 0

    def init(self) -> State | None:
        return {"best": None, "waited": 0} if self.stall else None

    def update(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """A refresh (`reference/refreshed`) and a better held-out score (`held_out`) begin the count anew; the score of the
        very policy that has become the reference does not count."""
        refreshed, score, best = "reference/refreshed" in metrics, metrics.get("held_out"), state["best"]
        if score is not None and (best is None or score.value > best):
            return {"best": score.value, "waited": 0}
        return {"best": best, "waited": 0 if refreshed else state["waited"] + (score is not None)}

    def at(self, state: State) -> StalledReference:
        return StalledReference(self.every, self.reset, self.stall, self.model, self, state["waited"])


@dataclass(frozen=True)
class StalledReference(Reference):
    """A reference with its memory put in: for how many held-out evaluations nothing better has come."""

    configured: Reference | None = None
    waited: int = 0

    def due(self, rollouts: int) -> bool:
        stalled = self.stall is not None and self.waited >= self.stall
        return stalled or (self.configured is not None and self.configured.due(rollouts))
