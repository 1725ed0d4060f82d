"""A tracker that remembers what it was told."""

from __future__ import annotations

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
