"""The live display: progress, the metrics of the last step, the reward so far, and a completion as the model writes now."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Self, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from policygrad.trackers.base import RunInfo
from policygrad.trackers.terminal.picture import ACCENT, GOOD, REMARK, draw, pairs
from policygrad.trackers.view import LiveTracker
from policygrad.trackers.words import clean, duration


class _Console(Console):
    """rich's own ends the program when nobody reads what it writes."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError at hand: this display is dropped, and the run goes on


class TerminalTracker(LiveTracker):
    """Redraws in place, four times a second. Whatever is printed meanwhile appears above."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console
        self._live: Live | None = None

    @classmethod
    def on(cls, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Self:
        return cls(_Console(file=stream, force_terminal=True, highlight=False), clock)

    def start(self, info: RunInfo) -> None:
        self.close()
        self._console.print(Text.assemble("\n ", (clean(info.title), f"bold {ACCENT}")))
        if info.facts:
            self._console.print(pairs(info.facts, ""))
        super().start(info)
        self._live = Live(
            self,
            console=self._console,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),  # a redirected stream is the user's, not the terminal's
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        before = self._view.phase
        super().phase(text, done, total)
        if self._live is None and self._view.phase not in ("", before):  # before the start, such as loading the model
            self._console.print(Text(f" {clean(text)}", "dim"))

    def note(self, text: str) -> None:
        self._console.print(pairs({"!": text}, REMARK, REMARK))

    def finish(self, summary: Mapping[str, str]) -> None:
        self.close()
        view = self.view
        word = ("done", f"bold {GOOD}") if self._progress.over else ("stopped", f"bold {REMARK}")
        place = f"  {view.unit} {view.words} after {duration(view.elapsed)}"
        self._console.print(Text.assemble("\n ", word, (place, "dim")))
        if summary:
            self._console.print(pairs(summary, "bold"))
        self._console.print()

    def close(self) -> None:
        """Stop redrawing and give the terminal back; the last picture stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from draw(self.view, console, options.max_width, console.height)
