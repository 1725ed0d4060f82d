"""Trackers that remember what they were told."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.trackers import RunInfo, Tracker


class Record(Tracker):
    def __init__(self) -> None:
        self.info: RunInfo | None = None
        self.notes: list[str] = []
        self.steps: list[tuple[int, Mapping[str, float]]] = []
        self.summary: Mapping[str, str] = {}

    @property
    def said(self) -> str:
        return "\n".join(self.notes)

    def start(self, info: RunInfo) -> None:
        self.info = info

    def note(self, text: str) -> None:
        self.notes.append(text)

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self.steps.append((step, metrics))

    def finish(self, summary: Mapping[str, str]) -> None:
        self.summary = summary


class Interrupting(Record):
    """Sends the process a SIGTERM at a step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        super().log(step, metrics, completions)
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
