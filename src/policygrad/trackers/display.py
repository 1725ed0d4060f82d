"""The names and calls of before, until training/ has changed to `Tracker`: this file goes then, with `terminal/display.py`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, Self, TextIO

from policygrad.trackers.base import RunInfo as Outline
from policygrad.trackers.base import Sample, Tracker
from policygrad.trackers.plain import PlainTracker


class Display(Protocol):
    """Follows one run."""

    def start(self, info: Outline) -> None: ...

    def phase(self, text: str) -> None: ...

    def phase_progress(self, done: int, total: int) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float], sample: Sample | None = None) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self, summary: Mapping[str, str]) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class Silent(Tracker):
    """A tracker with the calls of before."""

    _text = ""

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        self._text = text
        super().phase(text, done, total)

    def phase_progress(self, done: int, total: int) -> None:
        self.phase(self._text, done, total)

    def step(self, step: int, metrics: Mapping[str, float], sample: Sample | None = None) -> None:
        self.log(step, metrics, [vars(sample)] if sample else ())


class PlainDisplay(Silent, PlainTracker):
    """Lines of text, with the calls of before."""


def make_display(
    stream: TextIO | None = None, plain: bool | None = None, clock: Callable[[], float] = time.monotonic
) -> Display:
    """A live display on a terminal, plain lines elsewhere."""
    stream = sys.stdout if stream is None else stream
    if plain is None:
        dumb = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "unknown")
        unicode = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
        plain = dumb or not unicode or not stream.isatty()
    if plain:
        return PlainDisplay(stream, clock)
    from policygrad.trackers.terminal.display import RichDisplay

    return RichDisplay.on(stream, clock)
