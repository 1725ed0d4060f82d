"""A tracker: one line a step, in a file of the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import policygrad as pg


class CorridorLog(pg.Tracker):
    """Writes corridor.log."""

    file: Path

    def start(self, info: pg.RunInfo) -> None:
        assert info.folder is not None
        self.file = info.folder / "corridor.log"

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        with self.file.open("a", encoding="utf-8") as out:
            out.write(f"{step} {metrics['corridor/relative_length']:.4f} {metrics['reward']:.4f}\n")
