"""Weights & Biases. WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and the rest of its environment variables count."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlparse

from policygrad.trackers.base import RunInfo, Tracker
from policygrad.trackers.services.base import COLUMNS, finite, identity, project, remember, table, title


class WandB(Tracker):
    """Metrics over `step`, the configuration, some completions of every step.

    Without a key nobody is asked for one: the run is kept offline in its folder, and `wandb sync` sends it. Steps that a
    resumed run does again are drawn a second time over the same `step`: nothing can be taken back there.
    """

    def start(self, info: RunInfo) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=project("WANDB_PROJECT"),
            name=title(info),
            id=identity(info, "wandb"),
            resume="allow",
            mode=mode,  # type: ignore[arg-type]  # whatever the variable says
            dir=None if info.folder is None else str(info.folder),
            config=dict(info.config),
            settings=wandb.Settings(silent=True, console="off"),  # the terminal is the display's
        )
        self._code = 1
        remember(info.folder, "wandb", self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        shown = self._wandb.Table(columns=[*COLUMNS], data=table(step, completions)) if completions else None
        self._run.log({"step": step, **finite(metrics), **({"completions": shown} if shown is not None else {})})

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **finite(metrics)})

    def finish(self, summary: Mapping[str, str]) -> None:
        self._code = 0
        self._run.summary.update(dict(summary))

    def close(self) -> None:
        if hasattr(self, "_run"):
            self._run.finish(exit_code=self._code)
            del self._run


def _has_key() -> bool:
    """Whether W&B could log in without asking anybody: by variable, or by the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
