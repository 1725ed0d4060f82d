"""What a run tells the world: JSON lines in its folder, a terminal, a notebook. Needs no torch.

Steps count from 1: `step 12/200` means that twelve training steps of two hundred are done.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from policygrad.trackers.base import CompositeTracker, RunInfo, Sample, Tracker
from policygrad.trackers.console import PlainTracker, format_change
from policygrad.trackers.jsonl import JsonlTracker

__all__ = [
    "CompositeTracker",
    "JsonlTracker",
    "PlainTracker",
    "RunInfo",
    "Sample",
    "Tracker",
    "default_tracker",
    "format_change",
]


def default_tracker(
    stream: TextIO | None = None, plain: bool | None = None, clock: Callable[[], float] = time.monotonic
) -> Tracker:
    """A live display in a notebook and on a terminal, plain lines elsewhere; `plain` overrules.

    stream: standard output by default; a notebook's display is for that alone.
    Plain is also what NO_COLOR, TERM=dumb and an encoding without the block characters get.
    """
    if stream is None and not plain and _in_notebook():
        from policygrad.trackers.notebook import NotebookTracker

        return NotebookTracker(clock)
    stream = sys.stdout if stream is None else stream
    if plain is None:
        dumb = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "unknown")
        unicode = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
        plain = dumb or not unicode or not stream.isatty()
    if plain:
        return PlainTracker(stream, clock)
    from policygrad.trackers.rich_display import TerminalTracker  # rich is loaded only for a terminal

    return TerminalTracker.for_stream(stream, clock)


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this, or a kind of one such as Colab's; whoever has not loaded IPython is in none."""
    ipython = sys.modules.get("IPython")
    kinds = type(ipython.get_ipython()).__mro__ if ipython else ()
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in kinds)
