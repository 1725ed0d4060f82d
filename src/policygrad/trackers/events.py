"""A run's progress as JSON objects, for `train --json`: one event per call of the tracker, documented in docs/reference/json.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from policygrad.trackers.base import RunInfo, Tracker


class Started(TypedDict):
    """The run begins, or continues at `first_step`."""

    event: Literal["started"]
    run: str | None
    """The run's folder."""
    title: str
    facts: Mapping[str, str]
    """Names and values, such as the model."""
    first_step: int
    steps: int
    """Number of the last step."""
    token_budget: int | None
    """Sampled tokens after which the run ends."""


class Step(TypedDict):
    """A step is done."""

    event: Literal["step"]
    step: int
    metrics: Mapping[str, float | None]
    """As in metrics.jsonl (docs/metrics.md); null = not finite."""


class Evaluation(TypedDict):
    """An evaluation of the weights after `step` steps; 0 = before training."""

    event: Literal["evaluation"]
    step: int
    metrics: Mapping[str, float | None]
    """eval/reward, eval/reward_stderr and so on."""


class Note(TypedDict):
    """A warning or remark."""

    event: Literal["note"]
    text: str


class Phase(TypedDict):
    """What the run does now, where that takes long."""

    event: Literal["phase"]
    text: str


class EventTracker(Tracker):
    """Passes events to a function, such as one that prints a line. The command itself reports the end of the run."""

    def __init__(self, emit: Callable[[Mapping[str, Any]], None]) -> None:
        self._emit, self._phase = emit, ""

    def start(self, info: RunInfo) -> None:
        self._emit(
            {
                "event": "started",
                "run": None if info.folder is None else str(info.folder),
                "title": info.title,
                "facts": dict(info.facts),
                "first_step": info.first_step,
                "steps": info.steps,
                "token_budget": info.token_budget,
            }
        )

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self._phase = ""
        self._emit({"event": "step", "step": step, "metrics": dict(metrics)})

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._emit({"event": "evaluation", "step": step, "metrics": dict(metrics)})

    def note(self, text: str) -> None:
        self._emit({"event": "note", "text": text})

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        if text and text != self._phase:  # its progress in between is for people
            self._emit({"event": "phase", "text": text})
        self._phase = text
