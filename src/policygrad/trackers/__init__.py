"""What a run tells the world: JSON lines in its folder, and the terminal. Needs neither torch nor the rest of policygrad.

Steps count from 1: `step 12/200` means that twelve optimiser rounds of two hundred are done.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from policygrad.trackers.display import Display, PlainDisplay, Sample, Silent
from policygrad.trackers.jsonl import RunFiles
from policygrad.trackers.progress import Outline
from policygrad.trackers.words import change

__all__ = ["Display", "Outline", "PlainDisplay", "RunFiles", "Sample", "Silent", "change", "make_display"]


def make_display(
    stream: TextIO | None = None, plain: bool | None = None, clock: Callable[[], float] = time.monotonic
) -> Display:
    """A live display on a terminal, plain lines elsewhere; `plain` overrules. `stream` is standard output by default.

    Plain is also what NO_COLOR, TERM=dumb and an encoding without the block characters get.
    """
    stream = sys.stdout if stream is None else stream
    if plain is None:
        dumb = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "unknown")
        unicode = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
        plain = dumb or not unicode or not stream.isatty()
    if plain:
        return PlainDisplay(stream, clock)
    from policygrad.trackers.terminal.live import RichDisplay  # rich is loaded only for a terminal

    return RichDisplay.on(stream, clock)
