"""Trackio, local unless TRACKIO_SPACE_ID says otherwise: `trackio show --project policygrad`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.trackers.base import RunInfo, Tracker
from policygrad.trackers.services.base import COLUMNS, finite, flat, identity, project, remember, table, title


class Trackio(Tracker):
    """Metrics over steps, the configuration, some completions of every step."""

    def start(self, info: RunInfo) -> None:
        import trackio

        self._trackio: Any = trackio
        known = identity(info, "trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # it greets; the terminal is the display's
            self._run: Any = trackio.init(
                project=project("TRACKIO_PROJECT"),
                name=known or title(info),
                config=flat(info.config),
                resume="allow" if known else "never",
                auto_log_gpu=False,
            )
        remember(info.folder, "trackio", self._run.name)

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        rows = table(step, completions)
        shown = {"completions": self._trackio.Table(columns=[*COLUMNS], data=rows)} if rows else {}
        self._run.log({**finite(metrics), **shown}, step=step)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(finite(metrics), step=step)

    def close(self) -> None:
        if hasattr(self, "_run"):
            with contextlib.redirect_stdout(io.StringIO()):
                self._run.finish()
            del self._run
