"""TensorBoard: event files in the run's folder, `tensorboard --logdir runs`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policygrad.trackers.base import RunInfo, Tracker, pick_sample
from policygrad.trackers.services.base import finite


class TensorBoard(Tracker):
    """Scalars, the configuration and a completion of every step. What a resumed run does again takes the place of what it did."""

    def start(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = (info.folder or Path.cwd()) / "tensorboard"
        again = info.first_step if info.first_step > 1 else None
        self._writer: Any = SummaryWriter(str(folder), purge_step=again)
        text = json.dumps(dict(info.config), indent=2, default=str, ensure_ascii=False)
        self._writer.add_text("run", f"{info.title}\n\n    " + text.replace("\n", "\n    "), info.first_step - 1)

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self.log_evaluation(step, metrics)
        sample = pick_sample(step, completions)
        if sample is not None:
            worth = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
            self._writer.add_text(
                "completion", f"{sample.prompt}\n\n---\n\n{sample.completion}\n\n---\n\n{worth}", step
            )

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in finite(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.close()
