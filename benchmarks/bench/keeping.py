"""Weights that are put aside while a run learns, so that both sides can be measured afterwards, by one and the same program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.clock import Clock


@dataclass(frozen=True)
class Keeping:
    """Every so many steps, and before the first; the time for it is no part of a step."""

    folder: Path | None
    every: int

    def __call__(self, step: int, model: Any, tokenizer: Any, clock: Clock) -> None:
        if self.folder is None or not self.every or step % self.every:
            return
        with clock.apart():
            model.save_pretrained(self.folder / f"step-{step}")
            tokenizer.save_pretrained(self.folder / f"step-{step}")
