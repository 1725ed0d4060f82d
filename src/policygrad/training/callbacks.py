"""What is called at every step of a training, and may change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Callback:
    """Does nothing at every call: override those that matter.

    `trainer` is what trains: `trainer.learner.lr` is the learning rate, `trainer.progress` how far it is, `trainer.stop()` ends it.
    What a callback remembers is no part of a checkpoint: let it depend on the step's number.
    """

    def start(self, trainer: Any) -> None:
        """Everything is loaded; the first step comes."""

    def step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Step number `step` (from 1) is done."""
