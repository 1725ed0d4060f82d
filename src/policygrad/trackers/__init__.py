"""Trackers: JSON lines in the run's folder, a terminal display, a notebook display, services. Needs no torch.

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
    """Return a live display in a notebook or on a terminal, and plain lines elsewhere.

    NO_COLOR, TERM=dumb and an encoding without block characters also give plain lines.

    Args:
        stream: None = standard output; a notebook's display is used only then.
        plain: Forces plain lines, or a live display; None = decide by the stream.
    """
    ipython = sys.modules.get("IPython")  # which a Jupyter kernel has always loaded
    shells = type(ipython.get_ipython()).__mro__ if ipython else ()  # with subclasses of Jupyter's, such as Colab's
    in_notebook = any(shell.__name__ == "ZMQInteractiveShell" for shell in shells)
    if stream is None and not plain and in_notebook:
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
