"""Who follows a training, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypedDict, TypeVar

from policygrad.trackers import Tracker
from policygrad.training.callbacks import Callback

M = TypeVar("M")


class Followers(TypedDict, total=False):
    """Who follows a training, as `Lifecycle` takes them."""

    display: Tracker | bool
    trackers: Sequence[Tracker]
    callbacks: Sequence[Callback]


@dataclass(frozen=True)
class Result(Generic[M]):
    """What a training leaves."""

    output: Path
    steps: int
    before: M
    """Held-out measurement before training; None without one, or where every reward failed. Likewise `after`."""
    after: M
    model: Path | None
    """None when the run was stopped before its last step; it can be resumed."""
    interrupted: bool = False
    """By a signal, a time limit or `stop()`, before what was asked of it was done."""
