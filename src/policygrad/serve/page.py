"""What the server does now: as values, as a page at `/`, and as lines for a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from policygrad.pages.render import render_page

WEB = files("policygrad.serve") / "web"
IDLE = "idle"
GONE = "its client is gone"
FORGOTTEN_SECONDS = 120.0
"""A session that has not been heard of for so long is not shown; clients write every ten seconds."""


@dataclass(frozen=True)
class Status:
    """The contents of the page and of the terminal line."""

    url: str
    key_hint: str
    """The value to which clients set TINKER_API_KEY."""
    up: str
    """Time since the start, as text."""
    summary: str
    bases: list[dict[str, Any]]
    sessions: list[dict[str, Any]]
    models: list[dict[str, Any]]
    """With `now`: computing, waiting, idle, or that the client is gone."""

    @property
    def title(self) -> str:
        """How many models have a client that goes on, and how many have none."""
        gone = sum(model["now"] == GONE for model in self.models)
        count = len(self.models) - gone
        text = f"{count} model{'s' * (count != 1)} in training"
        return f"{text}, {gone} whose client is gone" if gone else text


def render_status_page(status: Status) -> str:
    """Return the page."""
    return render_page(WEB / "status.html", {}, status=status)


def render_line(status: Status) -> str:
    """Return one line for a terminal."""
    busy = [f"{m['id'].partition(':')[0][:8]} {m['now']}" for m in status.models if m["now"] not in (IDLE, GONE)]
    return f"{len(status.sessions)} sessions, {status.title} · {status.summary}" + "".join(f" · {b}" for b in busy)


def summarise(counts: Mapping[str, int], queued: int) -> str:
    """Return what has been computed so far, in a sentence."""
    text = (
        f"{counts['requests']:,} requests, {counts['updates']:,} updates, {counts['tokens_trained']:,} tokens learned from, "
        f"{counts['tokens_sampled']:,} sampled"
    )
    return text + (f"; {queued} sampling requests wait." if queued else ".")


def is_recent(last: float) -> bool:
    return time.time() - last < FORGOTTEN_SECONDS
